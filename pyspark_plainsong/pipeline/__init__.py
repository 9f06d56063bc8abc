"""The jobs that a deployment runs beside its daemons, on Spark: archive, replay, audit, report."""
