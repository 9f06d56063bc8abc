"""The figures of a report, computed again in simple Python over plain lists, for comparison with Spark's."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pyspark_plainsong.pipeline.report.facts import Grid
from pyspark_plainsong.pipeline.report.sources import Decision


class Row(NamedTuple):
    """One message, as ``MESSAGES`` has it."""

    topic: str
    message_id: bytes
    publish_ms: int
    write_ms: int | None
    bytes: int
    pointer: int


class Topic(NamedTuple):
    topic: str
    ttl_ms: int
    known_from_ms: int
    whole: bool


def sizes(rows: Sequence[Row], topics: Sequence[Topic], grid: Grid) -> set[tuple]:
    found = set()
    for topic in topics:
        for time_ms in grid.samples():
            alive = [
                row.bytes
                for row in rows
                if row.topic == topic.topic and row.publish_ms <= time_ms <= row.publish_ms + topic.ttl_ms
            ]
            complete = topic.whole or time_ms - topic.ttl_ms >= topic.known_from_ms
            found.add((topic.topic, time_ms, len(alive), sum(alive), complete))
    return found


def rates(rows: Sequence[Row], topics: Sequence[Topic], grid: Grid) -> set[tuple]:
    found = set()
    for topic in topics:
        for start_ms in grid.starts():
            stop_ms = min(start_ms + grid.step_ms, grid.end_ms)
            of_step = [row.bytes for row in rows if row.topic == topic.topic and start_ms <= row.publish_ms < stop_ms]
            found.add((topic.topic, start_ms, len(of_step), sum(of_step)))
    return found


def visible(rows: Sequence[Row], decisions: Sequence[Decision]) -> dict[bytes, tuple[int | None, str]]:
    """Return each message's wait, and how exactly it is known. Passes over each topic in a reader's order."""
    known = {decision.pointer: decision for decision in decisions}
    found: dict[bytes, tuple[int | None, str]] = {}
    by_topic: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.message_id):
        by_topic[row.topic].append(row)
    for each in by_topic.values():
        at_ms, held, doubtful = 0, False, False
        for row in each:
            at_ms = max(at_ms, row.publish_ms)
            state, decided_ms = "plain", None
            if row.pointer:
                decision = known.get(abs(row.pointer))
                state, decided_ms = ("unknown", None) if decision is None else (decision.state, decision.decided_ms)
                if row.pointer < 0 and state in ("committed", "in_progress"):
                    decided_ms = None
                if row.pointer < 0:
                    state = "rolled_back"
                held = held or state == "in_progress"
                doubtful = doubtful or (state != "in_progress" and decided_ms is None)
                at_ms = max(at_ms, decided_ms or 0)
            if state in ("rolled_back", "aborted", "invalid"):
                found[row.message_id] = (None, "never")
            elif held:
                found[row.message_id] = (None, "waiting")
            elif state == "unknown":
                found[row.message_id] = (None, "unknown")
            else:
                found[row.message_id] = (at_ms - row.publish_ms, "at_least" if doubtful else "exact")
    return found


def quantile(values: Sequence[int], part: float) -> float:
    """Interpolated between the two values next to it."""
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def a_history(seed: int, count: int, start_ms: int) -> tuple[list[Row], list[Decision]]:
    """Messages of three topics, plain and of transactions with every outcome, and the service's report on these."""
    random_ = random.Random(seed)
    rows: list[Row] = []
    decisions: list[Decision] = []
    states = ["committed", "committed", "committed", "aborted", "invalid", "unknown"]
    now_ms = start_ms
    for number in range(count):
        now_ms += random_.choice([0, 1, 7, 40, 900])
        topic = random_.choice(["ns:a", "ns:b", "ns:c"])
        pointer, write_ms = 0, None
        if random_.random() < 0.4:
            if not decisions or random_.random() < 0.5:
                begun_ms = now_ms - random_.randrange(500)
                state = random_.choice(states)
                number_of = begun_ms * 1_000_000 + number
                ended = None if state == "unknown" else now_ms + random_.randrange(3000)
                decisions.append(Decision(number_of, number_of, f"client-{number % 3}", state, begun_ms, ended))
            decision = decisions[-1]
            pointer = decision.pointer
            if decision.state == "aborted" or random_.random() < 0.05:
                pointer = -pointer
            write_ms = random_.choice([None, now_ms - random_.randrange(200)])
        message_id = now_ms.to_bytes(8, "big") + number.to_bytes(2, "big") + bytes(10)
        rows.append(Row(topic, message_id, now_ms, write_ms, random_.randrange(200), pointer))
    return rows, decisions
