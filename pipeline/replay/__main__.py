"""``python -m pipeline.replay``."""

from pipeline.job import main
from pipeline.replay.command import replay

if __name__ == "__main__":
    main(replay, "replay")
