"""Time limits of waits in tests."""

from __future__ import annotations

#: A limit that no passing test reaches: a machine that stalls for seconds, or has ten times the load, must not fail a
#: test. A test of what happens *first* sets the time of the later event far beyond this.
PATIENCE_S = 180.0
#: The limit for Spark: starting a JVM, its jobs, and their Python processes.
SPARK_PATIENCE_S = 600.0
