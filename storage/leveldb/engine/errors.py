"""LevelDB's errors, translated for callers and for the log."""

from __future__ import annotations

import logging
import re
import time

import plyvel

from storage.base import StoreError, Unreadable
from storage.directory import DAMAGED_HINT, message_of

log = logging.getLogger(__name__)
#: The folders of a path, without its last part.
_FOLDERS = re.compile(r"/(?:[^/:]+/)+")
#: The exceptions of calls into the database. plyvel raises RuntimeError for a closed handle.
FOREIGN = (plyvel.Error, OSError, RuntimeError, MemoryError)
#: Text in LevelDB's message → hint. The first match counts.
_RUNNING: tuple[tuple[str, str], ...] = (
    ("No space left", "free some space; the store then reopens by itself"),
    ("Disk quota exceeded", "raise the quota; the store then reopens by itself"),
    ("Corruption", DAMAGED_HINT),
    ("No such file", "a file of the store is missing: put it back from a copy, or restore a backup"),
    ("Input/output error", "the disk is failing: check the kernel's log, and keep a backup ready"),
)
#: Texts in LevelDB's messages about an unreadable block or table, next to which other rows can be read.
_UNREADABLE = ("Corruption", "Input/output error", "No such file")


#: A repeated failure within this time is logged at debug level: the search for the end of a damaged block meets the
#: same one about a hundred times.
QUIET_S = 10.0


class _Failures:
    """The last failure that was logged at error level."""

    def __init__(self) -> None:
        self._last = ""
        self._at_s = 0.0

    def level_of(self, text: str) -> int:
        now_s = time.monotonic()
        if text == self._last and now_s - self._at_s < QUIET_S:
            return logging.DEBUG
        self._last, self._at_s = text, now_s
        return logging.ERROR


_failures = _Failures()


def call_failed(error: BaseException, doing: str) -> StoreError:
    """Log a failed call into an open database, and return the error to raise."""
    text = message_of(error)
    log.log(_failures.level_of(f"{doing}: {text}"), "the store failed", extra={"doing": doing, "why": text})
    hint = next((hint for words, hint in _RUNNING if words in text), "")
    kind = Unreadable if any(words in text for words in _UNREADABLE) else StoreError
    return kind(f"{doing}: {without_folders(text)}", hint=hint)


def without_folders(text: str) -> str:
    """Remove folders from a text for clients; only the log has the paths of files."""
    return _FOLDERS.sub("", text)
