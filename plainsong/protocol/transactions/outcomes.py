"""The outcomes of transactions: the status of one or many, reading as of a moment, and pruning the invalid list."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from plainsong.protocol.errors import AsOfTooOld, InvalidParameter, nearest
from plainsong.protocol.requests import in_the_future
from plainsong.protocol.transactions.asks import TransactionStatus
from plainsong.protocol.transactions.ledger_rows import LastPass
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS, STATES, issued_ms
from plainsong.protocol.transactions.view import Change, Moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plainsong.protocol.transactions.asks import AsOf, InvalidBefore, KeepPass, ListAll, LookAt, Unlist
    from plainsong.protocol.transactions.ledger import Ledger, ManagerNow, ManagerStep, TransactionSettings
    from plainsong.protocol.transactions.ledger_rows import Record


def look_at(ledger: Ledger, step: ManagerStep, ask: LookAt, now: ManagerNow) -> TransactionStatus:
    """Look up the transaction of a pointer."""
    del step
    record = ledger.by_pointer.get(ask.pointer)
    if record is None:
        return TransactionStatus(ask.pointer, "unknown", ask.pointer, service=ledger.head.service)
    return _status(ledger, record, now)


def list_transactions(ledger: Ledger, step: ManagerStep, ask: ListAll, now: ManagerNow) -> list[TransactionStatus]:
    """List the transactions of one state, or the open and invalid ones, oldest first."""
    del step
    if ask.state is not None and ask.state not in STATES:
        raise InvalidParameter(f"state {ask.state!r}", hint=nearest(ask.state, STATES))
    chosen = _chosen(ledger, ask)
    if ask.after:
        chosen = _after(list(chosen), ask)
    return [_status(ledger, record, now) for record in islice(chosen, ask.limit)]


def _after(records: Sequence[Record], ask: ListAll) -> Sequence[Record]:
    """Return the records after the last one of a page, which may have been decided or forgotten since."""
    at = next((index for index, record in enumerate(records) if record.transaction_id == ask.after), None)
    if at is not None:
        return records[at + 1 :]
    if ask.state in ("committed", "aborted"):
        return records  # these are in the order of decision, so all of them come after the forgotten one
    return [record for record in records if record.transaction_id > ask.after]


def _chosen(ledger: Ledger, ask: ListAll) -> Iterable[Record]:
    if ask.state == "in_progress":
        return ledger.open.values()
    invalid = {record.transaction_id: record for record in map(ledger.by_pointer.__getitem__, ledger.invalid)}
    if ask.state is None:
        return [record for _, record in sorted((ledger.open | invalid).items())]
    if ask.state == "invalid":
        return [*invalid.values(), *(each for each in ledger.outcomes.values() if each.state == "invalid")]
    return (record for record in ledger.outcomes.values() if record.state == ask.state)


def _status(ledger: Ledger, record: Record, now: ManagerNow) -> TransactionStatus:
    expires_ms = record.expires_ms
    if record.state == "in_progress" and now.wall_ms < record.started_ms:
        # The clock was set back, so the recorded time is too far in the future; the deadline applies.
        expires_ms = min(expires_ms, now.wall_ms + max(0, round((record.deadline_s - now.mono_s) * 1000)))
    kept = record.transaction_id in ledger.outcomes
    return TransactionStatus(
        record.transaction_id,
        record.state,
        record.pointers[-1],
        record.type,
        record.client_id,
        record.started_ms,
        expires_ms,
        record.decided_ms + ledger.settings.outcome_retention_ms if kept else None,
        record.decided_ms or None,
        record.pointers,
        service=ledger.head.service,
        owner=record.owner,
    )


# --- as of a moment --------------------------------------------------------------------------------


def as_of(ledger: Ledger, step: ManagerStep, ask: AsOf, now: ManagerNow) -> Moment:
    """Return the transactions decided by a moment; later decisions get times after it.

    This promise is made durable with the answer: the next owner's clock may be behind, and its commits must not change
    what readers have seen as of the moment.
    """
    head, at_ms = ledger.head, ask.at_ms
    if at_ms < head.oldest_ms:
        raise AsOfTooOld(
            f"the daemon no longer remembers what was committed by {at_ms}; the earliest readable moment is "
            f"{head.oldest_ms}",
            hint="outcomes are remembered for transactions.outcome_retention_s, and at most transactions.max_outcomes",
        )
    if at_ms >= head.decided_ms:
        if at_ms > now.wall_ms:
            raise in_the_future(at_ms, now.wall_ms)
        head.decided_ms = at_ms + 1
        step.write_head()
    return Moment(at_ms, ledger.undecided_at(at_ms), tuple(ledger.invalid), head.first, head.last)


# --- invalid list ----------------------------------------------------------------------------------


class InvalidTruncateTime(InvalidParameter):
    """A transaction that began before this time is in progress."""


def unlist(ledger: Ledger, step: ManagerStep, ask: Unlist, now: ManagerNow) -> int:
    """Remove pointers from the invalid list; their rows must be rolled back everywhere."""
    return _unlist(ledger, step, ask.pointers, now)


def invalid_before(ledger: Ledger, step: ManagerStep, ask: InvalidBefore, now: ManagerNow) -> tuple[int, ...]:
    """Find invalid pointers issued before a time. Raises InvalidTruncateTime."""
    del step, now
    bound = ask.before_ms * POINTERS_PER_MS
    if ledger.in_progress and ledger.in_progress[0] < bound:
        raise InvalidTruncateTime(
            f"transaction {ledger.in_progress[0]} began before {ask.before_ms} and is in progress",
            hint=f"use a time up to {issued_ms(ledger.in_progress[0])}",
        )
    return tuple(pointer for pointer in ledger.invalid if pointer < bound)


def keep_pass(ledger: Ledger, step: ManagerStep, ask: KeepPass, now: ManagerNow) -> int:
    """Record a complete pass, and remove its pointers from the list if they are past their lifetime."""
    passed = ask.passed
    ledger.last_pass = LastPass(passed.begun_ms, passed.bound)
    step.write_pass(ledger.last_pass)
    if kept_because(ledger.settings) is not None:
        return 0
    lifetime_ms = ledger.settings.max_lifetime_ms
    over = [pointer for pointer in passed.invalids if issued_ms(pointer) + lifetime_ms <= now.wall_ms]
    return _unlist(ledger, step, over, now)


def kept_because(settings: TransactionSettings) -> str | None:
    """Return the reason if pointers are not pruned automatically, else None."""
    if not settings.max_lifetime_ms:
        return "transactions.max_lifetime_s is 0: a client may still write under the oldest pointer"
    if not settings.prune:
        return "transactions.prune is off, or other stores may rely on the list (transactions.thrift)"
    return None


def _unlist(ledger: Ledger, step: ManagerStep, pointers: Iterable[int], now: ManagerNow) -> int:
    by_record: dict[int, tuple[Record, list[int]]] = {}
    for pointer in dict.fromkeys(pointers):
        record = ledger.by_pointer.get(pointer)
        if record is not None and pointer in record.listed:
            by_record.setdefault(record.transaction_id, (record, []))[1].append(pointer)
    count = 0
    for record, wanted in by_record.values():
        gone = ledger.unlist(record, wanted)
        count += len(gone)
        step.changes.append(Change(unlisted=gone))
        step.decided.extend(gone)
        if not record.listed:
            record.decided_ms, record.decided_at = ledger.decide_ms(now.wall_ms), ledger.head.last
            ledger.remember(record)
            step.release(record)
        step.write_record(record)
    return count
