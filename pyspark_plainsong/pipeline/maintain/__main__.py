"""``python -m pyspark_plainsong.pipeline.maintain``: the job as a program of its own."""

from __future__ import annotations

from pyspark_plainsong.pipeline.job import main
from pyspark_plainsong.pipeline.maintain.command import maintain

if __name__ == "__main__":
    main(maintain, "maintain")
