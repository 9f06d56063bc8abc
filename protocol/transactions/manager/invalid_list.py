"""The invalid list: what may leave it, and what is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter
from protocol.transactions.manager.answers import PruningFigures
from protocol.transactions.manager.rows import LastPass
from protocol.transactions.manager.visible import Change
from protocol.transactions.transaction import POINTERS_PER_MS, issued_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from protocol.names import TopicName
    from protocol.transactions.manager.asks import InvalidBefore, KeepPass, Unlist
    from protocol.transactions.manager.core import ManagerCore
    from protocol.transactions.manager.ledger import Ledger
    from protocol.transactions.manager.record import Record
    from protocol.transactions.manager.settings import TransactionSettings
    from protocol.transactions.manager.step import Now, Step


class InvalidTruncateTime(InvalidParameter):
    """A transaction that began before this time is in progress."""


def unlist(ledger: Ledger, step: Step, ask: Unlist, now: Now) -> int:
    """Take pointers off the list; their rows have been rolled back everywhere."""
    return _unlist(ledger, step, ask.pointers, now)


def invalid_before(ledger: Ledger, step: Step, ask: InvalidBefore, now: Now) -> tuple[int, ...]:
    """Invalid pointers issued before a time."""
    del step, now
    bound = ask.before_ms * POINTERS_PER_MS
    if ledger.in_progress and ledger.in_progress[0] < bound:
        raise InvalidTruncateTime(
            f"transaction {ledger.in_progress[0]} began before {ask.before_ms} and is in progress",
            hint=f"use a time up to {issued_ms(ledger.in_progress[0])}",
        )
    return tuple(pointer for pointer in ledger.invalid if pointer < bound)


def keep_pass(ledger: Ledger, step: Step, ask: KeepPass, now: Now) -> int:
    """Keep what a complete pass has shown, and take those of its pointers off the list that nobody can use any more."""
    passed = ask.passed
    ledger.last_pass = LastPass(passed.begun_ms, passed.bound)
    step.keep_pass(ledger.last_pass)
    if kept_because(ledger.settings) is not None:
        return 0
    lifetime_ms = ledger.settings.max_lifetime_ms
    over = [pointer for pointer in passed.invalids if issued_ms(pointer) + lifetime_ms <= now.wall_ms]
    return _unlist(ledger, step, over, now)


def kept_because(settings: TransactionSettings) -> str | None:
    """Why nothing is pruned by itself; None: it is."""
    if not settings.max_lifetime_ms:
        return "transactions.max_lifetime_s is 0: somebody may still write under the oldest pointer"
    if not settings.prune:
        return "transactions.prune is off, or other stores may rely on the list (transactions.thrift)"
    return None


def pruning_figures(core: ManagerCore, oldest_by_topic: Mapping[TopicName, int]) -> PruningFigures:
    """What an operator needs for pruning by hand."""
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


def _unlist(ledger: Ledger, step: Step, pointers: Iterable[int], now: Now) -> int:
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
            record.decided_ms, record.decided_at = now.wall_ms, ledger.head.last
            ledger.remember(record)
            step.release(record)
        step.keep(record)
    return count
