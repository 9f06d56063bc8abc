"""Describes stored rows, summarizes a stopped store, and opens one without changing it."""
