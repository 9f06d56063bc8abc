"""The rules that decide transactions: begin, checkpoint, enlist, prepare, commit, abort, invalidate, time out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plainsong.protocol.errors import (
    InvalidParameter,
    Overloaded,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionTooLarge,
)
from plainsong.protocol.masking import holds_credential
from plainsong.protocol.plurals import counted
from plainsong.protocol.transactions.asks import Begun, ChangeConflict, CloseFirst, Decision, RollFirst
from plainsong.protocol.transactions.ledger_rows import CHANGES, LOST_CLIENT, ChangeSet, Record
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, Transaction, TransactionType
from plainsong.protocol.transactions.view import Change

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.protocol.transactions.asks import (
        Abort,
        Begin,
        Checkpoint,
        Commit,
        Enlist,
        FinishAbort,
        Invalidate,
        Prepare,
    )
    from plainsong.protocol.transactions.ledger import Ledger, ManagerNow, ManagerStep, TransactionSettings


def begin(ledger: Ledger, step: ManagerStep, ask: Begin, now: ManagerNow) -> Begun:
    """Begin a transaction: issue a pointer, and take a snapshot from before it."""
    settings = ledger.settings
    timeout_ms = _timeout_ms(settings, ask)
    _check_client_id(settings, ask.client_id)
    _check_max_open(ledger)
    if len(ledger.invalid) >= settings.max_invalid:
        raise Overloaded(
            f"the invalid list is full: {counted(len(ledger.invalid), 'pointer')}", hint="see `plainsong tx pruning`"
        )
    invalids, in_progress, first_short = tuple(ledger.invalid), tuple(ledger.in_progress), ledger.first_short
    pointer = ledger.next_pointer(now.wall_ms, tephra=ask.tephra)
    read_pointer = ledger.head.read_pointer
    record = Record(
        pointer,
        ask.type,
        ask.client_id,
        started_ms=now.wall_ms,
        expires_ms=now.wall_ms + timeout_ms,
        bound=in_progress[0] - 1 if in_progress else min(pointer - 1, read_pointer),
        read_pointer=read_pointer,
        tephra=ask.tephra,
        owner=ask.owner,
        deadline_s=now.mono_s + timeout_ms / 1000,
    )
    ledger.begin(record)
    step.changes.append(Change(opened=record.pointers))
    if not ledger.defer(record, now):
        step.write_record(record)
    return Begun(
        Transaction(read_pointer, pointer, pointer, invalids, in_progress, first_short, ask.type),
        record.expires_ms,
        ledger.head.service,
    )


def checkpoint(ledger: Ledger, step: ManagerStep, ask: Checkpoint, now: ManagerNow) -> Begun:
    """Issue one more pointer to an open transaction; its snapshot stays the same."""
    record = open_record(ledger, ask.transaction_id)
    _check_max_open(ledger)
    if len(record.checkpoints) >= ledger.settings.max_checkpoints:
        raise Overloaded(
            f"transaction {record.transaction_id} has {len(record.checkpoints)} checkpoints",
            hint="commit it, and continue in another one",
        )
    snapshot = ask.transaction or _snapshot_of(ledger, record)
    pointer = ledger.next_pointer(now.wall_ms)
    ledger.add_checkpoint(record, pointer)
    step.changes.append(Change(opened=(pointer,)))
    step.write_record(record)
    return Begun(
        replace(
            snapshot,
            transaction_id=record.transaction_id,
            type=record.type,
            write_pointer=pointer,
            checkpoint_write_pointers=record.checkpoints,
        ),
        record.expires_ms,
        ledger.head.service,
    )


def find_record(ledger: Ledger, transaction_id: int, *, to_undo: bool = False) -> Record:
    """Return the record of a transaction.

    Args:
      to_undo: an abort or invalidation asks. It never gets TransactionNotInProgress for a begin that a crash forgot: to a
        client that means that the transaction is committed.

    Raises:
      TransactionNotFound: it is not known, or it is a checkpoint's pointer.
      TransactionNotInProgress: a crash may have forgotten its begin.
    """
    record = ledger.by_pointer.get(transaction_id)
    if record is None:
        if ledger.may_be_lost(transaction_id) and not to_undo:
            raise TransactionNotInProgress(
                f"transaction {transaction_id} is not in progress: either a crash of the service has lost it before "
                "anything was published under it, or it was never begun",
                hint="begin a new transaction",
            )
        raise TransactionNotFound(
            f"transaction {transaction_id} is not known",
            hint="decisions are remembered for transactions.outcome_retention_s; to undo messages of a pointer that "
            "this service did not issue, roll it back in the topic",
        )
    if record.transaction_id != transaction_id:
        raise TransactionNotFound(
            f"{transaction_id} is the pointer of a checkpoint", hint=f"its transaction is {record.transaction_id}"
        )
    return record


def open_record(ledger: Ledger, transaction_id: int) -> Record:
    """Return the record of an open transaction that is not being decided.

    Raises:
      TransactionNotFound, TransactionNotInProgress.
    """
    record = find_record(ledger, transaction_id)
    _check_open(record)
    return record


def _check_open(record: Record) -> None:
    """Raise TransactionNotInProgress for a transaction that is decided, or being decided."""
    if record.state != "in_progress":
        raise not_in_progress(record)
    if record.aborting or record.frozen:
        doing = "aborted" if record.aborting else "committed"
        raise TransactionNotInProgress(f"transaction {record.transaction_id} is being {doing}")


def not_in_progress(record: Record) -> TransactionNotInProgress:
    """Return the error that names the current state of a transaction."""
    if record.state == "invalid" and record.client_id == LOST_CLIENT:
        return TransactionNotInProgress(
            f"transaction {record.transaction_id} is invalid: a crash of the service has lost its begin, if there was one",
            hint="abort it, and begin a new transaction",
        )
    if record.state == "invalid":
        return TransactionNotInProgress(
            f"transaction {record.transaction_id} is invalid",
            hint=f"its time-out was at {record.expires_ms} (ms since 1970); abort the transaction, and run it again",
        )
    return TransactionNotInProgress(f"transaction {record.transaction_id} was {record.state} before")


def _snapshot_of(ledger: Ledger, record: Record) -> Transaction:
    """Reconstruct the snapshot with which a transaction began, from the later outcomes of others.

    A transaction that was open then is still open, or was decided later. Those that have been aborted or have left the
    invalid list since then count as open, which makes no more rows visible.
    """
    began = record.transaction_id
    if ledger.head.forgotten >= began:
        raise InvalidParameter(
            f"too many transactions have been decided since {began} began to reconstruct its snapshot",
            hint="send its snapshot with the request",
        )
    then_open = {pointer for pointer in ledger.in_progress if pointer < began}
    first_short = min((each for each in ledger.shorts if each < began), default=NO_TRANSACTION)
    invalids: list[int] = []
    for pointer in ledger.invalid:
        other = ledger.by_pointer[pointer]
        if other.decided_at < began:
            invalids.append(pointer)
        elif pointer < began:
            then_open.add(pointer)
            first_short = min(first_short, _as_short(other))
    for other in reversed(ledger.outcomes.values()):
        if other.decided_at < began:
            break
        then_open.update(pointer for pointer in other.pointers if pointer < began)
        if other.transaction_id < began:
            first_short = min(first_short, _as_short(other))
    return Transaction(
        record.read_pointer, began, began, tuple(invalids), tuple(sorted(then_open)), first_short, record.type
    )


def _as_short(record: Record) -> int:
    return record.transaction_id if record.type is TransactionType.SHORT else NO_TRANSACTION


def _timeout_ms(settings: TransactionSettings, ask: Begin) -> int:
    if ask.type is TransactionType.LONG:
        if ask.timeout_s is not None:
            raise InvalidParameter(
                "a long transaction has no time-out of its own", hint="its time-out is transactions.long_timeout_s"
            )
        timeout_ms = settings.long_timeout_ms
    elif ask.timeout_s is None:
        timeout_ms = settings.timeout_ms
    else:
        timeout_ms = ask.timeout_s * 1000
        if not 0 < timeout_ms <= settings.max_timeout_ms:
            raise InvalidParameter(
                f"the time-out {ask.timeout_s} s is not allowed",
                hint=f"use 1 to {settings.max_timeout_ms // 1000} seconds",
            )
    return min(timeout_ms, settings.max_lifetime_ms or timeout_ms)


def _check_client_id(settings: TransactionSettings, client_id: str) -> None:
    if not client_id or len(client_id.encode("utf-8", "replace")) > settings.max_client_id_bytes:
        raise InvalidParameter(
            "the client id is empty or too long", hint=f"1 to {settings.max_client_id_bytes} bytes of text"
        )
    if holds_credential(client_id):
        raise InvalidParameter("the client id looks like a token, and client ids are not secret", hint="make a new one")


def _check_max_open(ledger: Ledger) -> None:
    if len(ledger.in_progress) >= ledger.settings.max_open:
        raise Overloaded(
            f"too many transactions are in progress: {counted(len(ledger.in_progress), 'pointer')}",
            hint="wait, or raise transactions.max_open",
        )


# --- enlisting -------------------------------------------------------------------------------------
#
# Before a topic first writes rows of a transaction, the service records the topic durably. So this owner of the service
# and the next one can have every topic that could still write close the pointer before a commit or an abort. Pointers
# that the service did not issue are not checked.


def enlist(ledger: Ledger, step: ManagerStep, ask: Enlist, now: ManagerNow) -> tuple[int, ...]:
    """Enlist a topic for an open transaction. Answers all its pointers.

    Raises:
      TransactionNotInProgress: the transaction is decided, being decided, or was not issued here.
      Overloaded: the transaction has the maximum number of topics.
    """
    record = ledger.by_pointer.get(ask.pointer)
    if record is None:
        if ledger.forgotten(ask.pointer):
            raise _not_writable(ask.pointer, "decided")
        raise _not_writable(ask.pointer, "not issued by this service")
    if record.state != "in_progress":
        raise _not_writable(ask.pointer, record.state)
    if record.aborting or record.frozen:
        raise _not_writable(ask.pointer, "being aborted" if record.aborting else "being committed")
    if ask.name not in record.topics:
        if len(record.topics) >= ledger.settings.max_topics:
            raise Overloaded(
                f"transaction {record.transaction_id} writes to {len(record.topics)} topics",
                hint="commit it, and continue in another one",
            )
        step.enlist(record, ask.name, now.wall_ms)
    return record.pointers


def nothing(ledger: Ledger, step: ManagerStep, ask: object, now: ManagerNow) -> None:
    del ledger, step, ask, now


def _not_writable(pointer: int, what: str) -> TransactionNotInProgress:
    return TransactionNotInProgress(f"write pointer {pointer} is {what}", hint="begin a new transaction")


# --- deciding --------------------------------------------------------------------------------------


def prepare(ledger: Ledger, step: ManagerStep, ask: Prepare, now: ManagerNow) -> None:
    """Check a change set for conflicts, and store it in place of an earlier one."""
    del now
    record = open_record(ledger, ask.transaction_id)
    keys = frozenset(ask.changes)
    _check_size(ledger, keys)
    _check_conflict(ledger, step, record, keys)
    earlier = ledger.prepared.get(record.transaction_id)
    if keys or earlier is not None or ledger.may_lack_changes(record):
        may_wait = ask.tephra and ledger.defers_begins and ledger.is_ahead and record.may_lose_changes
        # An earlier set in a row must not be what a crash leaves.
        is_written = not may_wait or (earlier is not None and earlier.is_written)
        changes = ChangeSet(record.transaction_id, record.client_id, keys, is_written=is_written)
        _check_room(ledger, changes)
        ledger.prepared.put(changes)
        if is_written:
            step.write_changes(changes)
    if record.must_prepare:
        record.must_prepare = False
        step.write_record(record)


def commit(ledger: Ledger, step: ManagerStep, ask: Commit, now: ManagerNow) -> Decision | CloseFirst:
    """Commit an open transaction; idempotent."""
    record = find_record(ledger, ask.transaction_id)
    if record.state == "committed":
        return Decision(record.transaction_id, "committed", changed=False)
    if record.state == "in_progress" and record.topics and not record.frozen and not record.aborting:
        return CloseFirst()  # a topic was enlisted in this very step
    record.frozen = 0
    _check_open(record)
    if record.must_prepare:
        raise TransactionConflict(
            f"transaction {record.transaction_id} conflicted before", hint="prepare it again, or abort it"
        )
    if ledger.may_lack_changes(record):
        raise ChangeConflict(record.transaction_id, None)
    changes = ledger.prepared.get(record.transaction_id)
    if changes is not None:
        _check_conflict(ledger, step, record, changes.keys)
        ledger.prepared.discard(record.transaction_id)
    _close(ledger, record, now)
    if changes is not None:
        _keep_changes(ledger, step, changes)
    record.state = "committed"
    _raise_read_pointer(ledger, record.pointers[-1])
    ledger.remember(record)
    step.decide(record, Change(closed=record.pointers))
    _forget_changes(ledger, step)
    return Decision(record.transaction_id, "committed", changed=True)


def abort(ledger: Ledger, step: ManagerStep, ask: Abort, now: ManagerNow) -> Decision | RollFirst:
    """Abort at once if there are no rows; otherwise answer which rows must be rolled back first. Idempotent."""
    record = find_record(ledger, ask.transaction_id, to_undo=True)
    if record.state == "committed" or record.frozen:
        raise _too_late(record)
    if record.state == "aborted":
        return Decision(record.transaction_id, "aborted", changed=False)
    if not (ask.has_rows or record.topics):
        return _aborted(ledger, step, record, now)
    if record.state == "in_progress" and not record.aborting:
        # Durable before the first rollback: a transaction that is rolled back in one topic must not be committed.
        record.aborting = True
        step.write_record(record)
    return RollFirst(record.transaction_id, record.pointers)


def finish_abort(ledger: Ledger, step: ManagerStep, ask: FinishAbort, now: ManagerNow) -> Decision:
    """Complete an abort; if not all rows are rolled back, the invalid list keeps them hidden."""
    record = find_record(ledger, ask.transaction_id, to_undo=True)
    if record.state == "committed" or record.frozen:
        raise _too_late(record)
    if ask.complete:
        return _aborted(ledger, step, record, now)
    changed = record.state == "in_progress"
    if changed:
        make_invalid(ledger, step, record, now)
    return Decision(record.transaction_id, record.state, changed)


def invalidate(ledger: Ledger, step: ManagerStep, ask: Invalidate, now: ManagerNow) -> Decision:
    """Invalidate an open transaction, which hides its rows."""
    record = find_record(ledger, ask.transaction_id, to_undo=True)
    if record.state in ("committed", "aborted"):
        raise not_in_progress(record)
    if record.frozen:
        raise _too_late(record)
    changed = record.state == "in_progress"
    if changed:
        make_invalid(ledger, step, record, now)
        if record.type is TransactionType.SHORT:
            _raise_read_pointer(ledger, record.transaction_id)
    return Decision(record.transaction_id, "invalid", changed)


def make_invalid(ledger: Ledger, step: ManagerStep, record: Record, now: ManagerNow) -> None:
    """Put the pointers of an open transaction on the invalid list."""
    _close(ledger, record, now)
    record.state = "invalid"
    record.listed = record.pointers
    ledger.list_invalid(record)
    _drop_prepared(ledger, step, record)
    step.decide(record, Change(closed=record.pointers, listed=record.listed))
    _forget_changes(ledger, step)


def expire(ledger: Ledger, step: ManagerStep, now: ManagerNow) -> None:
    """Invalidate every transaction that timed out."""
    for record in ledger.overdue(now.mono_s):
        make_invalid(ledger, step, record, now)
        step.timed_out += 1


def forget_changes(ledger: Ledger, step: ManagerStep, ask: object, now: ManagerNow) -> None:
    """Forget all committed change sets; an open short transaction with changes then has a conflict."""
    del ask, now
    ledger.head.unchecked = ledger.head.last + 1
    _drop_sets(step, ledger.committed.drop_below(ledger.head.last + 2))


def _aborted(ledger: Ledger, step: ManagerStep, record: Record, now: ManagerNow) -> Decision:
    """Abort, after all rows are rolled back: the pointers leave every list, except a long one's, as in Tephra."""
    if record.state == "aborted":
        return Decision(record.transaction_id, "aborted", changed=False)
    if record.type is TransactionType.LONG:
        changed = record.state == "in_progress"
        if changed:
            make_invalid(ledger, step, record, now)
        return Decision(record.transaction_id, "invalid", changed)
    change = Change(unlisted=record.listed)
    if record.state == "in_progress":
        _close(ledger, record, now)
        _drop_prepared(ledger, step, record)
        change = Change(closed=record.pointers)
    elif not record.listed:
        return Decision(record.transaction_id, "invalid", changed=False)  # truncated before: its final state
    else:
        ledger.unlist(record, record.listed)
        record.decided_ms, record.decided_at = ledger.decide_ms(now.wall_ms), ledger.head.last
    record.state = "aborted"
    _raise_read_pointer(ledger, record.transaction_id)
    ledger.remember(record)
    step.decide(record, change)
    _forget_changes(ledger, step)
    return Decision(record.transaction_id, "aborted", changed=True)


