"""``python -m pipeline.maintain``: the job as a program of its own."""

from __future__ import annotations

from pipeline.job import main
from pipeline.maintain.command import maintain

if __name__ == "__main__":
    main(maintain, "maintain")
