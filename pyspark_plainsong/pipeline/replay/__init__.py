"""Replays archived messages into a topic: in their order, each once, with their first ids as attributes."""
