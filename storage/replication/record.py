"""``REPLICATION`` in a data directory: the log that belongs to it, and the last place in that log that it has recorded.

It also records whether the directory is a standby's: the settings only decide what a new directory becomes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import trio

from storage.base import StoreDamaged, StoreTooNew
from storage.copy_parts import COPY_KEY
from storage.directory import (
    DEPOSED_PREFIX,
    REPLICATION_NAME,
    opening_failed,
    set_aside,
    sync_directory,
    write_whole,
)
from storage.replication.protocol import ROOT, Place
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Written for a primary whose directory began with the log, which version 1 can read.
FIRST_FORMAT = 1
#: With ``aside``: an earlier version would remove the store.
LAST_FORMAT = 3
FORMAT = 2
#: The row of a standby's store with its place in the log. It lags by one batch of segments at most: applying one
#: twice changes nothing.
FOLLOWED_KEY = COPY_KEY + b"standby"
#: The row with the progress of ``actors.settling``.
SETTLED_KEY = COPY_KEY + b"settled"
_HINT = "to begin another copy, remove this file and name a new prefix in replication.to"


@dataclass(frozen=True, slots=True)
class Settle:
    """Facts for a take-over about the primary, whose last commits may be missing."""

    cut_ms: int
    """The time of the last commit in the log."""
    ahead_ms: int
    """The most by which the primary's clock may have been ahead of this machine's when it acknowledged its last commit."""
    from_ms: int = 0
    """Ids begin no earlier than at this time, also if this machine's clock has been set back since the take-over; 0 in a
    record of an earlier version."""

    def first_ms(self, now_ms: int) -> int:
        """Return the time from which ids begin, if the rules are applied now."""
        return max(now_ms + max(0, self.ahead_ms), self.from_ms)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened while no store could record it."""

    action: str
    time_ms: int
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A directory's record of its copy. Replaced as a whole."""

    store: str
    """Identifies the directory's log; the prefix has the same in its FORMAT."""
    place: Place = ROOT
    """The log is the directory's own up to here."""
    runs: tuple[bytes, ...] = ()
    """Runs that were started on the directory since ``place`` was recorded. Recorded before they write anything."""
    base: int | None = None
    """The commit of a complete base from which the log goes to ``place`` without a gap; None if there is none."""
    base_ms: int = 0
    """When that base was made."""
    standby: bool = False
    """True if the directory follows the log of another one. ``place`` is then that of the base that it was built from, ``ROOT``
    while that is not complete."""
    shift: int | None = 0
    """Commit numbers minus the store's own numbers: a standby that has taken over continues those of the log. None if
    the next opening finds it: the store's last commit is that of ``place``."""
    until: int = 0
    """For a standby: its store is consistent from this commit on."""
    settle: Settle | None = None
    """Set if the rules of a restore must be applied before the store is served."""
    ahead_ms: int = 0
    """For a standby that is being rebuilt: see ``Followed``."""
    time_ms: int = 0
    """For a standby that was the primary: the time by which it had made every commit before ``place``."""
    aside: str = ""
    """For a standby: the folder in the directory to which the store of a deposed primary must still be moved."""
    events: tuple[Event, ...] = ()
    """To be recorded in the audit by the next primary on this directory."""

    @property
    def known_epoch(self) -> int:
        """The last epoch that the directory has seen begin."""
        return self.place.epoch

    @property
    def writer(self) -> bytes:
        """The run that writes, or wrote, the epoch of ``place``; empty if it is not known."""
        return self.runs[0] if self.runs and self.place != ROOT else b""

    def started(self, run: bytes) -> Record:
        """Return the record with another run."""
        return replace(self, runs=(*self.runs, run))

    def noted(self, action: str, time_ms: int, after: dict[str, Any]) -> Record:
        """Return the record with another event for the audit."""
        return replace(self, events=(*self.events, Event(action, time_ms, after)))

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
        if found["format"] > LAST_FORMAT:
            raise StoreTooNew(f"{path} has format {found['format']}; this version reads {LAST_FORMAT}")
        return _decoded(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise opening_failed(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} cannot be read", hint=_HINT) from error


def _decoded(found: dict[str, Any]) -> Record:
    base, settle = found["base"], found.get("settle")
    return Record(
        found["store"],
        _place_of(found["place"]),
        tuple(map(bytes.fromhex, found["runs"])),
        None if base is None else base["commit"],
        0 if base is None else base["timeMs"],
        standby=bool(found.get("standby", False)),
        shift=found.get("shift", 0),
        until=int(found.get("until", 0)),
        settle=None if settle is None else _settle_of(settle),
        ahead_ms=int(found.get("aheadMs", 0)),
        time_ms=int(found.get("timeMs", 0)),
        aside=str(found.get("aside", "")),
        events=tuple(Event(each["action"], each["timeMs"], each["after"]) for each in found.get("events", ())),
    )


def _settle_of(found: dict[str, Any]) -> Settle:
    return Settle(int(found["cutMs"]), int(found["aheadMs"]), int(found.get("fromMs", 0)))


def _place_of(found: dict[str, Any]) -> Place:
    clean = bool(found.get("clean", False))
    return Place(found["epoch"], found["number"], bytes.fromhex(found["before"]), found["commit"], clean)


def _shown(place: Place) -> dict[str, Any]:
    return {
        "epoch": place.epoch,
        "number": place.number,
        "before": place.before.hex(),
        "commit": place.commit,
        "clean": place.clean,
    }


@dataclass(frozen=True, slots=True)
class Followed:
    """The value of ``FOLLOWED_KEY``."""

    place: Place
    time_ms: int
    """The time of the last commit."""
    mode: int
    """The mode of the last segment; 0 if it is not known."""
    ahead_ms: int = 0
    """A lower bound of how far the primary's clock was ahead, from all segments up to those in the same batch. It is only a
    bound, since each segment took some time until it was read."""

    def encode(self) -> bytes:
        """Encode the row's value."""
        shown = {"place": _shown(self.place), "timeMs": self.time_ms, "mode": self.mode, "aheadMs": self.ahead_ms}
        return json.dumps(shown).encode()

    @classmethod
    def of(cls, record: Record, value: bytes | None) -> Followed:
        """Return the place up to which a standby's store has certainly followed, from its row or the directory's record.

        The row may be from an earlier time as a standby. Raises StoreDamaged.
        """
        row = None if value is None else cls.decode(value)
        if row is not None and (row.place.epoch, row.place.number) > (record.place.epoch, record.place.number):
            return row
        return cls(record.place, record.time_ms or record.base_ms, 0)

    @classmethod
    def decode(cls, value: bytes) -> Followed:
        """Decode the row's value. Raises StoreDamaged."""
        try:
            found = json.loads(value)
            place, ahead_ms = _place_of(found["place"]), int(found.get("aheadMs", 0))
            return cls(place, int(found["timeMs"]), int(found["mode"]), ahead_ms)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamaged("the standby's place in the log cannot be read") from error


def write_record(directory: Path, record: Record) -> None:
    """Replace a directory's record, durably. Blocks. Raises StoreUnusable."""
    is_first = not (record.standby or record.shift != 0 or record.settle)
    shown: dict[str, Any] = {
        "format": LAST_FORMAT if record.aside else FIRST_FORMAT if is_first else FORMAT,
        "store": record.store,
        "place": _shown(record.place),
        "runs": [run.hex() for run in record.runs],
        "base": None if record.base is None else {"commit": record.base, "timeMs": record.base_ms},
        "standby": record.standby,
        "shift": record.shift,
        "until": record.until,
    }
    if record.settle is not None:
        settle = record.settle
        shown["settle"] = {"cutMs": settle.cut_ms, "aheadMs": settle.ahead_ms, "fromMs": settle.from_ms}
    if record.ahead_ms:
        shown["aheadMs"] = record.ahead_ms
    if record.time_ms:
        shown["timeMs"] = record.time_ms
    if record.aside:
        shown["aside"] = record.aside
    if record.events:
        shown["events"] = [
            {"action": each.action, "timeMs": each.time_ms, "after": each.after} for each in record.events
        ]
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


class RecordFile:
    """The record of a directory that this process has locked, for its event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = Record("")
        """The record as last changed, even if it could not be written."""
        #: Held while the file is replaced, so that the files are in the order of the changes.
        self._changing = trio.Lock()

    async def read(self) -> Record | None:
        """Return what ``read_record`` does. Raises StoreTooNew, StoreDamaged, StoreUnusable."""
        return await in_thread(read_record, self.directory, max_wait_s=inf)

    async def change(self, change: Callable[[Record], Record]) -> None:
        """Change the record, durably, also if the caller is cancelled. Raises StoreUnusable."""
        with trio.CancelScope(shield=True):
            async with self._changing:
                self.record = record = change(self.record)
                await in_thread(write_record, self.directory, record, max_wait_s=inf)


def rejoin(directory: Path, record: Record, now_ms: int) -> str:
    """Make the locked directory of a deposed primary a standby's, and return the folder there that has its store.

    Writing the new record decides: before that, the directory is the deposed primary's; afterwards it is a standby's, which
    moves the rest of the store. So a kill at any moment does no harm: call it again. Blocks. Raises StoreUnusable.

    Args:
      record: the directory's record: that of the deposed primary, or of an interrupted ``rejoin``.
    """
    if not record.standby:
        aside = directory / f"{DEPOSED_PREFIX}{now_ms}"
        try:
            aside.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise opening_failed(error, aside) from error
        write_record(aside, record)
        after = {"aside": str(aside), "epoch": record.place.epoch, "commit": record.place.commit}
        record = Record(record.store, standby=True, aside=aside.name).noted("replication.rejoin", now_ms, after)
        write_record(directory, record)
    set_aside(directory, record.aside)
    write_record(directory, replace(record, aside=""))
    return record.aside
