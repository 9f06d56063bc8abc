"""The embedded store: volumes of messages beside a database of metadata, one synced batch per group of commits."""

from __future__ import annotations

from storage.leveldb.options import LevelDBOptions
from storage.leveldb.store import LevelDBStore

__all__ = ["LevelDBOptions", "LevelDBStore"]
