"""The accesses among judged messages: what usage and lineage are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from pipeline.audit.messages import ACCESS, DATASET

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def access_rows(judged: DataFrame) -> DataFrame:
    """One row for each good access: namespace, program, run, dataset (its name alone), access, time."""
    good = judged.where(F.col("reason").isNull() & (F.col("type") == ACCESS))
    name = F.substring(F.col("entity"), len(DATASET) + 2, 2_000)
    return good.select("namespace", "program", "run", name.alias("dataset"), "access", "time")
