"""``python -m pyspark_plainsong.pipeline.archive``, which ``plainsong pipeline run archive`` starts."""

from __future__ import annotations

from pyspark_plainsong.pipeline.archive.command import archive
from pyspark_plainsong.pipeline.job import main

if __name__ == "__main__":
    main(archive, "archive")
