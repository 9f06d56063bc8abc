"""Begin and checkpoint: pointers are issued, and snapshots taken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter, Overloaded, TransactionNotFound, TransactionNotInProgress
from protocol.transactions.manager.answers import Begun
from protocol.transactions.manager.record import Record
from protocol.transactions.manager.visible import Change
from protocol.transactions.transaction import NO_TRANSACTION, Transaction, TransactionType

if TYPE_CHECKING:
    from protocol.transactions.manager.asks import Begin, Checkpoint
    from protocol.transactions.manager.ledger import Ledger
    from protocol.transactions.manager.settings import TransactionSettings
    from protocol.transactions.manager.step import Now, Step


def begin(ledger: Ledger, step: Step, ask: Begin, now: Now) -> Begun:
    """Issue a pointer; the snapshot is of the moment before it."""
    settings = ledger.settings
    timeout_ms = _timeout_ms(settings, ask)
    _client_id(settings, ask.client_id)
    _room(ledger)
    if len(ledger.invalid) >= settings.max_invalid:
        raise Overloaded(f"{len(ledger.invalid)} pointers are invalid", hint="see `plainsong tx pruning`")
    invalids, in_progress, first_short = tuple(ledger.invalid), tuple(ledger.in_progress), ledger.first_short
    pointer = ledger.next_pointer(now.wall_ms)
    read_pointer = ledger.head.read_pointer
    record = Record(
        pointer,
        ask.type,
        ask.client_id,
        started_ms=now.wall_ms,
        expires_ms=now.wall_ms + timeout_ms,
        bound=in_progress[0] - 1 if in_progress else min(pointer - 1, read_pointer),
        read_pointer=read_pointer,
        deadline_s=now.mono_s + timeout_ms / 1000,
    )
    ledger.begin(record)
    step.changes.append(Change(opened=record.pointers))
    step.keep(record)
    return Begun(
        Transaction(read_pointer, pointer, pointer, invalids, in_progress, first_short, ask.type),
        record.expires_ms,
        ledger.head.first,
    )


def checkpoint(ledger: Ledger, step: Step, ask: Checkpoint, now: Now) -> Begun:
    """Issue one more pointer to an open transaction; what it reads stays as it was."""
    record = in_progress(ledger, ask.transaction_id)
    _room(ledger)
    if len(record.checkpoints) >= ledger.settings.max_checkpoints:
        raise Overloaded(
            f"transaction {record.transaction_id} has {len(record.checkpoints)} checkpoints",
            hint="commit it, and go on in another one",
        )
    snapshot = ask.transaction or _snapshot_of(ledger, record)
    pointer = ledger.next_pointer(now.wall_ms)
    ledger.add_checkpoint(record, pointer)
    step.changes.append(Change(opened=(pointer,)))
    step.keep(record)
    return Begun(
        replace(
            snapshot,
            transaction_id=record.transaction_id,
            type=record.type,
            write_pointer=pointer,
            checkpoint_write_pointers=record.checkpoints,
        ),
        record.expires_ms,
        ledger.head.first,
    )


def known(ledger: Ledger, transaction_id: int) -> Record:
    """The record of a transaction. Raises TransactionNotFound; also for a checkpoint's pointer."""
    record = ledger.by_pointer.get(transaction_id)
    if record is None:
        raise TransactionNotFound(
            f"transaction {transaction_id} is not known",
            hint="decisions are remembered for transactions.outcome_retention_s",
        )
    if record.transaction_id != transaction_id:
        raise TransactionNotFound(
            f"{transaction_id} is the pointer of a checkpoint", hint=f"its transaction is {record.transaction_id}"
        )
    return record


def in_progress(ledger: Ledger, transaction_id: int) -> Record:
    """The record of a transaction that is open and not being decided.

    Raises:
      TransactionNotFound, TransactionNotInProgress.
    """
    record = known(ledger, transaction_id)
    if record.state != "in_progress":
        raise not_in_progress(record)
    if record.aborting or record.frozen:
        doing = "aborted" if record.aborting else "committed"
        raise TransactionNotInProgress(f"transaction {transaction_id} is being {doing}")
    return record


def not_in_progress(record: Record) -> TransactionNotInProgress:
    """The error that says what a transaction has become."""
    if record.state == "invalid":
        return TransactionNotInProgress(
            f"transaction {record.transaction_id} is invalid",
            hint=f"it had until {record.expires_ms} (ms since 1970); abort it, and run it again",
        )
    return TransactionNotInProgress(f"transaction {record.transaction_id} was {record.state} before")


def _snapshot_of(ledger: Ledger, record: Record) -> Transaction:
    """The snapshot a transaction began with, from what became of the others since.

    What was open then is open now, or was decided after it began. Whatever was aborted or left the invalid list
    since then counts as open, which shows no more.
    """
    began = record.transaction_id
    if ledger.head.forgotten >= began:
        raise InvalidParameter(
            f"too much has been decided since transaction {began} began to know what it read",
            hint="send its snapshot along",
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
            raise InvalidParameter("a long transaction takes no time-out", hint="transactions.long_timeout_s is its")
        timeout_ms = settings.long_timeout_ms
    elif ask.timeout_s is None:
        timeout_ms = settings.timeout_ms
    else:
        timeout_ms = ask.timeout_s * 1000
        if not 0 < timeout_ms <= settings.max_timeout_ms:
            raise InvalidParameter(
                f"a time-out of {ask.timeout_s} s", hint=f"from 1 to {settings.max_timeout_ms // 1000} seconds"
            )
    return min(timeout_ms, settings.max_lifetime_ms or timeout_ms)


def _client_id(settings: TransactionSettings, client_id: str) -> None:
    if not client_id or len(client_id.encode("utf-8", "replace")) > settings.max_client_id_bytes:
        raise InvalidParameter(
            "the client id is empty or too long", hint=f"1 to {settings.max_client_id_bytes} bytes of text"
        )


def _room(ledger: Ledger) -> None:
    if len(ledger.in_progress) >= ledger.settings.max_open:
        raise Overloaded(
            f"{len(ledger.in_progress)} pointers are in progress", hint="wait, or raise transactions.max_open"
        )
