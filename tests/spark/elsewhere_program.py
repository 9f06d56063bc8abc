"""A user's own program on a cluster whose workers' Python lacks our packages.

Its arguments: the daemon's URL, the advice of docs/spark.md, an interpreter without pyarrow, and Spark's settings.

It prints the outcome of each attempt as a JSON array on one line.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def main(url: str, advice: str, without_pyarrow: str, *settings: str) -> None:
    warnings.simplefilter("ignore")
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    import plainsong
    import pyspark_plainsong
    from pyspark_plainsong import DefaultSource

    builder = SparkSession.builder.appName("a user's own")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    options = {"url": url, "namespace": "default"}

    def write() -> object:
        rows = spark.range(4, numPartitions=2).selectExpr("CAST(id AS STRING) AS payload")
        return rows.write.format("plainsong").options(**options, topic="elsewhere").mode("append").save()

    def read() -> list[bytes]:
        rows = spark.read.format("plainsong").options(**options, subscribe="elsewhere", minPartitions=2).load()
        return sorted(bytes(row.payload) for row in rows.select("payload").collect())

    def stream() -> list[bytes]:
        rows = spark.readStream.format("plainsong").options(**options, subscribe="elsewhere").load().select("payload")
        query = rows.writeStream.format("parquet").options(path="streamed", checkpointLocation="checkpoint")
        query.trigger(availableNow=True).start().awaitTermination()
        return sorted(bytes(row.payload) for row in spark.read.parquet("streamed").collect())

    attempt("found by Spark", read)
    spark.dataSource.register(DefaultSource)
    attempt("registered", read)
    python, spark.sparkContext.pythonExec = spark.sparkContext.pythonExec, without_pyarrow
    spark.dataSource.register(DefaultSource)
    attempt("registered, without pyarrow", read)
    spark.sparkContext.pythonExec = python
    for module in (pyspark_plainsong, plainsong):
        cloudpickle.register_pickle_by_value(module)
    spark.dataSource.register(DefaultSource)
    attempt("registered by value", write)
    for module in (pyspark_plainsong, plainsong):
        cloudpickle.unregister_pickle_by_value(module)
    exec(compile(advice, "docs/spark.md", "exec"), {"spark": spark})
    attempt("with the zip, written", write)
    attempt("with the zip, read", read)
    attempt("with the zip, streamed", stream)
    spark.stop()


def attempt(how: str, what: Callable[[], object]) -> None:
    try:
        said = str(what())
    except Exception as error:  # noqa: BLE001
        told = re.findall(r"^\S*(?:Error|Lacking|DATA_SOURCE_NOT_FOUND\])\S* .*", str(error), re.MULTILINE)
        said = told[-1] if told else str(error)
    print(json.dumps([how, said]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
