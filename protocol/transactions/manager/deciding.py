"""Prepare, commit, abort and invalidate: what becomes of an open transaction, and what of an invalid one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.errors import Overloaded, TransactionConflict, TransactionNotInProgress, TransactionTooLarge
from protocol.transactions.manager.answers import ChangeConflict, Decision
from protocol.transactions.manager.asks import CloseFirst, RollFirst
from protocol.transactions.manager.beginning import in_progress, known, not_in_progress
from protocol.transactions.manager.rows import CHANGES, ChangeSet
from protocol.transactions.manager.visible import Change
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.transactions.manager.asks import Abort, Commit, FinishAbort, Invalidate, Prepare
    from protocol.transactions.manager.ledger import Ledger
    from protocol.transactions.manager.record import Record
    from protocol.transactions.manager.step import Now, Step


def prepare(ledger: Ledger, step: Step, ask: Prepare, now: Now) -> None:
    """Keep a change set that conflicts with nobody, in place of an earlier one."""
    del now
    record = in_progress(ledger, ask.transaction_id)
    keys = frozenset(ask.changes)
    _check_size(ledger, keys)
    _check_conflict(ledger, step, record, keys)
    if keys or record.transaction_id in ledger.prepared:
        changes = ChangeSet(record.transaction_id, record.client_id, keys)
        _check_room(ledger, changes)
        ledger.prepared.keep(changes)
        step.keep_changes(changes)
    if record.must_prepare:
        record.must_prepare = False
        step.keep(record)


def commit(ledger: Ledger, step: Step, ask: Commit, now: Now) -> Decision | CloseFirst:
    """Commit what is open; say so again of what was committed before."""
    record = known(ledger, ask.transaction_id)
    if record.state == "committed":
        return Decision(record.transaction_id, "committed", changed=False)
    if record.state == "in_progress" and record.topics and not record.frozen and not record.aborting:
        return CloseFirst()  # one was enlisted in this very step
    record.frozen = 0
    record = in_progress(ledger, ask.transaction_id)
    if record.must_prepare:
        raise TransactionConflict(
            f"transaction {record.transaction_id} conflicted before", hint="prepare it again, or abort it"
        )
    changes = ledger.prepared.get(record.transaction_id)
    if changes is not None:
        _check_conflict(ledger, step, record, changes.keys)
        ledger.prepared.leave(record.transaction_id)
        changes = replace(changes, commit_pointer=ledger.head.last + 1)
        step.keep_changes(changes)
        ledger.committed.add(changes)
    _close(ledger, record, now)
    record.state = "committed"
    _raise_read_pointer(ledger, record.write_pointer)
    ledger.remember(record)
    step.decide(record, Change(closed=record.pointers))
    _forget_changes(ledger, step)
    return Decision(record.transaction_id, "committed", changed=True)


def abort(ledger: Ledger, step: Step, ask: Abort, now: Now) -> Decision | RollFirst:
    """Abort at once what has no rows; of everything else, say what is to be rolled back first."""
    record = known(ledger, ask.transaction_id)
    if record.state == "committed" or record.frozen:
        raise _too_late(record)
    if record.state == "aborted":
        return Decision(record.transaction_id, "aborted", changed=False)
    if not (ask.has_rows or record.topics):
        return _aborted(ledger, step, record, now)
    if record.state == "in_progress" and not record.aborting:
        # Durable before the first row is touched: what is rolled back in one topic is never committed in another.
        record.aborting = True
        step.keep(record)
    return RollFirst(record.transaction_id, record.pointers)


def finish_abort(ledger: Ledger, step: Step, ask: FinishAbort, now: Now) -> Decision:
    """The rows were rolled back; where not all were, the pointers stay hidden on the invalid list."""
    record = known(ledger, ask.transaction_id)
    if record.state == "committed" or record.frozen:
        raise _too_late(record)
    if ask.complete:
        return _aborted(ledger, step, record, now)
    changed = record.state == "in_progress"
    if changed:
        make_invalid(ledger, step, record, now)
    return Decision(record.transaction_id, record.state, changed)


def invalidate(ledger: Ledger, step: Step, ask: Invalidate, now: Now) -> Decision:
    """Hide an open transaction, whatever it has written."""
    record = known(ledger, ask.transaction_id)
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


def make_invalid(ledger: Ledger, step: Step, record: Record, now: Now) -> None:
    """An open one's pointers are on the invalid list from now on."""
    _close(ledger, record, now)
    record.state = "invalid"
    record.listed = record.pointers
    ledger.list_invalid(record)
    _drop_prepared(ledger, step, record)
    step.decide(record, Change(closed=record.pointers, listed=record.listed))
    _forget_changes(ledger, step)


