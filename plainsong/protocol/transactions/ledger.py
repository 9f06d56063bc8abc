"""The ledger: the state of the transaction service, with its bounds, and the changes of one step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Delete, Table, put_one
from plainsong.protocol.records import pack_record
from plainsong.protocol.transactions.ledger_rows import (
    CHANGES,
    HEAD,
    PASS,
    TRANSACTION,
    Head,
    enlisted_key,
    put_service_rows,
    service_key,
)
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, POINTERS_PER_MS, TransactionType

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import State
    from plainsong.protocol.transactions.ledger_rows import ChangeSet, LastPass, Record
    from plainsong.protocol.transactions.view import Change


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """The bounds of the service; see the settings of ``[transactions]`` for the behaviour beyond them."""

    timeout_ms: int = 30_000
    """The default for short transactions."""
    long_timeout_ms: int = 86_400_000
    max_timeout_ms: int = 3_600_000
    """The maximum for short transactions."""
    max_lifetime_ms: int = 90_000_000
    """Writes under older pointers are refused. 0: no bound, and no automatic pruning."""
    max_open: int = 20_000
    """Pointers in progress, including those of checkpoints."""
    max_checkpoints: int = 1_000
    """Checkpoints of one transaction."""
    max_topics: int = 10_000
    """Enlisted topics of one transaction."""
    max_invalid: int = 100_000
    """With this number of invalid pointers, new transactions are refused."""
    max_outcomes: int = 200_000
    """Maximum of remembered decisions, however recent."""
    outcome_retention_ms: int = 90_000_000
    max_changes: int = 100_000
    """Keys of one change set."""
    max_change_set_bytes: int = 16 << 20
    """Total bytes of one change set's keys."""
    max_prepared_bytes: int = 256 << 20
    """Bytes of all change sets of open transactions."""
    max_committed_bytes: int = 256 << 20
    """Bytes of all committed change sets that are kept for conflict checks."""
    max_client_id_bytes: int = 256
    abort_deadline_s: float = 15.0
    """An abort becomes an invalidation if no topic has rolled back for this time."""
    commit_deadline_s: float = 15.0
    """An attempt to commit fails if no topic has closed the transaction's pointers for this time."""
    prune: bool = True
    """True if a complete pass removes pointers past their lifetime from the invalid list."""
    mailbox_requests: int = 20_000
    mailbox_bytes: int = 64 << 20
    commit_requests: int = 1_024
    """Requests in one commit of the service."""


# --- rows that wait for a commit ------------------------------------------------------------------
#
# If the store orders commits, a begin is answered before its row is written. The row goes into the next commit of the
# service or into a topic's first commit under the pointer, whichever is first, or is written after a short time. A
# crash may lose a begin without published messages, but a pointer is never issued twice: the head reserves the pointers
# of the next second, and a load continues after them.
#
# Tephra's clients also write to other stores, where a pointer on no list counts as committed. So their pointers are the
# few that follow the last one in the head, and a load puts each of these without a row on the invalid list. If none of
# them is free and recent, the begin's row is written at once. No other transaction gets one of them.
#
# The change sets of the short transactions of these clients are written with their commits. A crash may lose them, so a
# commit is refused if such a client began the transaction before the last crash, and it has no change set, not even an
# empty one. A head with reserved pointers says that the service has not been stopped since, so it must be on the disk
# before a change set waits.

#: How far ahead of the clock pointers are reserved by each commit of the service.
RESERVED_MS = 1_000
#: Least and largest number of pointers that a commit of the service reserves for Tephra's clients, if one of them has
#: begun a transaction in the last ``RESERVED_MS``. In between, two are added for each open transaction. Reserved pointers
#: may be issued for ``RESERVED_MS``.
LEAST_TEPHRA_POINTERS, TEPHRA_POINTERS = 4, 64
#: With this number of invalid pointers none are reserved: each crash adds some, and every begin returns the list.
MANY_INVALID = 1_000
#: A transaction's row is written this long after its begin, if no commit has included it by then.
WRITTEN_WITHIN_S = 0.1


# --- ledger ----------------------------------------------------------------------------------------
#
#     open ──► committed, aborted ──► forgotten
#       └────► invalid (its pointers on the list) ──► aborted, or invalid and off the list ──► forgotten
#
# The rules decide; the ledger only moves records between these states.

#: Maximum of outcomes forgotten in one commit, to keep commits short.
_FORGET_ROWS = 1_000
#: Moments for which the undecided pointers are cached, for readers as of a moment.
_MOMENTS_KEPT = 32


