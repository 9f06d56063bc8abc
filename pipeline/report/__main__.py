"""``python -m pipeline.report``: the job as a program of its own."""

from __future__ import annotations

from pipeline.job import main
from pipeline.report.command import report

if __name__ == "__main__":
    main(report, "report")
