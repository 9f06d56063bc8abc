"""``plainsong maintain``: shows which rows of a topic may be removed, and removes them from tables in HBase."""

from __future__ import annotations
