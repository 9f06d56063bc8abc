"""``plainsong maintain``: shows what of a topic may be removed, and removes it from tables in HBase."""

from __future__ import annotations
