"""Why a store cannot be opened: the words of LevelDB and of the system, and what each means here."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from storage.base import StoreDamaged, StoreFull, StoreInUse, StoreReadOnly, StoreUnusable

if TYPE_CHECKING:
    from pathlib import Path

DAMAGED_HINT = (
    "keep the daemon stopped, copy the whole directory, look at it with `plainsong store explain`, "
    "and restore a copy; nothing was changed, and nothing is repaired by itself"
)
FULL_HINT = "free some space on this file system and start again; nothing is lost"
READ_ONLY_HINT = "make the directory writable for this user, or name another one with --data-dir"

#: Words of LevelDB's messages → the class of a failed opening and what to do. The first match counts.
_WORDS: tuple[tuple[str, type[StoreUnusable], str], ...] = (
    ("No space left", StoreFull, FULL_HINT),
    ("Disk quota exceeded", StoreFull, FULL_HINT),
    ("Read-only file system", StoreReadOnly, READ_ONLY_HINT),
    ("Permission denied", StoreReadOnly, READ_ONLY_HINT),
    ("Operation not permitted", StoreReadOnly, READ_ONLY_HINT),
    ("already held", StoreInUse, "stop the other process first"),
    ("temporarily unavailable", StoreInUse, "stop the other process first"),
    ("Corruption", StoreDamaged, DAMAGED_HINT),
    ("No such file", StoreDamaged, DAMAGED_HINT),
    ("does not exist", StoreDamaged, DAMAGED_HINT),
)


def opening_failed(error: BaseException, path: Path) -> StoreUnusable:
    """What to raise when LevelDB, or the system, would not let us into ``path``."""
    text = message_of(error)
    for words, kind, hint in _WORDS:
        if words in text:
            return kind(f"{path}: {text}", hint=hint)
    return StoreUnusable(f"{path}: {text}")


def message_of(error: BaseException) -> str:
    """An exception's text; LevelDB's own is bytes."""
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return str(error)
    said = error.args[0] if error.args else type(error).__name__
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
