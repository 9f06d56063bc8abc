"""Archived messages into a topic again: in their order, each once, with their first ids as attributes."""