def expire(ledger: Ledger, step: Step, now: Now) -> None:
    """Invalidate every transaction whose time is over."""
    for record in ledger.overdue(now.mono_s):
        make_invalid(ledger, step, record, now)
        step.timed_out += 1


def forget_changes(ledger: Ledger, step: Step, ask: object, now: Now) -> None:
    """Forget all committed change sets; who began before this and changes something is told of a conflict."""
    del ask, now
    ledger.head.unchecked = ledger.head.last + 1
    _drop_sets(step, ledger.committed.drop_below(ledger.head.last + 2))


def _aborted(ledger: Ledger, step: Step, record: Record, now: Now) -> Decision:
    """No row of it is left to see: its pointers may leave every list, except a long one's, as in Tephra."""
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
        return Decision(record.transaction_id, "invalid", changed=False)  # truncated before: that stays its end
    else:
        ledger.unlist(record, record.listed)
        record.decided_ms, record.decided_at = now.wall_ms, ledger.head.last
    record.state = "aborted"
    _raise_read_pointer(ledger, record.transaction_id)
    ledger.remember(record)
    step.decide(record, change)
    _forget_changes(ledger, step)
    return Decision(record.transaction_id, "aborted", changed=True)


def _close(ledger: Ledger, record: Record, now: Now) -> None:
    ledger.close(record)
    record.aborting = record.must_prepare = False
    record.frozen = 0
    record.decided_ms, record.decided_at = now.wall_ms, ledger.head.last


def _raise_read_pointer(ledger: Ledger, pointer: int) -> None:
    ledger.head.read_pointer = max(ledger.head.read_pointer, pointer)


def _drop_prepared(ledger: Ledger, step: Step, record: Record) -> None:
    if ledger.prepared.leave(record.transaction_id) is not None:
        _drop_sets(step, (record.transaction_id,))


def _forget_changes(ledger: Ledger, step: Step) -> None:
    """Drop the change sets that no open short transaction can conflict with, and the oldest beyond the bound."""
    _drop_sets(step, ledger.committed.drop_below(ledger.first_short))
    over = ledger.committed.drop_over(ledger.settings.max_committed_bytes)
    if over:
        ledger.head.unchecked = over[-1].commit_pointer or 0
        _drop_sets(step, [each.transaction_id for each in over])


def _drop_sets(step: Step, transaction_ids: Iterable[int]) -> None:
    step.drop(CHANGES, transaction_ids)


def _check_size(ledger: Ledger, keys: frozenset[bytes]) -> None:
    settings, size = ledger.settings, sum(map(len, keys))
    if len(keys) > settings.max_changes:
        raise TransactionTooLarge(f"{len(keys)} keys", hint=f"at most {settings.max_changes}")
    if size > settings.max_change_set_bytes:
        raise TransactionTooLarge(f"keys of {size} bytes", hint=f"at most {settings.max_change_set_bytes} together")


def _check_room(ledger: Ledger, changes: ChangeSet) -> None:
    """Raise Overloaded when all open transactions' change sets together would pass their bound."""
    replaced = ledger.prepared.get(changes.transaction_id)
    held = ledger.prepared.bytes - (0 if replaced is None else replaced.size)
    if held + changes.size > ledger.settings.max_prepared_bytes:
        raise Overloaded(
            f"open transactions have prepared {held} bytes of changes", hint="try again once some are decided"
        )


def _check_conflict(ledger: Ledger, step: Step, record: Record, keys: frozenset[bytes]) -> None:
    """Raise ChangeConflict, after which only another prepare that succeeds lets it commit."""
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
        step.keep(record)
    raise ChangeConflict(record.transaction_id, *found)


def _too_late(record: Record) -> TransactionNotInProgress:
    doing = "is being committed" if record.state == "in_progress" else "was committed before"
    return TransactionNotInProgress(f"transaction {record.transaction_id} {doing}")
