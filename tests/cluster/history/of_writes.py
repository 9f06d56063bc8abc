"""Anomalies of the final state: lost, duplicate, split or unexpected messages."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tests.cluster.history.outcome import Outcome
from tests.cluster.history.records import Anomaly, Row, Transaction, Write


def of_writes(outcome: Outcome) -> Iterator[Anomaly]:
    """Check every request against the log of its topic."""
    for write in outcome.history.writes:
        rows = outcome.places(write)
        if write.outcome == "acknowledged" and len(rows) < len(write.payloads):
            yield Anomaly(
                "lost", f"only {len(rows)} of {len(write.payloads)} acknowledged messages are present: {write.name}"
            )
        elif 0 < len(rows) < len(write.payloads):
            yield Anomaly("split", f"only {len(rows)} of {len(write.payloads)} messages are present: {write.name}")
        if write.outcome == "refused" and rows:
            yield Anomaly("applied anyway", f"it was refused: {write.name}")
        if write.transaction is not None and write.transaction.committed_s < write.began_s and write.ended_s < inf:
            yield Anomaly("applied anyway", f"its transaction had been reported as committed before: {write.name}")
        yield from _of_receipts(write, rows)
        yield from _of_pointers(write, rows)


def _of_receipts(write: Write, rows: list[Row]) -> Iterator[Anomaly]:
    if len(set(write.receipts)) > 1:
        yield Anomaly("doubled", f"it was acknowledged with different ids: {write.name}")
    if not rows or len(rows) < len(write.payloads):
        return
    there = rows[0][0], rows[-1][0]
    if any(receipt != there for receipt in write.receipts):
        yield Anomaly("reordered", f"it is not where its receipt says, but at {there[0].hex()}: {write.name}")


def _of_pointers(write: Write, rows: list[Row]) -> Iterator[Anomaly]:
    turned = sum(pointer < 0 for _, _, pointer in rows)
    if 0 < turned < len(rows):
        yield Anomaly("split", f"{turned} of {len(rows)} are rolled back: {write.name}")
    elif turned and write.transaction is not None and write.transaction.state == "committed":
        yield Anomaly("lost", f"rolled back, although its transaction is committed: {write.name}")


def of_logs(outcome: Outcome) -> Iterator[Anomaly]:
    """Check every log on its own."""
    for topic, rows in outcome.history.logs.items():
        once: set[bytes] = set()
        before = b""
        for message_id, payload, pointer in rows:
            where = f"{payload!r} at {message_id.hex()} of {topic}"
            if payload in once:
                yield Anomaly("doubled", f"{where} is present twice")
            if message_id == before:
                yield Anomaly("doubled", f"{where} has the id of the previous message")
            elif message_id < before:
                yield Anomaly("reordered", f"{where} follows {before.hex()}")
            once.add(payload)
            before = message_id
            yield from _of_origin(outcome, topic, payload, pointer, where)


def _of_origin(outcome: Outcome, topic: str, payload: bytes, pointer: int, where: str) -> Iterator[Anomaly]:
    write = outcome.writes.get(payload)
    if write is None or write.topic != topic:
        yield Anomaly("applied anyway", f"{where} was not sent there")
    elif abs(pointer) not in (write.transaction.pointers if write.transaction else (0,)):
        yield Anomaly("uncommitted", f"{where} has the pointer {pointer}, which is not its own")


def of_transactions(outcome: Outcome) -> Iterator[Anomaly]:
    """Compare each transaction's state with the responses to clients, and check transaction ids."""
    transactions = outcome.history.transactions
    for each in transactions:
        yield from _of_decision(each)
    yield from _of_numbers(transactions)


def _of_numbers(transactions: list[Transaction]) -> Iterator[Anomaly]:
    """Ids are unique, and greater than all ids returned before the begin was requested."""
    highest, by_told, at = 0, sorted(transactions, key=lambda each: each.told_s), 0
    numbers: set[int] = set()
    for each in sorted(transactions, key=lambda each: each.begun_s):
        while at < len(by_told) and by_told[at].told_s < each.begun_s:
            highest = max(highest, by_told[at].id)
            at += 1
        if each.id in numbers:
            yield Anomaly("doubled", f"two transactions were given the number {each.id}")
        elif each.id < highest:
            yield Anomaly("backwards", f"a transaction was given {each.id} after {highest}")
        numbers.add(each.id)


def _of_decision(each: Transaction) -> Iterator[Anomaly]:
    if each.committed_s < inf and each.state != "committed":
        yield Anomaly("lost", f"{each.id} was reported as committed, but is {each.state}")
    if each.undone_s < inf and each.state == "committed":
        yield Anomaly("applied anyway", f"{each.id} was reported as undone, but is committed")
    if each.asked_s == inf and each.state == "committed":
        yield Anomaly("applied anyway", f"{each.id} is committed, but no client asked for it")
