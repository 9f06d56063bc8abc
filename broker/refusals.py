"""Records of refusals and of repeated changes that wait to be written: each name has its turn, and repeats are counted.

Names that were proven, and networks without a name, are kept apart: an address costs an attacker less than a credential.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

#: Refusals of one kind within this time are one record.
GATHER_S = 10.0
#: Kinds that are kept of all names together, and as many of all networks together. Beyond, records are lost, and counted.
MAX_KINDS = 10_000
#: Records of one name that may wait to be written; its further refusals, of whatever target, are one record.
WAITING_EACH = 15
EVERYTHING_ELSE = "*"
#: Kinds of changes of one name that are counted together; beyond, each change is a record.
MAX_CHANGES_EACH = 1_000


class RefusalKind(NamedTuple):
    """Refusals, or changes, that are one record."""

    who: str
    """A name, or a network."""
    action: str
    target: str


@dataclass(slots=True)
class _Gathered:
    since_s: float
    record: dict[str, Any]
    repeated: int
    """How many are in no record yet."""
    waits: bool = False
    """True if a record of it is in the queue of its sender."""
    is_recorded: bool = False
    """True once the first record was taken to be written."""


class Gathering:
    """The kinds of one sort of senders: all names, or all networks."""

    def __init__(self) -> None:
        self._kinds: dict[RefusalKind, _Gathered] = {}
        self._of: Counter[str] = Counter()
        #: What waits to be written, by sender; the sender whose turn is next comes first.
        self._queues: OrderedDict[str, deque[RefusalKind]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def waiting(self) -> int:
        """How many records wait to be written."""
        return sum(map(len, self._queues.values()))

    def refuse(self, kind: RefusalKind, now_s: float, record: Callable[[str], dict[str, Any]]) -> bool:
        """Counts a refusal. False: there is no room for its kind, and it is lost.

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
        """Counts a change that was recorded not long ago; ``after`` is what it made. False: this is the first."""
        known = self._kinds.get(kind)
        if known is None:
            return False
        known.repeated += 1
        known.record["after"] = after
        return True

    def watch(self, kind: RefusalKind, now_s: float, record: dict[str, Any]) -> None:
        """Counts the changes that repeat this one, which is recorded, from now on; unless there are too many kinds."""
        if len(self._kinds) < MAX_KINDS and self._of[kind.who] < MAX_CHANGES_EACH:
            self._add(kind, _Gathered(now_s, record, 0, is_recorded=True))

    def close(self, now_s: float) -> None:
        """Ends the kinds that are old: those that were repeated wait to be written, the others are forgotten."""
        for kind, gathered in list(self._kinds.items()):
            if gathered.waits or now_s - gathered.since_s < GATHER_S:
                continue
            if gathered.repeated:
                self._queue(kind)
            else:
                self._forget(kind)

    def next(self, now_s: float, at: str) -> dict[str, Any] | None:
        """The next record to write, of the sender that has waited for its turn longest; None: none waits."""
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
