"""``python -m pyspark_plainsong.pipeline.replay``, which ``plainsong pipeline run replay`` starts."""

from __future__ import annotations

from pyspark_plainsong.pipeline.job import main
from pyspark_plainsong.pipeline.replay.command import replay

if __name__ == "__main__":
    main(replay, "replay")
