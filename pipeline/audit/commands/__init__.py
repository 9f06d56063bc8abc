"""``plainsong pipeline run audit …``: keeps the tables, asks them, and makes input to try it with."""

from __future__ import annotations

from pipeline.audit.commands.ask import dead_letters, trail, usage
from pipeline.audit.commands.export import export
from pipeline.audit.commands.generate import generate
from pipeline.audit.commands.keep import audit
from pipeline.audit.commands.lineage import lineage

for each in (trail, usage, lineage, dead_letters, export, generate):
    audit.add_command(each)

__all__ = ["audit"]
