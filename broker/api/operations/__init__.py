"""The daemon over HTTP, for operators: health, overview, cluster, backups, scrubs, definitions, the console."""
