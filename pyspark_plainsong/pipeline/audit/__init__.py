"""Keeps audit messages of programs and of metadata as tables: who accessed what, which program uses what, what came from what."""
