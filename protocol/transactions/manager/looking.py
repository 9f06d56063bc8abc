"""What is said of transactions to whoever asks: one, or a list of them, or all in Tephra's snapshot."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter, nearest
from protocol.transactions.manager.answers import TransactionStatus
from protocol.transactions.tephra_state import Entry, EntryType, ManagerState
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.transactions.manager.asks import ListAll, LookAt
    from protocol.transactions.manager.ledger import Ledger
    from protocol.transactions.manager.record import Record
    from protocol.transactions.manager.step import Now, Step
    from protocol.transactions.manager.visible import Visible

STATES = ("in_progress", "invalid", "committed", "aborted")


def look_at(ledger: Ledger, step: Step, ask: LookAt, now: Now) -> TransactionStatus:
    """What is known of a pointer's transaction."""
    del step
    record = ledger.by_pointer.get(ask.pointer)
    if record is None:
        return TransactionStatus(ask.pointer, "unknown", ask.pointer, service=ledger.head.first)
    return _status(ledger, record, now)


def list_transactions(ledger: Ledger, step: Step, ask: ListAll, now: Now) -> list[TransactionStatus]:
    """Transactions of one state, or the open and invalid ones; oldest first."""
    del step
    if ask.state is not None and ask.state not in STATES:
        raise InvalidParameter(f"state {ask.state!r}", hint=nearest(ask.state, STATES))
    return [_status(ledger, record, now) for record in islice(_chosen(ledger, ask), ask.limit)]


def _chosen(ledger: Ledger, ask: ListAll) -> Iterable[Record]:
    if ask.state == "in_progress":
        return ledger.open.values()
    invalid = {record.transaction_id: record for record in map(ledger.by_pointer.__getitem__, ledger.invalid)}
    if ask.state is None:
        return [record for _, record in sorted((ledger.open | invalid).items())]
    if ask.state == "invalid":
        return [*invalid.values(), *(each for each in ledger.outcomes.values() if each.state == "invalid")]
    return (record for record in ledger.outcomes.values() if record.state == ask.state)


def _status(ledger: Ledger, record: Record, now: Now) -> TransactionStatus:
    expires_ms = record.expires_ms
    if record.state == "in_progress" and now.wall_ms < record.started_ms:
        # The clock was set back, so what was noted is too far away; the deadline counts.
        expires_ms = min(expires_ms, now.wall_ms + max(0, round((record.deadline_s - now.mono_s) * 1000)))
    kept = record.transaction_id in ledger.outcomes
    return TransactionStatus(
        record.transaction_id,
        record.state,
        record.write_pointer,
        record.type,
        record.client_id,
        record.started_ms,
        expires_ms,
        record.decided_ms + ledger.settings.outcome_retention_ms if kept else None,
        record.decided_ms or None,
        record.pointers,
        service=ledger.head.first,
    )


def manager_state(ledger: Ledger, visible: Visible, now_ms: int) -> ManagerState:
    """All of it that Tephra's snapshot has a place for, and that is durable: others go by what is in it."""
    entries: dict[int, Entry] = {}
    for pointer in visible.in_progress():
        record = ledger.by_pointer[pointer]
        if pointer != record.transaction_id:
            entries[pointer] = Entry(record.expires_ms, record.bound, EntryType.CHECKPOINT)
            continue
        kind = EntryType.LONG if record.type is TransactionType.LONG else EntryType.SHORT
        entries[pointer] = Entry(record.expires_ms, record.bound, kind, record.checkpoints)
    committed: dict[int, frozenset[bytes]] = {}
    for changes in ledger.committed:
        pointer = changes.commit_pointer or 0
        committed[pointer] = committed.get(pointer, frozenset()) | changes.keys
    return ManagerState(
        now_ms,
        visible.read_pointer,
        ledger.head.last,
        visible.invalids(),
        entries,
        {pointer: tuple(sorted(changes.keys)) for pointer, changes in ledger.prepared.items()},
        {pointer: tuple(sorted(keys)) for pointer, keys in committed.items()},
    )
