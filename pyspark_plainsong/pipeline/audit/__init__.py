"""Keeps audit messages of programs and of metadata as tables: who touched what, which program uses what, what came from what."""
