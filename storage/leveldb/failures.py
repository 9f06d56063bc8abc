"""The seam: what plyvel raises from an open database, and what it means here."""

from __future__ import annotations

import plyvel

from storage.base import StoreError
from storage.refusals import DAMAGED_HINT, message_of

#: All that a call into the database may raise; RuntimeError is plyvel's word for a closed handle.
FOREIGN = (plyvel.Error, OSError, RuntimeError, MemoryError)

#: Words of LevelDB's messages → what to do. The first match counts.
_RUNNING: tuple[tuple[str, str], ...] = (
    ("No space left", "free some space; the store opens itself again"),
    ("Disk quota exceeded", "raise the quota; the store opens itself again"),
    ("Corruption", DAMAGED_HINT),
    ("Input/output error", "the disk fails: see the kernel's log, and have a copy ready"),
)


def call_failed(error: BaseException, doing: str) -> StoreError:
    """What to raise when a call into an open database failed."""
    text = message_of(error)
    hint = next((hint for words, hint in _RUNNING if words in text), "")
    return StoreError(f"{doing}: {text}", hint=hint)
