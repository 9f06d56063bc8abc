"""The embedded store: one LevelDB for all three tables, one synced batch per group of commits."""

from __future__ import annotations

from storage.leveldb.database import LevelDBOptions
from storage.leveldb.store import LevelDBStore

__all__ = ["LevelDBOptions", "LevelDBStore"]
