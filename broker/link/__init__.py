"""Links: one connection on which many calls are under way at once, between instances and between processes."""

from __future__ import annotations
