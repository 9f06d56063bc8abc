"""Replicas of the transaction service's state on other instances, and their updates.

    the service     numbers its changes, and records the changed pointers
    a replica       sends its version, and gets the standing of every pointer that changed since
    a full update   if its version is of another owner, or too old

Only durable state is sent. The update with the higher version is newer, in whichever order updates arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.transactions.view import Change, Visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong.protocol.transactions.manager import ManagerCore
    from plainsong.protocol.transactions.transaction import Durable, Standing
    from plainsong.protocol.transactions.view import View

#: Changed pointers to keep; a replica with a greater lag gets a full update.
MAX_CHANGES = 65_536

_DURABLE: tuple[Durable, ...] = ("in_progress", "invalid", "committed", "aborted", "pruned", "forgotten")


class ReplicaVersion(NamedTuple):
    """The version of a replica's state."""

    term: int
    """The epoch of the service's owner; later owners have higher ones. -1: no state."""
    changes: int
    """The number of changes under this owner."""


UNKNOWN_VERSION = ReplicaVersion(-1, 0)


@dataclass(frozen=True, slots=True)
class ReplicaUpdate:
    """An update of a replica: the complete state, or the changes since its version."""

    version: ReplicaVersion
    complete: bool
    read_pointer: int
    first: int
    """The first pointer ever issued; 0 if none."""
    forgotten: int
    """A pointer up to this one without a record was decided."""
    pointers: Mapping[Durable, tuple[int, ...]]

    def packed(self) -> bytes:
        """Encode the update for another instance."""
        lists = [list(self.pointers.get(each, ())) for each in _DURABLE]
        fields = [*self.version, self.complete, self.read_pointer, self.first, self.forgotten, lists]
        packed: bytes = msgpack.packb(fields)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> ReplicaUpdate:
        """Decode the result of ``packed``. Raises MalformedTransaction."""
        try:
            term, count, complete, read_pointer, first, forgotten, lists = msgpack.unpackb(packed)
            pointers = {each: tuple(map(int, given)) for each, given in zip(_DURABLE, lists, strict=True)}
            version = ReplicaVersion(int(term), int(count))
            return cls(version, bool(complete), int(read_pointer), int(first), int(forgotten), pointers)
        except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
            raise MalformedTransaction("the state of the transaction service cannot be read") from error


class PointerChanges:
    """The changed pointers, in the order of their changes; recorded by the service."""

    def __init__(self, term: int, max_changes: int = MAX_CHANGES) -> None:
        self._term = term
        self._max_changes = max_changes
        self._count = 0
        self._changed: OrderedDict[int, int] = OrderedDict()
        self._dropped = 0

    @property
    def version(self) -> ReplicaVersion:
        return ReplicaVersion(self._term, self._count)

    def record(self, pointers: Iterable[int]) -> None:
        """Record that pointers have changed."""
        self._count += 1
        for pointer in pointers:
            self._changed[pointer] = self._count
            self._changed.move_to_end(pointer)
        while len(self._changed) > self._max_changes:
            self._dropped = self._changed.popitem(last=False)[1]

    def since(self, known: ReplicaVersion) -> list[int] | None:
        """Return the pointers that changed after version ``known``; None if they are no longer recorded."""
        if known.term != self._term or not self._dropped <= known.changes <= self._count:
            return None
        found = []
        for pointer, count in reversed(self._changed.items()):
            if count <= known.changes:
                break
            found.append(pointer)
        return found


def replica_update(core: ManagerCore, changes: PointerChanges, known: ReplicaVersion) -> ReplicaUpdate:
    """Return the update for a replica of version ``known``."""
    pointers = changes.since(known)
    complete = pointers is None
    among = core.ledger.by_pointer if pointers is None else pointers
    lists: dict[Durable, list[int]] = {each: [] for each in _DURABLE}
    for pointer in among:
        lists[core.durable(pointer)].append(pointer)
    if complete:
        lists["forgotten"] = []
    head = core.ledger.head
    return ReplicaUpdate(
        changes.version,
        complete,
        core.visible.read_pointer,
        head.first,
        head.forgotten,
        {each: tuple(found) for each, found in lists.items()},
    )


class ReplicaState:
    """The service's state on another instance."""

    def __init__(self) -> None:
        self.version = UNKNOWN_VERSION
        self._standings: dict[int, Durable] = {}
        self._first = self._forgotten = 0
        self._visible = Visible(0, (), ())

    def __repr__(self) -> str:
        return f"<ReplicaState {self.version.term}.{self.version.changes}, {len(self._standings)} pointers>"

    def apply(self, given: ReplicaUpdate) -> bool:
        """Apply an update. Returns False if the replica is newer."""
        if given.version < self.version or (given.version.term != self.version.term and not given.complete):
            return False
        if given.complete:
            self._take_everything(given)
        else:
            self._take_changes(given)
        self._first, self._forgotten = given.first, given.forgotten
        self.version = given.version
        return True

    def _take_everything(self, given: ReplicaUpdate) -> None:
        self._standings = {each: state for state, found in given.pointers.items() for each in found}
        in_progress, invalids = (given.pointers.get(each, ()) for each in ("in_progress", "invalid"))
        self._visible = Visible(given.read_pointer, in_progress, invalids)

    def _take_changes(self, given: ReplicaUpdate) -> None:
        changes = []
        for state, found in given.pointers.items():
            for pointer in found:
                if state == "forgotten":
                    self._standings.pop(pointer, None)
                else:
                    self._standings[pointer] = state
            is_open, is_invalid = state == "in_progress", state == "invalid"
            changes.append(
                Change(
                    opened=found if is_open else (),
                    closed=() if is_open else found,
                    listed=found if is_invalid else (),
                    unlisted=() if is_invalid else found,
                )
            )
        if any(given.pointers.values()) or given.read_pointer != self._visible.read_pointer:
            self._visible.apply(changes, given.read_pointer)

    def standing(self, pointer: int) -> Standing:
        known = self._standings.get(pointer)
        if known is None or known == "forgotten":
            return "committed" if 0 < self._first <= pointer <= self._forgotten else "unknown"
        return "invalid" if known == "pruned" else known

    def view(self) -> View:
        """Return the view for readers of committed messages; the same object until it changes."""
        return self._visible.view()
