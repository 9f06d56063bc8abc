"""The transaction manager: decides all requests that have arrived, and returns the rows to write and the answers.

    step(arrivals, now)    decides everything, time-outs first; nothing has happened yet
    … the actor writes step.operations(head) …
    settled(step)          it is durable: readers see it, and the answers are valid

Between the two the standing of a decided pointer is ``deciding`` or ``invalid``: topics write nothing more under it,
and do not forget it yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import PruningFigures, ServiceFigures
from plainsong.protocol.transactions.decisions import (
    abort,
    begin,
    checkpoint,
    commit,
    enlist,
    expire,
    finish_abort,
    forget_changes,
    invalidate,
    nothing,
    prepare,
)
from plainsong.protocol.transactions.ledger import Ledger, ManagerStep
from plainsong.protocol.transactions.ledger_rows import (
    AUTHORITY,
    CHANGES,
    ENLISTED,
    HEAD,
    PASS,
    TRANSACTION,
    ChangeSet,
    Head,
    LastPass,
    Record,
    enlisted_key,
    enlisted_topic,
    lost_begins,
    parse_service_key,
    put_service_rows,
    service_key,
)
from plainsong.protocol.transactions.outcomes import (
    as_of,
    invalid_before,
    keep_pass,
    kept_because,
    list_transactions,
    look_at,
    unlist,
)
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from plainsong.protocol.transactions.view import Visible

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Ask, Operation
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.ledger import ManagerNow, TransactionSettings
    from plainsong.protocol.transactions.transaction import Durable, Standing
    from plainsong.protocol.transactions.view import View

#: The rule for each kind of ask; returns the answer or raises the error.
RULES: dict[type[Ask[Any]], Callable[[Ledger, ManagerStep, Any, ManagerNow], object]] = {
    asks.Begin: begin,
    asks.Prepare: prepare,
    asks.Commit: commit,
    asks.Abort: abort,
    asks.FinishAbort: finish_abort,
    asks.Invalidate: invalidate,
    asks.Checkpoint: checkpoint,
    asks.Unlist: unlist,
    asks.InvalidBefore: invalid_before,
    asks.ForgetChanges: forget_changes,
    asks.KeepPass: keep_pass,
    asks.Enlist: enlist,
    asks.Nothing: nothing,
    asks.LookAt: look_at,
    asks.AsOf: as_of,
    asks.ListAll: list_transactions,
}


class ManagerCore:
    """The rules around the ledger. A ticket is the caller's key for a request, and for its answer."""

    def __init__(self, ledger: Ledger, leftovers: Sequence[bytes] = ()) -> None:
        """``leftovers``: keys of obsolete rows that a crash left, removed with the first commit."""
        self.ledger = ledger
        self._leftovers = leftovers
        self._freezings = 0
        self.visible = Visible(ledger.head.read_pointer, ledger.in_progress, ledger.invalid)

    def __repr__(self) -> str:
        return f"<ManagerCore {self.ledger!r}>"

    # --- one step ---------------------------------------------------------------------------------

    def step(self, arrivals: Iterable[tuple[Hashable, Ask[Any]]], now: ManagerNow) -> ManagerStep:
        """Decide the time-outs, then all of ``arrivals``, in order."""
        step = ManagerStep()
        expire(self.ledger, step, now)
        for ticket, ask in arrivals:
            try:
                answer: object = RULES[type(ask)](self.ledger, step, ask, now)
            except PlainsongError as error:
                answer = error.with_traceback(None)  # avoids a reference cycle of error, traceback and frame
            step.answers.append((ticket, answer))
        ledger = self.ledger
        if ledger.write_by_s is not None and now.mono_s >= ledger.write_by_s:
            step.write_head()
        if step.writes:
            ledger.reserve(now.wall_ms)
            for record in ledger.take_unwritten():
                step.write_record(record)
            step.remove(self._leftovers)
            self._leftovers = ()
            forgotten = self.ledger.forget(now.wall_ms)
            if forgotten:
                step.drop(TRANSACTION, [record.transaction_id for record in forgotten])
                step.forgotten += [pointer for record in forgotten for pointer in record.pointers]
        step.read_pointer = self.ledger.head.read_pointer
        return step

    def operations(self, step: ManagerStep) -> list[Operation]:
        """Return the operations of a step; every prefix of them is a consistent state."""
        return step.operations(self.ledger.head)

    def close(self) -> Iterator[list[Operation]]:
        """Yield the last commits: change sets that are not written yet, then the other rows.

        The last one has the head: it releases the reserved pointers, and says that no row is missing. The others have
        one change set each, or several within the bound of one.
        """
        ledger, head = self.ledger, self.ledger.head
        if not ledger.is_ahead:
            return
        rows: dict[int, bytes] = {}
        size = 0
        for changes in ledger.prepared.values():
            if changes.is_written:
                continue
            if rows and size + changes.size > ledger.settings.max_change_set_bytes:
                yield [put_service_rows(CHANGES, rows)]
                rows, size = {}, 0
            rows[changes.transaction_id] = changes.encode()
            size += changes.size
        if rows:
            yield [put_service_rows(CHANGES, rows)]
        head.reserved = head.tephra = 0
        step = ManagerStep()
        step.write_head()
        for record in ledger.take_unwritten():
            step.write_record(record)
        yield self.operations(step)

    def begins(self, pointers: Iterable[int]) -> list[Operation]:
        """Return the rows of these pointers' transactions that are not durable, to be written with the publish."""
        if not self.ledger.unwritten:
            return []
        rows = {}
        for pointer in pointers:
            record = self.ledger.unwritten.get(pointer)
            if record is not None and record.state == "in_progress":
                rows[pointer] = record.encode()
        return [put_service_rows(TRANSACTION, rows)] if rows else []

    def begun(self, pointers: Iterable[int]) -> None:
        """Record that a commit with ``begins`` of these pointers is durable.

        It had no row of a transaction that was decided before, or that a crash lost: a rollback writes under such a
        pointer too.
        """
        for pointer in pointers:
            record = self.ledger.unwritten.get(pointer)
            if record is not None and record.state == "in_progress":
                del self.ledger.unwritten[pointer]
                record.is_written = True
        if not self.ledger.unwritten:
            self.ledger.write_by_s = None

    def settled(self, step: ManagerStep) -> list[tuple[Hashable, object | PlainsongError]]:
        """Make the decisions of a durable step visible to readers. Returns the answers."""
        if step.writes:
            self.ledger.drop_written()
        for record in step.records:
            record.settling = False
        if step.changes:
            self.visible.apply(step.changes, step.read_pointer)
        return step.answers

    def next_deadline_s(self) -> float | None:
        """Return when a step is due even if no request arrives; None: never."""
        return self.ledger.next_deadline_s()

    # --- between steps ----------------------------------------------------------------------------

    def standing(self, pointer: int) -> Standing:
        """Return the standing of a pointer, based on durable decisions."""
        record = self.ledger.by_pointer.get(pointer)
        if record is None:
            # It is in no list, so its rows count as committed; an aborted one has no visible rows.
            return "committed" if self.ledger.forgotten(pointer) else "unknown"
        if record.frozen or (record.settling and record.state == "committed"):
            return "deciding"
        if record.settling or record.aborting:
            return "invalid"
        return "in_progress" if record.state == "unknown" else record.state

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all pointers of a pointer's transaction; only itself if that is unknown."""
        record = self.ledger.by_pointer.get(pointer)
        return (pointer,) if record is None else record.pointers

    def durable(self, pointer: int) -> Durable:
        """Return the standing of a pointer for replicas: until a decision is durable, the previous one."""
        if self.visible.is_in_progress(pointer):
            return "in_progress"
        if self.visible.is_invalid(pointer):
            return "invalid"
        record = self.ledger.by_pointer.get(pointer)
        if record is None or record.settling or record.state == "in_progress":
            return "forgotten"  # or its decision is not durable yet
        if record.state == "invalid":
            return "pruned"
        return record.state if record.state in ("committed", "aborted") else "forgotten"

    def view(self) -> View:
        """Return the view of committed transactions; the same object until it changes."""
        return self.visible.view()

    def pointers(self, transaction_id: int) -> tuple[int, ...]:
        """Return the pointers of a transaction; none unless it is open or invalid."""
        record = self.ledger.by_pointer.get(transaction_id)
        if record is None or record.transaction_id != transaction_id or record.state not in ("in_progress", "invalid"):
            return ()
        return record.pointers

    def freeze(self, transaction_id: int) -> int:
        """Refuse further writes under an open transaction while its commit waits for writes under way.

        Returns a number that identifies this freeze; 0 if the transaction is not open.
        """
        record = self.ledger.open.get(transaction_id)
        if record is None or record.aborting:
            return 0
        if not record.frozen:
            self._freezings += 1
            record.frozen = self._freezings
        return record.frozen

    def is_frozen(self, transaction_id: int, freezing: int) -> bool:
        """Return True if that freeze is still in effect, so that nothing was written since."""
        record = self.ledger.open.get(transaction_id)
        return record is not None and record.frozen == freezing

    def thaw(self, transaction_id: int, freezing: int) -> None:
        """End a freeze after a failed commit: the transaction is in progress again."""
        if self.is_frozen(transaction_id, freezing):
            self.ledger.open[transaction_id].frozen = 0

    def enlisted(self, pointer: int) -> frozenset[TopicName]:
        """Return the topics that may have rows of the pointer's open or invalid transaction."""
        record = self.ledger.by_pointer.get(pointer)
        return frozenset() if record is None else frozenset(record.topics)

    def drop_enlistments(self) -> None:
        """Drop enlistments copied from another store, as this one needs none; the first commit removes their rows."""
        for record in {id(each): each for each in self.ledger.by_pointer.values() if each.topics}.values():
            self._leftovers = [*self._leftovers, *(enlisted_key(record.transaction_id, each) for each in record.topics)]
            record.topics = set()

    def is_unsettled(self, pointer: int) -> bool:
        """Return True if a pointer is in progress, or on the invalid list."""
        return self.visible.is_in_progress(pointer) or self.visible.is_invalid(pointer)

    def unsettled(self) -> list[int]:
        """Return all pointers in progress or on the invalid list."""
        return [*self.visible.in_progress(), *self.visible.invalids()]

    def unfinished_aborts(self) -> list[asks.RollFirst]:
        """Return the aborts that were begun before the load and not completed."""
        return [
            asks.RollFirst(record.transaction_id, record.pointers)
            for record in self.ledger.open.values()
            if record.aborting
        ]

    def figures(self) -> ServiceFigures:
        ledger = self.ledger
        oldest = next(iter(ledger.open.values()), None)
        return ServiceFigures(
            open=len(ledger.open),
            invalid=len(ledger.invalid),
            outcomes=len(ledger.outcomes),
            oldest_open_ms=None if oldest is None else oldest.started_ms,
        )


