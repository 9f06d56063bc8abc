"""``python -m pipeline.audit``: the audit job, which ``plainsong pipeline run audit`` starts."""

from pipeline.audit.commands import audit
from pipeline.job import main

if __name__ == "__main__":
    main(audit, "audit")