def _close(ledger: Ledger, record: Record, now: ManagerNow) -> None:
    ledger.close(record)
    record.aborting = record.must_prepare = False
    record.frozen = 0
    record.decided_ms, record.decided_at = ledger.decide_ms(now.wall_ms), ledger.head.last


def _raise_read_pointer(ledger: Ledger, pointer: int) -> None:
    ledger.head.read_pointer = max(ledger.head.read_pointer, pointer)


def _drop_prepared(ledger: Ledger, step: ManagerStep, record: Record) -> None:
    if ledger.prepared.discard(record.transaction_id) is not None:
        _drop_sets(step, (record.transaction_id,))


def _keep_changes(ledger: Ledger, step: ManagerStep, changes: ChangeSet) -> None:
    """Keep a committed change set if an open short transaction may conflict with it."""
    if ledger.shorts and changes.keys:
        changes = ChangeSet(changes.transaction_id, changes.client_id, changes.keys, ledger.head.last + 1)
        step.write_changes(changes)
        ledger.committed.add(changes)
    elif changes.is_written:
        _drop_sets(step, (changes.transaction_id,))


def _forget_changes(ledger: Ledger, step: ManagerStep) -> None:
    """Drop change sets with which no open short transaction can conflict, and the oldest beyond the bound."""
    if not len(ledger.committed):
        return
    _drop_sets(step, ledger.committed.drop_below(ledger.first_short))
    over = ledger.committed.drop_over(ledger.settings.max_committed_bytes)
    if over:
        ledger.head.unchecked = over[-1].commit_pointer or 0
        _drop_sets(step, [each.transaction_id for each in over])