# --- loading ---------------------------------------------------------------------------------------
#
# The same at the first start, after the actor crashed, and after a power cut.


@dataclass(slots=True)
class LedgerLoader:
    """Collects the service's rows; an unreadable row fails the load."""

    head: Head = field(default_factory=Head)
    is_new: bool = True
    """True if there is no head row: nothing was ever decided."""
    last_pass: LastPass | None = None
    records: dict[int, Record] = field(default_factory=dict)
    changes: list[ChangeSet] = field(default_factory=list)
    enlisted: list[tuple[int, bytes]] = field(default_factory=list)

    def feed(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take rows of ``SERVICE_RANGE``. Raises DamagedRow."""
        for key, value in rows:
            kind, pointer = parse_service_key(key)
            if kind == HEAD:
                self.head, self.is_new = Head.decode(value), False
            elif kind == TRANSACTION:
                self.records[pointer] = Record.decode(pointer, value)
            elif kind == CHANGES:
                self.changes.append(ChangeSet.decode(pointer, value))
            elif kind == ENLISTED:
                self.enlisted.append((pointer, key))
            elif kind == PASS:
                self.last_pass = LastPass.decode(value)
            elif kind != AUTHORITY:
                raise DamagedRow(f"key {key.hex()}: the transaction service has no rows of this kind")

    def core(self, settings: TransactionSettings, now: ManagerNow, *, defers_begins: bool = False) -> ManagerCore:
        """Make the manager from the collected rows. Time-outs continue by the clock, and never become longer.

        Args:
          defers_begins: see ``Ledger.defers_begins``; requires a store with ordered commits.
        """
        ledger = Ledger(settings)
        ledger.defers_begins = defers_begins
        ledger.head, ledger.last_pass = self.head, self.last_pass
        ledger.is_ahead = self.head.is_ahead
        known = [pointer for record in self.records.values() for pointer in (*record.pointers, record.decided_at)]
        last = max(ledger.head.last, ledger.head.reserved, *known)
        ledger.unwritten = lost_begins(ledger.head, self.records, last)
        self.records |= ledger.unwritten
        ledger.head.last, ledger.head.tephra = last, 0
        if ledger.is_ahead:
            ledger.head.lacking = last
        if not ledger.head.last:
            ledger.head.last = ledger.head.read_pointer = now.wall_ms * POINTERS_PER_MS
        self._order_decisions(ledger)
        decided: list[Record] = []
        for _, record in sorted(self.records.items()):
            if record.state == "in_progress":
                left_ms = min(max(0, record.expires_ms - now.wall_ms), record.expires_ms - record.started_ms)
                record.deadline_s = now.mono_s + left_ms / 1000
                ledger.begin(record)
            elif record.listed:
                ledger.list_invalid(record)
            else:
                decided.append(record)
        for record in sorted(decided, key=lambda each: (each.decided_at, each.decided_ms)):
            ledger.remember(record)
        return ManagerCore(ledger, self._take_changes(ledger) + self._take_enlisted(ledger))

    def _order_decisions(self, ledger: Ledger) -> None:
        """Order decision times after an upgrade from a version that did not; reads as of earlier moments are refused."""
        head = ledger.head
        if head.decided_ms:
            return
        if self.is_new:
            head.decided_ms = 1  # no moment has been read; the first one is made durable with its answer
            return
        head.decided_ms = max((each.decided_ms for each in self.records.values()), default=0)
        head.decided_ms = max(head.decided_ms, head.last // POINTERS_PER_MS)
        head.oldest_ms = head.decided_ms

    def _take_enlisted(self, ledger: Ledger) -> list[bytes]:
        """Add the topics of open and invalid transactions. Returns the keys of obsolete rows that a crash has left."""
        leftovers: list[bytes] = []
        for transaction_id, key in self.enlisted:
            record = ledger.by_pointer.get(transaction_id)
            if record is not None and (record.state == "in_progress" or record.listed):
                record.topics.add(enlisted_topic(key))
            else:
                leftovers.append(key)
        return leftovers

    def _take_changes(self, ledger: Ledger) -> list[bytes]:
        """Add the change sets. Returns the keys of obsolete rows that a crash left."""
        leftovers: list[bytes] = []
        committed: list[ChangeSet] = []
        for changes in self.changes:
            record = ledger.by_pointer.get(changes.transaction_id)
            if changes.transaction_id in ledger.open:
                # Even with a commit pointer: a crash cut the commit off before the transaction's row, so it is open.
                prepared = ChangeSet(changes.transaction_id, changes.client_id, changes.keys)
                ledger.prepared.put(prepared)
            elif changes.commit_pointer is None or (record is not None and record.state != "committed"):
                leftovers.append(service_key(CHANGES, changes.transaction_id))
            else:
                committed.append(changes)
        for changes in sorted(committed, key=lambda each: each.commit_pointer or 0):
            ledger.committed.add(changes)
        return leftovers


# --- invalid list ----------------------------------------------------------------------------------


def pruning_figures(core: ManagerCore, oldest_by_topic: Mapping[TopicName, int]) -> PruningFigures:
    """Return figures for operators about pruning."""
    invalids, last, settings = core.visible.invalids(), core.ledger.last_pass, core.ledger.settings
    return PruningFigures(
        invalid=len(invalids),
        oldest_invalid=invalids[0] if invalids else None,
        oldest_by_topic=oldest_by_topic,
        safe_bound=None if last is None else last.bound,
        last_pass_ms=None if last is None else last.begun_ms,
        max_lifetime_ms=settings.max_lifetime_ms,
        kept_because=kept_because(settings),
    )
