"""``python -m pipeline.archive``."""

from pipeline.archive.command import archive
from pipeline.job import main

if __name__ == "__main__":
    main(archive, "archive")
