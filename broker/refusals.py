"""Aggregates refusals and repeated changes into records that wait to be written, round robin by name.

Authenticated names and networks without a name are kept apart: an address costs an attacker less than a credential.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: Refusals of one kind within this time are one record.
GATHER_S = 10.0
#: Kinds kept for all names together, and the same number for all networks. Beyond that, records are lost, and counted.
MAX_KINDS = 10_000
#: Waiting records of one name. Its further refusals of an action, whatever their targets, are one record.
WAITING_EACH = 15
EVERYTHING_ELSE = "*"
#: Kinds of repeated changes that are counted for one name; beyond that, each change is a record.
MAX_CHANGES_EACH = 1_000


class RefusalKind(NamedTuple):
    """The key of refusals, or changes, that share one record."""

    who: str
    """A name, or a network."""
    action: str
    target: str


@dataclass(slots=True)
class _Gathered:
    since_s: float
    record: dict[str, Any]
    repeated: int
    """Occurrences that are in no record yet."""
    waits: bool = False
    """True if its record is in the sender's queue."""
    is_recorded: bool = False
    """True once its first record was written."""


class Gathering:
    """The kinds of all names, or of all networks."""

    def __init__(self) -> None:
        self._kinds: dict[RefusalKind, _Gathered] = {}
        self._of: Counter[str] = Counter()
        #: Waiting records by sender; the sender whose turn is next comes first.
        self._queues: OrderedDict[str, deque[RefusalKind]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def waiting(self) -> int:
        """Number of records that wait to be written."""
        return sum(map(len, self._queues.values()))

    def refuse(self, kind: RefusalKind, now_s: float, record: Callable[[str], dict[str, Any]]) -> bool:
        """Count a refusal. False: it is lost, because there are too many kinds.

        Args:
          record: makes the record of a kind's first refusal, given the target.
        """
        if kind not in self._kinds and len(self._queues.get(kind.who, ())) >= WAITING_EACH:
            kind = kind._replace(target=EVERYTHING_ELSE)
        known = self._kinds.get(kind)
        if known is not None:
            known.repeated += 1
            return True
        if len(self._kinds) >= MAX_KINDS:
            return False
        self._add(kind, _Gathered(now_s, record(kind.target), 1))
        self._queue(kind)
        return True

    def repeat(self, kind: RefusalKind, after: Any) -> bool:
        """Count a repeated change recorded recently; ``after`` is its result. False: it is the first."""
        known = self._kinds.get(kind)
        if known is None:
            return False
        known.repeated += 1
        known.record["after"] = after
        return True

    def watch(self, kind: RefusalKind, now_s: float, record: dict[str, Any]) -> None:
        """Count repetitions of a recorded change from now on, unless there are too many kinds."""
        if len(self._kinds) < MAX_KINDS and self._of[kind.who] < MAX_CHANGES_EACH:
            self._add(kind, _Gathered(now_s, record, 0, is_recorded=True))

    def close(self, now_s: float) -> None:
        """End kinds that are old: queue a record of those that were repeated, drop the others."""
        for kind, gathered in list(self._kinds.items()):
            if gathered.waits or now_s - gathered.since_s < GATHER_S:
                continue
            if gathered.repeated:
                self._queue(kind)
            else:
                self._forget(kind)

    def next(self, now_s: float, at: str) -> dict[str, Any] | None:
        """Return the next record, of the sender that has waited longest for its turn; None if none waits."""
        if not self._queues:
            return None
        who, queue = self._queues.popitem(last=False)
        kind = queue.popleft()
        if queue:
            self._queues[who] = queue
        gathered = self._kinds[kind]
        record = {**gathered.record, "repeated": gathered.repeated}
        if gathered.is_recorded:
            record["at"] = at
        if now_s - gathered.since_s >= GATHER_S:
            self._forget(kind)
        else:
            gathered.repeated, gathered.waits, gathered.is_recorded = 0, False, True
        return record

    def _add(self, kind: RefusalKind, gathered: _Gathered) -> None:
        self._kinds[kind] = gathered
        self._of[kind.who] += 1

    def _queue(self, kind: RefusalKind) -> None:
        self._kinds[kind].waits = True
        self._queues.setdefault(kind.who, deque()).append(kind)

    def _forget(self, kind: RefusalKind) -> None:
        del self._kinds[kind]
        self._of[kind.who] -= 1
        if not self._of[kind.who]:
            del self._of[kind.who]
