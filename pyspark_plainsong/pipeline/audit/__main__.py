"""``python -m pyspark_plainsong.pipeline.audit``, which ``plainsong pipeline run audit`` starts."""

from __future__ import annotations

from pyspark_plainsong.pipeline.audit.command import audit
from pyspark_plainsong.pipeline.job import main

if __name__ == "__main__":
    main(audit, "audit")
