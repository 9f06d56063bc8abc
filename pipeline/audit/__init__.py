"""Audit messages of programs and of metadata, kept as tables: who touched what, which program uses what, what came from what."""
