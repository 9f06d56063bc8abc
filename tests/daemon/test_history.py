"""The checker of histories finds each planted anomaly, and none in a healthy history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from plainsong.protocol.ids import after, pack_id
from tests.daemon.history import Kind, Seen, Sent, check

#: The log's messages: ``m0`` … ``m9``, two in each millisecond from 100 on; m4 is empty.
IDS = [pack_id(100 + i // 2, i % 2) for i in range(10)]
PAYLOADS = [b"m%d" % i if i != 4 else b"" for i in range(10)]
LOG = tuple(zip(IDS, PAYLOADS, strict=True))
#: Requests by their first and last message; m8 and m9 live for a second.
REQUESTS = [(0, 0), (1, 3), (4, 6), (7, 7), (8, 9)]


def sent_request(number: int, *, ttl_ms: int | None = None) -> Sent:
    first, last = REQUESTS[number]
    return Sent(tuple(PAYLOADS[first : last + 1]), "acknowledged", number, number + 0.5, IDS[first], IDS[last], ttl_ms)


def page(first: int, last: int, *, now_ms: int = 200, since: bytes | None = None, cut: bool = False) -> Seen:
    """Return the page of a reader that starts at message ``first`` and gets up to ``last``."""
    return Seen("reader", LOG[first : last + 1], now_ms, now_ms, IDS[first] if since is None else since, cut)


SENT = [*(sent_request(n) for n in range(4)), sent_request(4, ttl_ms=1000)]
PAGES = [page(0, 3), page(1, 7, since=after(IDS[0])), page(5, 5, cut=True), page(8, 9), page(8, 9, now_ms=1104)]
LAST = Seen("last", LOG[:8], 5000, 5001)


def test_a_healthy_history_has_no_anomaly():
    never = Sent((b"n1", b"n2"), "refused", 9, 9.5)
    perhaps = Sent((b"u1", b"u2"), "unknown", 9, 9.5)
    assert check([*SENT, never, perhaps], PAGES, LAST) == []


def test_a_request_of_unknown_outcome_may_be_present_in_full():
    sent = [replace(SENT[1], outcome="unknown", first_id=None, last_id=None), *SENT[:1], *SENT[2:]]
    assert check(sent, PAGES, LAST) == []


def without(*numbers: int) -> Seen:
    return replace(LAST, messages=tuple(pair for i, pair in enumerate(LAST.messages) if i not in numbers))


def kinds(sent: list[Sent], pages: list[Seen], last: Seen) -> set[Kind]:
    return {anomaly.kind for anomaly in check(sent, pages, last)}


def unknown(number: int) -> list[Sent]:
    """Return the requests, one of them with an unknown outcome."""
    return [
        replace(s, outcome="unknown", first_id=None, last_id=None) if i == number else s for i, s in enumerate(SENT)
    ]


PLANTED: dict[str, tuple[Kind, Callable[[], tuple[list[Sent], list[Seen], Seen]]]] = {
    "an acknowledged message is gone": ("lost", lambda: (SENT, [], without(0))),
    "the last of an acknowledged batch is gone": ("lost", lambda: (SENT, [], without(3))),
    "an acknowledged empty message is gone": ("lost", lambda: (SENT, [], without(4))),
    "a message has two ids": (
        "doubled",
        lambda: (SENT, [], replace(LAST, messages=(*LOG[:8], (pack_id(150, 0), b"m2")))),
    ),
    "an id occurs twice": ("doubled", lambda: (SENT, [], replace(LAST, messages=(LOG[0], *LOG[:8])))),
    "a page goes back": (
        "unordered",
        lambda: (SENT, [replace(page(0, 3), messages=(LOG[1], LOG[0], *LOG[2:4]))], LAST),
    ),
    "a page starts before its start": ("unordered", lambda: (SENT, [page(0, 3, since=IDS[1])], LAST)),
    "a later request got a smaller id": (
        "backwards",
        lambda: ([replace(SENT[0], began_s=8, ended_s=8.5), *SENT[1:]], [], LAST),
    ),
    "a refused request is stored": (
        "resurrected",
        lambda: ([*SENT[:3], replace(SENT[3], outcome="refused")], [], LAST),
    ),
    "a message was never sent": ("resurrected", lambda: (SENT[:3], [], LAST)),
    "half of an unanswered request is stored": ("split", lambda: (unknown(1), [], without(2, 3))),
    "a page ends inside of a request": ("split", lambda: (SENT, [page(0, 2)], LAST)),
    "a page skipped a message": (
        "appeared behind",
        lambda: (SENT, [replace(page(0, 7), messages=(*LOG[:2], *LOG[3:8]))], LAST),
    ),
    "a later message has an id below those that were read": (
        "appeared behind",
        lambda: (SENT, [page(0, 0), page(4, 7, since=after(IDS[0]))], LAST),
    ),
    "a later message has an id below a reader's next position": (
        "appeared behind",
        lambda: (SENT, [replace(page(0, 0), through=IDS[4])], LAST),
    ),
    "a delivered message is gone": ("vanished", lambda: (unknown(3), [page(7, 7)], without(7))),
    "an id has another message": (
        "vanished",
        lambda: (SENT, [replace(page(0, 0), messages=((IDS[0], b"m7"),))], LAST),
    ),
    "two readers have two orders": (
        "different orders",
        lambda: (SENT, [replace(page(0, 3), messages=(LOG[0], (IDS[1], b"m2"), (IDS[2], b"m1"), LOG[3]))], LAST),
    ),
    "an expired message came back": ("undead", lambda: (SENT, [page(8, 9, now_ms=1105)], LAST)),
    "a living message was passed over": (
        "expired early",
        lambda: (SENT, [Seen("reader", (LOG[7], LOG[9]), 200, 200, IDS[7])], LAST),
    ),
    "a message is gone before its time": ("lost", lambda: (SENT, [], replace(LAST, asked_ms=300, answered_ms=301))),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_anomaly_is_found(planted):
    kind, history = PLANTED[planted]
    assert kind in kinds(*history())
