"""``REPLICATION`` in a data directory: the log that belongs to it, and the place up to which it has seen that log."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from storage.base import StoreDamaged, StoreTooNew
from storage.directory import REPLICATION_NAME, opening_failed, sync_directory, write_whole
from storage.replication.protocol import ROOT, Place

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
_HINT = "to begin another copy, remove this file and name a new prefix in replication.to"


@dataclass(frozen=True, slots=True)
class Record:
    """What a directory keeps of its copy. Replaced as a whole."""

    store: str
    """Identifies the directory's log; the prefix has the same in its FORMAT."""
    place: Place = ROOT
    """The log is the directory's own up to here."""
    runs: tuple[bytes, ...] = ()
    """Runs that were started on the directory since ``place`` was noted. Noted before they write anything."""
    base: int | None = None
    """The commit of a complete base from which the log goes to ``place`` without a gap; None if there is none."""
    base_ms: int = 0
    """When that base was made."""

    @property
    def known_epoch(self) -> int:
        """The last epoch that the directory has seen begin."""
        return self.place.epoch

    def started(self, run: bytes) -> Record:
        """Return the record with another run."""
        return replace(self, runs=(*self.runs, run))

    def at(self, place: Place, run: bytes) -> Record:
        """Return the record with a later place, in an epoch of ``run``."""
        return replace(self, place=place, runs=(run,))


def read_record(directory: Path) -> Record | None:
    """Return a directory's record; None if it has none. Blocks.

    Raises:
      StoreTooNew, StoreDamaged, StoreUnusable: it cannot be read.
    """
    path = directory / REPLICATION_NAME
    try:
        found = json.loads(path.read_bytes())
        if found["format"] > FORMAT:
            raise StoreTooNew(f"{path} has format {found['format']}; this version reads {FORMAT}")
        return _decoded(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise opening_failed(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} cannot be read", hint=_HINT) from error


def _decoded(found: dict[str, Any]) -> Record:
    at, base = found["place"], found["base"]
    place = Place(at["epoch"], at["number"], bytes.fromhex(at["before"]), at["commit"])
    return Record(
        found["store"],
        place,
        tuple(map(bytes.fromhex, found["runs"])),
        None if base is None else base["commit"],
        0 if base is None else base["timeMs"],
    )


def write_record(directory: Path, record: Record) -> None:
    """Replace a directory's record, durably. Blocks. Raises StoreUnusable."""
    place = record.place
    shown = {
        "format": FORMAT,
        "store": record.store,
        "place": {
            "epoch": place.epoch,
            "number": place.number,
            "before": place.before.hex(),
            "commit": place.commit,
        },
        "runs": [run.hex() for run in record.runs],
        "base": None if record.base is None else {"commit": record.base, "timeMs": record.base_ms},
    }
    try:
        write_whole(directory / REPLICATION_NAME, json.dumps(shown).encode())
    except OSError as error:
        raise opening_failed(error, directory) from error


def remove_record(directory: Path) -> None:
    """Remove a directory's record, durably. Blocks. Raises StoreUnusable."""
    try:
        (directory / REPLICATION_NAME).unlink(missing_ok=True)
        sync_directory(directory)
    except OSError as error:
        raise opening_failed(error, directory) from error
