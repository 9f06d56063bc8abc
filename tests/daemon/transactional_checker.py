"""A pure function that finds all anomalies in a history of transactions and readers.

Pages of uncommitted readers are compared with their topic's log, and those of transactional readers with the log's
messages that are plain or belong to committed transactions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from tests.daemon.transactional_history import Anomaly, Kind, Log, Page, Request, Transaction

#: A transaction may block readers for this time after its time-out: a timer and a commit on a busy machine.
GRACE_MS = 15_000

Unit = Transaction | Request
"""A set of messages that become visible at one moment."""


@dataclass(slots=True)
class _Face:
    """A log as one kind of reader must see it."""

    ids: list[bytes]
    payloads: dict[bytes, bytes]
    units: list[Unit]


@dataclass(slots=True)
class _History:
    logs: Mapping[str, Log]
    requests: dict[bytes, Request]
    by_pointer: dict[int, Transaction]
    faces: dict[tuple[str, bool], _Face] = field(default_factory=dict)
    known_s: dict[tuple[Unit, bool], float] = field(default_factory=dict)
    """The time from which a unit was certainly visible to transactional (``True``) or other readers."""

    def unit(self, request: Request, *, transactional: bool) -> Unit:
        return request.transaction if transactional and request.transaction is not None else request


def check(
    transactions: Iterable[Transaction], requests: Iterable[Request], pages: Sequence[Page], logs: Iterable[Log]
) -> list[Anomaly]:
    """Return all anomalies in the history of some topics."""
    requests = [request for request in requests if request.payloads]
    history = _History(
        {log.topic: log for log in logs},
        {payload: request for request in requests for payload in request.payloads},
        {pointer: each for each in transactions for pointer in each.pointers},
    )
    found = [*_of_transactions(set(history.by_pointer.values())), *_of_requests(history, requests)]
    for log in history.logs.values():
        found += _of_log(history, log)
        for transactional in (False, True):
            history.faces[log.topic, transactional] = _face(history, log, transactional=transactional)
    seen = _learn(history, requests, pages)
    for page in pages:
        if _is_in_order(page):
            found += [*_of_page(history, page), *_of_end(history, page, seen[_view_of(page)] | seen[id(page)])]
        else:
            found.append(Anomaly("unordered", f"{page.reader} saw a page out of order, or from before its start"))
    return found


# --- the final state -----------------------------------------------------------------------------


def _of_transactions(transactions: Iterable[Transaction]) -> Iterator[Anomaly]:
    for each in transactions:
        if each.state == "in_progress":
            yield Anomaly("held forever", f"{each.id} is still in progress")
        if each.committed_s < inf and each.state != "committed":
            yield Anomaly("lost", f"{each.id} was reported as committed, but is {each.state}")
        if each.undone_s < inf and each.state == "committed":
            yield Anomaly("resurrected", f"{each.id} was reported as undone, but is committed")
        if each.asked_s == inf and each.state == "committed":
            yield Anomaly("resurrected", f"{each.id} is committed, but no client asked for it")


def _of_requests(history: _History, requests: Iterable[Request]) -> Iterator[Anomaly]:
    there = {(log.topic, payload): pointer for log in history.logs.values() for _, payload, pointer in log.rows}
    for request in requests:
        places = [(request.topic, payload) for payload in request.payloads]
        rows = [there[place] for place in places if place in there]
        name = f"{request.payloads[0]!r} … in {request.topic}"
        if request.outcome == "acknowledged" and len(rows) < len(request.payloads):
            yield Anomaly("lost", f"{len(rows)} of {len(request.payloads)} are present: {name}")
        elif 0 < len(rows) < len(request.payloads):
            yield Anomaly("torn", f"{len(rows)} of {len(request.payloads)} are present: {name}")
        if request.outcome == "refused" and rows:
            yield Anomaly("resurrected", f"it was refused, or never published: {name}")
        if request.transaction is None:
            continue
        turned = sum(pointer < 0 for pointer in rows)
        # The rollback of an invalid transaction may be half done, after a kill between two of its writes. That is not
        # an anomaly, since transactional readers see neither half, and the janitor repeats the rollback. An abort is
        # acknowledged only after its last write.
        if 0 < turned < len(rows) and request.transaction.state != "invalid":
            yield Anomaly("torn", f"{turned} of {len(rows)} are rolled back: {name}")
        if request.transaction.state == "committed" and turned and request.rolled_back == "no":
            yield Anomaly("lost", f"rolled back, although its transaction is committed: {name}")
        if turned < len(rows) and (request.transaction.state == "aborted" or request.rolled_back == "yes"):
            yield Anomaly("not turned", f"it was rolled back, and its rows were not: {name}")


def _of_log(history: _History, log: Log) -> Iterator[Anomaly]:
    once: set[bytes] = set()
    for message_id, payload, pointer in log.rows:
        request = history.requests.get(payload)
        if payload in once:
            yield Anomaly("doubled", f"{payload!r} is present twice")
        once.add(payload)
        if request is None or request.topic != log.topic:
            yield Anomaly("resurrected", f"{payload!r} at {message_id.hex()} of {log.topic} was not sent there")
        elif abs(pointer) not in (request.transaction.pointers if request.transaction else (0,)):
            yield Anomaly("dirty", f"{payload!r} has the pointer {pointer}, which is not its own")


def _face(history: _History, log: Log, *, transactional: bool) -> _Face:
    rows = []
    for message_id, payload, pointer in log.rows:
        request = history.requests.get(payload)
        if request is not None and (not transactional or _is_visible(history, pointer)):
            rows.append((message_id, payload, history.unit(request, transactional=transactional)))
    ids = [message_id for message_id, _, _ in rows]
    return _Face(ids, {message_id: payload for message_id, payload, _ in rows}, [unit for _, _, unit in rows])


def _is_visible(history: _History, pointer: int) -> bool:
    if pointer <= 0:
        return pointer == 0
    owner = history.by_pointer.get(pointer)
    return owner is not None and owner.state == "committed"


# --- reads ---------------------------------------------------------------------------------------


def _view_of(page: Page) -> object:
    return id(page) if page.view is None else ("view", page.view)


def _learn(history: _History, requests: Iterable[Request], pages: Iterable[Page]) -> dict[object, set[Unit]]:
    """Compute the time from which each unit was certainly visible; return the units that each view showed."""
    known = defaultdict(lambda: inf, history.known_s)
    for request in requests:
        known[request, False] = known[request, True] = request.ended_s
        if request.transaction is not None:
            known[request.transaction, True] = request.transaction.committed_s
    seen: dict[object, set[Unit]] = defaultdict(set)
    for page in pages:
        for _, payload in page.messages:
            sent = history.requests.get(payload)
            if sent is not None:
                unit = history.unit(sent, transactional=page.transactional)
                by_s = page.view_s[1] if isinstance(unit, Transaction) else page.answered_s
                known[unit, page.transactional] = min(known[unit, page.transactional], by_s)
                # A snapshot does not cover plain messages: only those of one page were visible together.
                seen[_view_of(page) if isinstance(unit, Transaction) else id(page)].add(unit)
    history.known_s = known
    return seen


def _is_in_order(page: Page) -> bool:
    ids = [message_id for message_id, _ in page.messages]
    return ids == sorted(set(ids)) and ids[:1] >= [page.since][: len(ids)]


def _of_page(history: _History, page: Page) -> Iterator[Anomaly]:
    """Check the messages of a page, and those that it skipped."""
    face = history.faces[page.topic, page.transactional]
    there = {message_id for message_id, _ in page.messages}
    for message_id in face.ids[bisect_left(face.ids, page.since) : bisect_right(face.ids, _last(page))]:
        if message_id not in there:
            yield Anomaly("passed over", f"{page.reader} passed {face.payloads[message_id]!r} without seeing it")
    for message_id, payload in page.messages:
        if face.payloads.get(message_id) != payload:
            kind: Kind = "dirty" if page.transactional else "vanished"
            yield Anomaly(kind, f"{page.reader} saw {payload!r} at {message_id.hex()} of {page.topic}")
            continue
        owner = history.requests[payload].transaction
        if page.transactional and owner is not None and page.view_s[1] < owner.asked_s:
            yield Anomaly("dirty", f"{page.reader} saw {payload!r} before its commit was requested")


def _of_end(history: _History, page: Page, seen: set[Unit]) -> Iterator[Anomaly]:
    """Check the end of a page for messages that it should have included."""
    if page.end == "more":
        return
    face = history.faces[page.topic, page.transactional]
    at, stop = bisect_right(face.ids, max(_last(page), _before(page.since))), len(face.ids)
    if page.end == "held":
        holder = history.by_pointer.get(page.held_by or 0)
        held_at = _first_row(history, page, holder)
        if holder is None or held_at is None:
            yield Anomaly("held forever", f"{page.reader} was held by {page.held_by}, which has nothing there")
            return
        yield from _of_holder(history, page, holder, seen)
        stop = bisect_left(face.ids, held_at)
    for unit, message_id in zip(face.units[at:stop], face.ids[at:stop], strict=True):
        if unit in seen:
            yield Anomaly("torn", f"{page.reader} saw another part of the unit of {face.payloads[message_id]!r}")
        elif history.known_s[unit, page.transactional] < (
            page.view_s[0] if isinstance(unit, Transaction) else page.asked_s
        ):
            yield Anomaly("late", f"{page.reader} did not get {face.payloads[message_id]!r}, which was visible")


def _of_holder(history: _History, page: Page, holder: Transaction, seen: set[Unit]) -> Iterator[Anomaly]:
    told = f"{page.reader} was held in {page.topic} by {holder.id}"
    if holder in seen:
        yield Anomaly("torn", f"{told}, but saw another part of it")
    elif min(history.known_s[holder, True], holder.undone_s) < page.view_s[0]:
        yield Anomaly("held forever", f"{told}, which was decided")
    # A snapshot shows the state at its begin, however late it is read.
    viewed_ms = page.asked_ms - round((page.asked_s - page.view_s[0]) * 1000)
    if viewed_ms > holder.expires_ms + GRACE_MS:
        yield Anomaly("held forever", f"{told}, {viewed_ms - holder.expires_ms} ms after its time-out")


def _first_row(history: _History, page: Page, holder: Transaction | None) -> bytes | None:
    """Return the first row after the page of the transaction that blocked it; None if there is none."""
    pointers = holder.pointers if holder else ()
    end = max(_last(page), _before(page.since))
    rows = history.logs[page.topic].rows
    behind = islice(rows, bisect_right(rows, end, key=lambda row: row[0]), None)
    return next((row_id for row_id, _, pointer in behind if abs(pointer) in pointers), None)


def _last(page: Page) -> bytes:
    """Return the last id that the page passed; empty if it passed none."""
    return max([message_id for message_id, _ in page.messages[-1:]] + [page.through or b""])


def _before(since: bytes) -> bytes:
    """Return a bound below every id from ``since`` on, but not below any id before ``since``."""
    return (int.from_bytes(since, "big") - 1).to_bytes(len(since), "big") if any(since) else b""
