"""The jobs that a deployment runs on Spark in addition to its daemons: archive, replay, audit, report."""
