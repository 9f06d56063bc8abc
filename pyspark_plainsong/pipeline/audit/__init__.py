"""The job `audit`: keeps audit messages as tables: who accessed what, which program uses what, what came from what."""
