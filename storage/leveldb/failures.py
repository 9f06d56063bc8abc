"""The seam: what plyvel raises from an open database, and what it means here."""

from __future__ import annotations

import logging
import re

import plyvel

from storage.base import StoreError
from storage.refusals import DAMAGED_HINT, message_of

log = logging.getLogger(__name__)

#: The folders of a path, but not its last part.
_FOLDERS = re.compile(r"/(?:[^/:]+/)+")

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
    log.error("the store failed", extra={"doing": doing, "why": text})
    hint = next((hint for words, hint in _RUNNING if words in text), "")
    # Clients are told what failed; where the files are is for the log.
    return StoreError(f"{doing}: {_FOLDERS.sub('', text)}", hint=hint)
