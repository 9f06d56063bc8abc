"""Describes stored rows, sums up a stopped store, and opens one without changing it."""
