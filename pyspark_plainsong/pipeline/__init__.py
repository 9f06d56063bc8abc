"""Jobs that a deployment needs beside its daemons, on Spark: archive, replay, audit, report."""
