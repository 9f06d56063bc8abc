"""Anomalies of order: ids that contradict time, and producers' sequences that contradict ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from tests.cluster.history.outcome import Outcome
from tests.cluster.history.records import Anomaly, Opening, Write


def of_time(outcome: Outcome) -> Iterator[Anomaly]:
    """A request sent after a response gets an id greater than any in that response."""
    events: dict[str, list[tuple[float, bytes, str]]] = defaultdict(list)
    for write in outcome.history.writes:
        if write.receipts:
            events[write.topic].append((write.ended_s, write.receipts[0][1], ""))
    for poll in outcome.history.polls:
        if poll.messages:
            events[poll.topic].append((poll.ended_s, poll.messages[-1][0], poll.name))
    writes: dict[str, list[tuple[float, bytes, Write]]] = defaultdict(list)
    for write in outcome.history.writes:
        rows = outcome.places(write)
        if rows:
            writes[write.topic].append((write.began_s, rows[0][0], write))
    for topic, begun in writes.items():
        yield from _of_topic(sorted(events[topic]), sorted(begun, key=lambda each: each[:2]))


def _of_topic(events: list[tuple[float, bytes, str]], begun: list[tuple[float, bytes, Write]]) -> Iterator[Anomaly]:
    at, acknowledged, read, reader = 0, b"", b"", ""
    for began_s, first_id, write in begun:
        while at < len(events) and events[at][0] < began_s:
            _, highest, name = events[at]
            if not name:
                acknowledged = max(acknowledged, highest)
            elif highest > read:
                read, reader = highest, name
            at += 1
        if first_id <= read:
            yield Anomaly("behind", f"{write.name} got {first_id.hex()} after {reader} had read {read.hex()}")
        if first_id <= acknowledged:
            yield Anomaly("backwards", f"{write.name} got {first_id.hex()} after {acknowledged.hex()} was given")


def of_producers(outcome: Outcome) -> Iterator[Anomaly]:
    """Sequences are in order; opening a session returns the last acknowledged sequence, and fences older sessions."""
    writes = [write for write in outcome.history.writes if write.producer is not None]
    openings = sorted(outcome.history.openings, key=lambda each: (each.producer, each.topic, each.began_s))
    opened = {key: list(each) for key, each in groupby(openings, lambda each: (each.producer, each.topic))}
    by_producer: dict[tuple[str, str], list[Write]] = defaultdict(list)
    for write in writes:
        by_producer[write.producer or "", write.topic].append(write)
    for theirs in by_producer.values():
        yield from _of_sequences(outcome, theirs)
    for key, sessions in opened.items():
        yield from _of_epochs(sessions)
        for opening in sessions:
            yield from _of_opening(opening, by_producer[key])


def _of_sequences(outcome: Outcome, writes: list[Write]) -> Iterator[Anomaly]:
    places = [
        (sequence, row[0], write)
        for write in writes
        # A batch of staged messages has one sequence id, at the place of its first message.
        for sequence, payload in zip(write.sequences, write.payloads, strict=len(write.sequences) > 1)
        if (row := outcome.row(write, payload)) is not None
    ]
    last_sequence, last_id = -1, b""
    for sequence, message_id, write in sorted(places, key=lambda each: each[:2]):
        if sequence == last_sequence:
            yield Anomaly("doubled", f"{sequence} of {write.producer} is present twice: {write.name}")
        elif message_id < last_id:
            yield Anomaly("reordered", f"{sequence} of {write.producer} precedes {last_sequence}: {write.name}")
        last_sequence, last_id = sequence, message_id


def _of_epochs(openings: list[Opening]) -> Iterator[Anomaly]:
    """Epochs are unique, and a session opened after a response gets a greater epoch."""
    epochs: set[int] = set()
    by_told, at, highest = sorted(openings, key=lambda each: each.ended_s), 0, 0
    for opening in openings:
        while at < len(by_told) and by_told[at].ended_s < opening.began_s:
            highest = max(highest, by_told[at].epoch)
            at += 1
        if opening.epoch in epochs or opening.epoch <= highest:
            yield Anomaly("not fenced", f"{opening.producer} was given epoch {opening.epoch} after {highest}")
        epochs.add(opening.epoch)


def _of_opening(opening: Opening, writes: list[Write]) -> Iterator[Anomaly]:
    sent = max((write.sequences[-1] for write in writes if write.began_s <= opening.ended_s), default=-1)
    if opening.last_sequence > sent:
        yield Anomaly(
            "foretold", f"{opening.producer} was given {opening.last_sequence}, but had sent only up to {sent}"
        )
    for write in writes:
        if write.ended_s < opening.began_s and write.sequences[-1] > opening.last_sequence:
            told = f"{opening.producer} was given {opening.last_sequence} after {write.sequences[-1]} was acknowledged"
            yield Anomaly("forgotten", f"{told}: {write.name}")
        is_older = write.epoch is not None and write.epoch < opening.epoch
        if is_older and write.began_s > opening.ended_s and write.outcome == "acknowledged":
            yield Anomaly("not fenced", f"epoch {write.epoch} after epoch {opening.epoch} was issued: {write.name}")
