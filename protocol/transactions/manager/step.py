"""One step of the service: what it wants written, and what is true once that is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from protocol.effects import Delete, Table, put_one
from protocol.records import pack_record
from protocol.transactions.manager.rows import CHANGES, HEAD, PASS, TRANSACTION, enlisted_key, service_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from protocol.effects import Operation
    from protocol.errors import PlainsongError
    from protocol.names import TopicName
    from protocol.transactions.manager.answers import State
    from protocol.transactions.manager.record import Record
    from protocol.transactions.manager.rows import ChangeSet, Head, LastPass
    from protocol.transactions.manager.visible import Change


class Now(NamedTuple):
    """The world at one step, read once."""

    wall_ms: int
    """The machine's clock; may jump."""
    mono_s: float
    """A clock that only goes forward, for deadlines."""


class Step:
    """The outcome of one step."""

    __slots__ = (
        "_gone",
        "_rows",
        "answers",
        "changes",
        "conflicts",
        "decided",
        "forgotten",
        "invalidated",
        "outcomes",
        "read_pointer",
        "records",
        "timed_out",
    )

    def __init__(self) -> None:
        self._rows: list[Operation] = []
        self._gone: list[bytes] = []
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.changes: list[Change] = []
        #: Pointers of transactions that are committed or aborted with this; topics may forget them.
        self.decided: list[int] = []
        #: Pointers of transactions of which nothing but that they were decided is known after this.
        self.forgotten: list[int] = []
        #: Pointers that are invalid with this: whoever waits for them looks again.
        self.invalidated: list[int] = []
        #: What transactions became, for whoever counts.
        self.outcomes: list[State] = []
        self.conflicts = 0
        self.timed_out = 0
        self.records: list[Record] = []
        self.read_pointer = 0

    @property
    def writes(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._rows or self._gone)

    def operations(self, head: Head) -> list[Operation]:
        """The commit: the head first, what is removed last."""
        if not self.writes:
            return []
        first: list[Operation] = [put_one(Table.METADATA, service_key(HEAD), head.encode())]
        last: list[Operation] = [Delete(Table.METADATA, self._gone)] if self._gone else []
        return first + self._rows + last

    def keep(self, record: Record) -> None:
        """Write a transaction's row."""
        self._put(TRANSACTION, record.transaction_id, record.encode())

    def keep_changes(self, changes: ChangeSet) -> None:
        """Write a change set's row; before the row of its transaction."""
        self._put(CHANGES, changes.transaction_id, changes.encode())

    def enlist(self, record: Record, name: TopicName, now_ms: int) -> None:
        """Write the row of one more topic of an open transaction."""
        record.topics.add(name)
        value = pack_record({"m": now_ms})
        self._rows.append(put_one(Table.METADATA, enlisted_key(record.transaction_id, name), value))

    def release(self, record: Record) -> None:
        """None of its topics can have rows that matter any more: remove the rows of all of them."""
        self.remove(sorted(enlisted_key(record.transaction_id, name) for name in record.topics))
        record.topics = set()

    def keep_pass(self, last_pass: LastPass) -> None:
        """Write the row of the last complete pass."""
        self._put(PASS, None, last_pass.encode())

    def drop(self, kind: bytes, transaction_ids: Iterable[int]) -> None:
        """Remove rows of one kind."""
        self.remove(service_key(kind, each) for each in transaction_ids)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove rows."""
        self._gone.extend(keys)

    def decide(self, record: Record, change: Change) -> None:
        """A transaction's row says something new about what has become of it."""
        record.settling = True
        self.records.append(record)
        self.changes.append(change)
        self.outcomes.append(record.state)
        if record.state == "invalid":
            self.invalidated.extend(record.pointers)
        else:
            self.decided.extend(record.pointers)
            self.release(record)
        self.keep(record)

    def _put(self, kind: bytes, pointer: int | None, value: bytes) -> None:
        self._rows.append(put_one(Table.METADATA, service_key(kind, pointer), value))
