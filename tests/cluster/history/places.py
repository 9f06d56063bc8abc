"""The planting of anomalies in a correct history, and what the planters share.

A planter takes a history and random numbers, changes the history, and returns whether it found a place for the anomaly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from plainsong.protocol.ids import pack_id
from tests.cluster.history.records import History, Kind, Poll, Transaction, Write

Planter = Callable[[History, Random], bool]
Planters = list[tuple[Kind, Planter]]


def into(planters: Planters) -> Callable[[Kind], Callable[[Planter], Planter]]:
    """Return a decorator that registers a planter with the kind of anomaly it makes."""

    def plants(kind: Kind) -> Callable[[Planter], Planter]:
        def kept(planter: Planter) -> Planter:
            planters.append((kind, planter))
            return planter

        return kept

    return plants


def some_write(history: History, rng: Random, suits: Callable[[Write], bool]) -> Write | None:
    found = [write for write in history.writes if suits(write)]
    return rng.choice(found) if found else None


def some_transaction(history: History, rng: Random, suits: Callable[[Transaction], bool]) -> Transaction | None:
    found = [each for each in history.transactions if suits(each)]
    return rng.choice(found) if found else None


def some_poll(history: History, rng: Random, suits: Callable[[Poll], bool]) -> int | None:
    found = [at for at, poll in enumerate(history.polls) if suits(poll)]
    return rng.choice(found) if found else None


def ids_of(history: History, write: Write) -> list[bytes]:
    return [message_id for message_id, payload, _ in history.logs[write.topic] if payload in write.payloads]


def rows_of(history: History, transaction: Transaction, topic: str) -> list[bytes]:
    return [row_id for row_id, _, pointer in history.logs[topic] if abs(pointer) == transaction.id]


def shows(poll: Poll, write: Write) -> bool:
    return any(payload in write.payloads for _, payload in poll.messages)


def remove(history: History, *payloads: bytes) -> None:
    for topic, rows in history.logs.items():
        history.logs[topic] = [row for row in rows if row[1] not in payloads]


def append(history: History, topic: str, payload: bytes, pointer: int = 0) -> None:
    history.logs[topic] = [*history.logs[topic], (pack_id(9_000 + len(history.logs[topic]), 0), payload, pointer)]


def end_before(poll: Poll, stop: bytes) -> Poll:
    """Return the page as if it had ended before an id."""
    messages = tuple(message for message in poll.messages if message[0] < stop)
    return replace(poll, messages=messages, through=messages[-1][0] if messages else None, end="end")


def is_last_of(history: History, topic: str, *, committed: bool) -> Callable[[Poll], bool]:
    """Return a predicate: true for polls made after all work had ended that read the whole topic."""
    over_s = max([poll.ended_s for poll in history.polls if poll.end == "held"] + [w.began_s for w in history.writes])

    def suits(poll: Poll) -> bool:
        found = (poll.topic, poll.committed, poll.end) == (topic, committed, "end")
        return found and poll.since < pack_id(1_000, 0) and poll.began_s > over_s

    return suits
