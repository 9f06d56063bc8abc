"""``python -m pyspark_plainsong.pipeline.report``, which ``plainsong pipeline run report`` starts."""

from __future__ import annotations

from pyspark_plainsong.pipeline.job import main
from pyspark_plainsong.pipeline.report.command import report

if __name__ == "__main__":
    main(report, "report")
