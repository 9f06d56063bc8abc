"""Read anomalies: each page is compared with the log as a reader with its isolation must see it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from math import inf

from tests.cluster.history.outcome import Outcome, Stretch, Unit
from tests.cluster.history.records import Anomaly, Kind, Poll, Transaction


def of_reads(outcome: Outcome) -> Iterator[Anomaly]:
    """Check every page."""
    views: dict[int, set[Unit]] = defaultdict(set)
    for poll in outcome.history.polls:
        if poll.view is not None:
            # A view covers only transactions: plain messages of several topics are not read at one moment.
            views[poll.view] |= {unit for unit in outcome.units_of(poll) if isinstance(unit, Transaction)}
    for poll in outcome.history.polls:
        ids = [message_id for message_id, _ in poll.messages]
        if len(set(ids)) < len(ids) or len({payload for _, payload in poll.messages}) < len(ids):
            yield Anomaly("doubled", f"{poll.name} saw a message twice in a page of {poll.topic}")
        elif ids != sorted(ids) or (ids and ids[0] < poll.since):
            yield Anomaly("reordered", f"{poll.name} saw a page of {poll.topic} out of order, or from before its start")
        else:
            shown = outcome.units_of(poll) | (views[poll.view] if poll.view is not None else set())
            yield from _of_page(outcome, poll)
            yield from _of_end(outcome, poll, shown)


def _of_page(outcome: Outcome, poll: Poll) -> Iterator[Anomaly]:
    """Check the messages of a page, and those that it skipped."""
    face = outcome.stretches[poll.topic, poll.committed]
    low, high = bisect_left(face.ids, poll.since), bisect_right(face.ids, poll.last)
    ids = [message_id for message_id, _ in poll.messages]
    payloads = [payload for _, payload in poll.messages]
    if face.ids[low:high] != ids or face.payloads[low:high] != payloads:
        yield from _of_difference(outcome, poll, face, low, high)
    if not poll.committed:
        return
    for unit in outcome.units_of(poll):
        if isinstance(unit, Transaction) and poll.ended_s < unit.asked_s:
            yield Anomaly("uncommitted", f"{poll.name} saw {unit.id} before its commit was requested")


def _of_difference(outcome: Outcome, poll: Poll, face: Stretch, low: int, high: int) -> Iterator[Anomaly]:
    there = dict(poll.messages)
    for at in range(low, max(low, high)):
        if face.ids[at] not in there:
            told = f"{poll.name} passed {face.payloads[at]!r} at {face.ids[at].hex()} without seeing it"
            yield Anomaly("behind", told)
    expected = dict(zip(face.ids[low:high], face.payloads[low:high], strict=True))
    for message_id, payload in poll.messages:
        if expected.get(message_id) != payload:
            kind = _of_stranger(outcome, poll, message_id, payload)
            yield Anomaly(kind, f"{poll.name} saw {payload!r} at {message_id.hex()} of {poll.topic}")


def _of_stranger(outcome: Outcome, poll: Poll, message_id: bytes, payload: bytes) -> Kind:
    """Classify a message that was read but is not in the log at that place for readers of this kind."""
    row = outcome.rows[poll.topic].get(payload)
    if row is None:
        return "vanished"
    if row[0] != message_id:
        return "reordered"
    return "uncommitted" if poll.committed else "vanished"


def _of_end(outcome: Outcome, poll: Poll, shown: set[Unit]) -> Iterator[Anomaly]:
    """Check the end of a page for messages that it should have included."""
    if poll.end == "more":
        return
    face = outcome.stretches[poll.topic, poll.committed]
    at, stop = bisect_right(face.ids, max(poll.last, _before(poll.since))), len(face.ids)
    if poll.end == "held":
        holder = outcome.by_pointer.get(poll.held_by or 0)
        held_at = _first_row(outcome, poll, holder)
        if holder is None or held_at is None:
            told = f"{poll.name} was held in {poll.topic} by {poll.held_by}, which has no messages there"
            yield Anomaly("held by the decided", told)
            return
        yield from _of_holder(outcome, poll, holder, shown)
        stop = bisect_left(face.ids, held_at)
    for unit in shown:
        if at <= face.last_at.get(unit, -1) < stop:
            text = f"{poll.name} saw only a part of the unit of {face.payloads[face.last_at[unit]]!r}"
            yield Anomaly("split", text)
    if at < stop and face.soonest_s[at] < poll.began_s:
        yield from _of_missed(outcome, poll, face, at, stop)


def _of_missed(outcome: Outcome, poll: Poll, face: Stretch, at: int, stop: int) -> Iterator[Anomaly]:
    """Yield at most one anomaly of each kind for the messages that the poll should have returned."""
    told: set[Kind] = set()
    for index in range(at, stop):
        if face.known_s[index] >= poll.began_s:
            continue
        unit = face.units[index]
        if not isinstance(unit, Transaction):
            kind: Kind = "stale"
        else:
            kind = "commit unseen" if unit.committed_s < poll.began_s else "split"
        if kind in told:
            continue
        told.add(kind)
        known = "was acknowledged" if outcome.told_s(unit, poll.committed) < poll.began_s else "had been seen"
        yield Anomaly(kind, f"{poll.name} did not get {face.payloads[index]!r} of {poll.topic}, which {known}")


def _of_holder(outcome: Outcome, poll: Poll, holder: Transaction, shown: set[Unit]) -> Iterator[Anomaly]:
    told = f"{poll.name} was held in {poll.topic} by {holder.id}"
    if holder in shown:
        yield Anomaly("split", f"{told}, but saw another part of it")
    elif min(outcome.seen_s.get((holder, True), inf), holder.undone_s) < poll.began_s:
        yield Anomaly("held by the decided", f"{told}, which was decided")
    elif holder.committed_s < poll.began_s:
        yield Anomaly("commit unseen", f"{told}, which was reported as committed")


def _first_row(outcome: Outcome, poll: Poll, holder: Transaction | None) -> bytes | None:
    """Return the first row of the transaction that held the poll, after the page; None if there is none."""
    pointers = holder.pointers if holder else ()
    rows = outcome.history.logs[poll.topic]
    behind = islice(rows, bisect_right(rows, max(poll.last, _before(poll.since)), key=lambda row: row[0]), None)
    return next((row_id for row_id, _, pointer in behind if abs(pointer) in pointers), None)


def _before(since: bytes) -> bytes:
    """Return a bound below every id from ``since`` on, but not below any id before ``since``."""
    return (int.from_bytes(since, "big") - 1).to_bytes(len(since), "big") if any(since) else b""
