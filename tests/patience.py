"""How long a test waits for what must come."""

from __future__ import annotations

#: No limit under test: a test that passes never waits it out, and a machine that stands still for seconds, or has ten
#: times as much to do, is no failure. Where an answer must come *before* something else would, a test sets that other
#: time far beyond this one.
PATIENCE_S = 180.0
#: The same of what Spark does: a JVM that starts, its jobs, and the processes of Python that they start.
SPARK_PATIENCE_S = 600.0