def _drop_sets(step: ManagerStep, transaction_ids: Iterable[int]) -> None:
    step.drop(CHANGES, transaction_ids)


def _check_size(ledger: Ledger, keys: frozenset[bytes]) -> None:
    settings, size = ledger.settings, sum(map(len, keys))
    if len(keys) > settings.max_changes:
        raise TransactionTooLarge(f"{len(keys)} keys", hint=f"at most {settings.max_changes}")
    if size > settings.max_change_set_bytes:
        raise TransactionTooLarge(f"keys of {size} bytes", hint=f"at most {settings.max_change_set_bytes} together")


def _check_room(ledger: Ledger, changes: ChangeSet) -> None:
    """Raise Overloaded if the total of the change sets of open transactions would exceed its bound."""
    replaced = ledger.prepared.get(changes.transaction_id)
    prepared_bytes = ledger.prepared.bytes - (0 if replaced is None else replaced.size)
    if prepared_bytes + changes.size > ledger.settings.max_prepared_bytes:
        raise Overloaded(
            f"open transactions have prepared {prepared_bytes} bytes of changes", hint="retry once some are decided"
        )


def _check_conflict(ledger: Ledger, step: ManagerStep, record: Record, keys: frozenset[bytes]) -> None:
    """Raise ChangeConflict on a conflict; after that a commit requires a successful prepare."""
    if not keys:
        return
    found: tuple[bytes, str | None] | None = ledger.committed.conflict(record.transaction_id, keys)
    if found is None and record.type is TransactionType.SHORT and record.transaction_id < ledger.head.unchecked:
        found = min(keys), None
    if found is None:
        return
    step.conflicts += 1
    if not record.must_prepare:
        record.must_prepare = True
        step.write_record(record)
    raise ChangeConflict(record.transaction_id, *found)


def _too_late(record: Record) -> TransactionNotInProgress:
    doing = "is being committed" if record.state == "in_progress" else "was committed before"
    return TransactionNotInProgress(f"transaction {record.transaction_id} {doing}")