class Ledger:
    """Open, invalid and remembered transactions, their pointers and change sets."""

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self.head = Head()
        self.by_pointer: dict[int, Record] = {}
        """All records, by each of their pointers."""
        self.open: dict[int, Record] = {}
        self.in_progress: list[int] = []
        """Pointers of open transactions, ascending; ``shorts``: ids of the short ones among them."""
        self.shorts: list[int] = []
        self.invalid: list[int] = []
        """The invalid list, ascending."""
        self.outcomes: OrderedDict[int, Record] = OrderedDict()
        """Decided transactions without pointers on the list, by id, in the order of their decisions."""
        self.prepared = PreparedSets()
        self.committed = CommittedSets()
        self.last_pass: LastPass | None = None
        self.defers_begins = False
        """True if begins are answered before their rows are written."""
        self.is_ahead = False
        """True if the stored head warns that due rows may be missing, because the service was not stopped since."""
        self.unwritten: dict[int, Record] = {}
        """Transactions without a durable row, by id: begun ones, oldest first, whose rows commits of topics may include,
        and before them the lost begins that the load found and made invalid."""
        self.write_by_s: float | None = None
        """When the rows of ``unwritten`` must be written, on the monotonic clock."""
        self.has_many_invalid = False
        """True if no pointers are reserved for Tephra's clients, because the invalid list is long: their begins wait for
        the disk."""
        self._tephra_last = 0
        """The last pointer reserved for Tephra's clients."""
        self._tephra_ms = 0
        """When such a client last began a transaction."""
        self._undecided_at: OrderedDict[int, frozenset[int]] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []

    def __repr__(self) -> str:
        return f"<Ledger {len(self.open)} open, {len(self.invalid)} invalid, {len(self.outcomes)} remembered>"

    # --- pointers ---------------------------------------------------------------------------------

    def next_pointer(self, now_ms: int, *, tephra: bool = False) -> int:
        """Issue a pointer above all earlier ones, of the present millisecond unless the clock went back.

        It is also after every moment of an as-of read so far, and so are all rows under it.

        Args:
          tephra: prefer a pointer reserved for Tephra's clients, which may be a second old. Otherwise none of these is
            issued: after a crash it would be on the invalid list, as a transaction without an owner.
        """
        last, decided_ms = self.head.last, self.head.decided_ms
        pointer = max(last + 1, max(now_ms, decided_ms) * POINTERS_PER_MS)
        if not tephra:
            pointer = max(pointer, self._tephra_last + 1)
        else:
            self._tephra_ms = now_ms
            if max(now_ms - RESERVED_MS, decided_ms) * POINTERS_PER_MS <= last < self._tephra_last:
                pointer = last + 1
        self.head.last = pointer
        self.head.first = self.head.first or pointer
        return pointer

    @property
    def first_short(self) -> int:
        """The id of the oldest open short transaction; NO_TRANSACTION if there is none.

        Tephra counts the checkpoint of a long transaction as a short one here; Plainsong does not.
        """
        return self.shorts[0] if self.shorts else NO_TRANSACTION

    def forgotten(self, pointer: int) -> bool:
        """Return True if a pointer without a record was issued here, decided and forgotten."""
        return 0 < self.head.first <= pointer <= self.head.forgotten

    def may_be_lost(self, pointer: int) -> bool:
        """Return True if a pointer without a record may have been issued here, and its begin lost by a crash."""
        head = self.head
        return self.defers_begins and 0 < head.first <= pointer <= head.last and pointer > head.forgotten

    def may_lack_changes(self, record: Record) -> bool:
        """Return True if a crash may have lost an open transaction's change set, and it has not been prepared since."""
        is_prepared = record.transaction_id in self.prepared
        return record.may_lose_changes and record.transaction_id <= self.head.lacking and not is_prepared

    # --- state changes ----------------------------------------------------------------------------

    def begin(self, record: Record) -> None:
        """Add an open transaction, with all its pointers."""
        self.open[record.transaction_id] = record
        if record.type is TransactionType.SHORT:
            insort(self.shorts, record.transaction_id)
        for pointer in record.pointers:
            self.by_pointer[pointer] = record
            insort(self.in_progress, pointer)
        heappush(self._deadlines, (record.deadline_s, record.transaction_id))
        if len(self._deadlines) > 2 * len(self.open) + 1_000:
            self._deadlines = [(each.deadline_s, each.transaction_id) for each in self.open.values()]
            heapify(self._deadlines)

    def defer(self, record: Record, now: ManagerNow) -> bool:
        """Defer the row of a new transaction to a later commit; return False if it must be written now."""
        if record.tephra and record.type is TransactionType.LONG:
            return False  # an abort must leave it on the invalid list, so its type must not be lost
        reserved = self._tephra_last if record.tephra else self.head.reserved
        if not self.defers_begins or record.transaction_id > reserved:
            return False
        record.is_written = False
        self.unwritten[record.transaction_id] = record
        if self.write_by_s is None:
            self.write_by_s = now.mono_s + WRITTEN_WITHIN_S
        return True

    def reserve(self, now_ms: int) -> None:
        """Reserve pointers, before the head is written."""
        self.is_ahead = self.defers_begins
        if not self.defers_begins:
            return
        head = self.head
        head.tephra = 0
        has_clients = 0 <= now_ms - self._tephra_ms <= RESERVED_MS
        self.has_many_invalid = len(self.invalid) >= MANY_INVALID and (has_clients or self.has_many_invalid)
        if has_clients and not self.has_many_invalid:
            head.last = max(head.last, max(now_ms, head.decided_ms) * POINTERS_PER_MS)
            head.tephra = min(LEAST_TEPHRA_POINTERS + 2 * len(self.open), TEPHRA_POINTERS)
        self._tephra_last = head.last + head.tephra
        until_ms = max(now_ms, head.last // POINTERS_PER_MS) + RESERVED_MS
        head.reserved = max(head.reserved, until_ms * POINTERS_PER_MS)

    def take_unwritten(self) -> list[Record]:
        """Return the transactions that are in no commit of the service, which the caller must write.

        They stay in ``unwritten`` until that commit is durable: until then commits of topics include their rows too,
        since the service's commit may fail alone.
        """
        self.write_by_s = None
        return [record for record in self.unwritten.values() if not record.is_written]

    def drop_written(self) -> None:
        """Drop the rows of a durable commit of the service from ``unwritten``."""
        if self.unwritten:
            self.unwritten = {id_: record for id_, record in self.unwritten.items() if not record.is_written}

    def add_checkpoint(self, record: Record, pointer: int) -> None:
        """Add a pointer to an open transaction."""
        record.pointers += (pointer,)
        self.by_pointer[pointer] = record
        insort(self.in_progress, pointer)

    def close(self, record: Record) -> None:
        """Remove a transaction from the open ones."""
        del self.open[record.transaction_id]
        if record.type is TransactionType.SHORT:
            _remove(self.shorts, record.transaction_id)
        for pointer in record.pointers:
            _remove(self.in_progress, pointer)

    def list_invalid(self, record: Record) -> None:
        """Put the pointers in ``record.listed`` on the invalid list."""
        for pointer in record.pointers:
            self.by_pointer[pointer] = record
        for pointer in record.listed:
            insort(self.invalid, pointer)

    def unlist(self, record: Record, pointers: Iterable[int]) -> tuple[int, ...]:
        """Remove pointers from the invalid list. Returns the ones that were on it."""
        gone = tuple(pointer for pointer in pointers if pointer in record.listed)
        for pointer in gone:
            _remove(self.invalid, pointer)
        record.listed = tuple(pointer for pointer in record.listed if pointer not in gone)
        return gone

    def remember(self, record: Record) -> None:
        """Add a decided transaction without pointers on the invalid list."""
        self.outcomes[record.transaction_id] = record
        self.outcomes.move_to_end(record.transaction_id)
        for pointer in record.pointers:
            self.by_pointer[pointer] = record

    # --- time -------------------------------------------------------------------------------------

    def forget(self, now_ms: int) -> list[Record]:
        """Forget outcomes that are too old or too many, oldest first. Returns them."""
        gone: list[Record] = []
        horizon_ms = now_ms - self.settings.outcome_retention_ms
        while self.outcomes and len(gone) < _FORGET_ROWS:
            oldest = next(iter(self.outcomes.values()))
            if oldest.decided_ms > horizon_ms and len(self.outcomes) <= self.settings.max_outcomes:
                break
            if oldest.settling:
                break  # the commit in progress decides it
            self.outcomes.popitem(last=False)
            for pointer in oldest.pointers:
                del self.by_pointer[pointer]
            self.head.forgotten = max(self.head.forgotten, oldest.decided_at)
            if oldest.state == "committed":  # the rows of others are rolled back, and need no record
                self.head.oldest_ms = max(self.head.oldest_ms, oldest.decided_ms)
            gone.append(oldest)
        return gone

    def decide_ms(self, now_ms: int) -> int:
        """Return the time for a decision made now: not before an earlier decision, or the moment of an as-of read.

        Nor before the begin of any transaction, since the clock may go back, and another owner's clock may be slower.
        """
        head = self.head
        head.decided_ms = max(head.decided_ms, now_ms, head.last // POINTERS_PER_MS)
        return head.decided_ms

    def undecided_at(self, at_ms: int) -> frozenset[int]:
        """Return the pointers that were issued up to a moment, and decided after it or not at all.

        New decisions must have times after ``at_ms``, so that the result never changes.
        """
        known = self._undecided_at.get(at_ms)
        if known is None:
            stop = (at_ms + 1) * POINTERS_PER_MS
            found = set(self.in_progress[: bisect_left(self.in_progress, stop)])
            for record in reversed(self.outcomes.values()):
                if record.decided_ms <= at_ms:
                    break
                if record.transaction_id < stop:  # most have begun after the moment
                    found.update(pointer for pointer in record.pointers if pointer < stop)
            known = self._undecided_at[at_ms] = frozenset(found)
            if len(self._undecided_at) > _MOMENTS_KEPT:
                self._undecided_at.popitem(last=False)
        self._undecided_at.move_to_end(at_ms)
        return known

    def overdue(self, mono_s: float) -> Iterator[Record]:
        """Yield open transactions that timed out, except those with a commit under way."""
        frozen: list[Record] = []
        while self._deadlines and self._deadlines[0][0] <= mono_s:
            _, transaction_id = heappop(self._deadlines)
            record = self.open.get(transaction_id)
            if record is None:
                continue
            if record.frozen:
                frozen.append(record)
            else:
                yield record
        for record in frozen:
            heappush(self._deadlines, (record.deadline_s, record.transaction_id))

    def next_deadline_s(self) -> float | None:
        """Return when the next transaction times out, or rows are due; None if neither."""
        times_out_s, due_s = self._next_time_out_s(), self.write_by_s
        if times_out_s is None or due_s is None:
            return due_s if times_out_s is None else times_out_s
        return min(times_out_s, due_s)

    def _next_time_out_s(self) -> float | None:
        while self._deadlines:
            deadline_s, transaction_id = self._deadlines[0]
            record = self.open.get(transaction_id)
            if record is not None and not record.frozen:
                return deadline_s
            if record is not None:
                # The frozen one is considered again once its commit has succeeded or failed.
                return min((each.deadline_s for each in self.open.values() if not each.frozen), default=None)
            heappop(self._deadlines)
        return None


def _remove(pointers: list[int], pointer: int) -> None:
    del pointers[bisect_left(pointers, pointer)]


# --- change sets -----------------------------------------------------------------------------------
#
# Two transactions conflict if one was committed after the other began and they share a key. A set is dropped once every
# open short transaction began after its commit. As in Tephra, long ones do not delay that, and are checked only against
# the remaining sets.


class PreparedSets(dict[int, "ChangeSet"]):
    """Prepared change sets of open transactions, by transaction id."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def put(self, changes: ChangeSet) -> None:
        """Add a change set, in place of an earlier one."""
        self.discard(changes.transaction_id)
        self[changes.transaction_id] = changes
        self.bytes += changes.size

    def discard(self, transaction_id: int) -> ChangeSet | None:
        """Remove and return a transaction's change set; None if it has none."""
        changes = self.pop(transaction_id, None)
        if changes is not None:
            self.bytes -= changes.size
        return changes


class CommittedSets:
    """Committed change sets in the order of their commits."""

    def __init__(self) -> None:
        self._sets: deque[ChangeSet] = deque()
        self._latest: dict[bytes, ChangeSet] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sets)

    def __iter__(self) -> Iterator[ChangeSet]:
        return iter(self._sets)

    def add(self, changes: ChangeSet) -> None:
        """Add the newest change set."""
        self._sets.append(changes)
        self.bytes += changes.size
        for key in changes.keys:
            self._latest[key] = changes

    def conflict(self, transaction_id: int, keys: Iterable[bytes]) -> tuple[bytes, str] | None:
        """Return a key that a commit changed after ``transaction_id`` began, and its client's id; None: no conflict."""
        for key in keys:
            latest = self._latest.get(key)
            if latest is not None and _pointer(latest) > transaction_id:
                return key, latest.client_id
        return None

    def drop_below(self, pointer: int) -> list[int]:
        """Drop the sets of commits before ``pointer``. Returns the ids of their transactions."""
        gone: list[int] = []
        while self._sets and _pointer(self._sets[0]) < pointer:
            gone.append(self._drop().transaction_id)
        return gone

    def drop_over(self, max_bytes: int) -> list[ChangeSet]:
        """Drop the oldest sets until the rest is within ``max_bytes``. Returns the dropped ones."""
        gone: list[ChangeSet] = []
        while self.bytes > max_bytes:
            gone.append(self._drop())
        return gone

    def _drop(self) -> ChangeSet:
        changes = self._sets.popleft()
        self.bytes -= changes.size
        for key in changes.keys:
            if self._latest[key] is changes:
                del self._latest[key]
        return changes


def _pointer(changes: ChangeSet) -> int:
    assert changes.commit_pointer is not None  # only sets of committed transactions are added
    return changes.commit_pointer


# --- one step of the service -----------------------------------------------------------------------


class ManagerNow(NamedTuple):
    """The time, read once per step."""

    wall_ms: int
    """The machine's clock; may jump."""
    mono_s: float
    """A monotonic clock, for deadlines."""


class ManagerStep:
    """The result of one step: rows to write, answers, and changes that take effect once the rows are durable."""

    __slots__ = (
        "_changes",
        "_removed",
        "_rows",
        "_transactions",
        "_writes_head",
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
        #: Rows of change sets and of transactions, by transaction, and the others.
        self._changes: dict[int, bytes] = {}
        self._transactions: dict[int, bytes] = {}
        self._rows: list[Operation] = []
        self._removed: list[bytes] = []
        self._writes_head = False
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.changes: list[Change] = []
        #: Pointers of transactions that this step commits or aborts; topics may forget them.
        self.decided: list[int] = []
        #: Pointers of transactions whose outcome this step forgets; it stays known that they were decided.
        self.forgotten: list[int] = []
        #: Pointers that this step invalidates; polls that they hold check again.
        self.invalidated: list[int] = []
        #: The new states of transactions, for metrics.
        self.outcomes: list[State] = []
        self.conflicts = 0
        self.timed_out = 0
        self.records: list[Record] = []
        self.read_pointer = 0

    @property
    def writes(self) -> bool:
        return bool(self._transactions or self._changes or self._rows or self._removed or self._writes_head)

    def operations(self, head: Head) -> list[Operation]:
        """Return the operations of the commit: the head first, change sets before transactions, removals last."""
        if not self.writes:
            return []
        operations: list[Operation] = [put_one(Table.METADATA, service_key(HEAD), head.encode())]
        if self._changes:
            operations.append(put_service_rows(CHANGES, self._changes))
        operations += self._rows
        if self._transactions:
            operations.append(put_service_rows(TRANSACTION, self._transactions))
        if self._removed:
            operations.append(Delete(Table.METADATA, self._removed))
        return operations

    def write_head(self) -> None:
        """Write the head, even if nothing else is written."""
        self._writes_head = True

    def write_record(self, record: Record) -> None:
        record.is_written = True
        self._transactions[record.transaction_id] = record.encode()

    def write_changes(self, changes: ChangeSet) -> None:
        self._changes[changes.transaction_id] = changes.encode()

    def enlist(self, record: Record, name: TopicName, now_ms: int) -> None:
        """Write the row that enlists a topic for an open transaction."""
        record.topics.add(name)
        value = pack_record({"m": now_ms})
        self._rows.append(put_one(Table.METADATA, enlisted_key(record.transaction_id, name), value))

    def release(self, record: Record) -> None:
        """Remove the enlistments of a decided transaction."""
        self.remove(sorted(enlisted_key(record.transaction_id, name) for name in record.topics))
        record.topics = set()

    def write_pass(self, last_pass: LastPass) -> None:
        self._rows.append(put_one(Table.METADATA, service_key(PASS), last_pass.encode()))

    def drop(self, kind: bytes, transaction_ids: Iterable[int]) -> None:
        self.remove(service_key(kind, each) for each in transaction_ids)

    def remove(self, keys: Iterable[bytes]) -> None:
        self._removed.extend(keys)

    def decide(self, record: Record, change: Change) -> None:
        """Write a transaction with a new state, and record the change."""
        record.settling = True
        self.records.append(record)
        self.changes.append(change)
        self.outcomes.append(record.state)
        if record.state == "invalid":
            self.invalidated.extend(record.pointers)
        else:
            self.decided.extend(record.pointers)
            if record.topics:
                self.release(record)
        self.write_record(record)
