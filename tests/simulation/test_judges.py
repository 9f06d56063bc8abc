"""The judges of expiry, lives of topics and reads as of a moment accept correct histories, and name each violation."""

from __future__ import annotations

import pytest

from plainsong.protocol.ids import FIRST_BOUND
from tests.cluster.history.records import History, Poll, Transaction, Write
from tests.simulation import moments
from tests.simulation.brief import Look, Notes, Sent, judged
from tests.simulation.garden import Model

BEGAN_MS = 1_700_000_000_000


def message_id(at_s: float) -> bytes:
    return (BEGAN_MS + int(at_s * 1000)).to_bytes(8, "big") + bytes(12)


def look(at_s: float, *published_s: float, ahead_s: float = 0.0) -> Look:
    """Return a page of messages named by their publish times; some clock is ``ahead_s`` ahead."""
    messages = tuple((message_id(each), b"%d" % int(each * 10)) for each in published_s)
    poll = Poll("reader", "a", "brief", False, at_s, at_s, messages, FIRST_BOUND, None)
    now_ms = BEGAN_MS + int(at_s * 1000)
    return Look(poll, now_ms, now_ms + int(ahead_s * 1000), (2, 2))


def notes(*looks: Look, sent_s: tuple[float, ...] = (0.0, 0.5), **more: object) -> Notes:
    sent = [Sent(b"%d" % int(each * 10), None, told_s=each) for each in sent_s]
    for each in sent:
        for name, value in more.items():
            setattr(each, name, value)
    return Notes({each.payload: each for each in sent}, list(looks))


@pytest.mark.parametrize(
    "right",
    [
        notes(look(0.6, 0.0, 0.5), look(2.0, 0.0, 0.5), look(2.1, 0.5), look(2.6)),
        notes(look(0.6, 0.0, 0.5), look(1.0, 0.5, ahead_s=5.0)),
        notes(look(0.9, 0.0, 0.5), look(1.2, 0.5), look(1.7), own_s=1),
    ],
    ids=["in time", "a clock that is ahead", "times to live of their own"],
)
def test_messages_may_expire_in_time(right):
    assert not judged(right)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("undead", notes(look(2.1, 0.0, 0.5))),
        ("undead", notes(look(1.6, 0.0, 0.5), own_s=1)),
        ("gone early", notes(look(0.6, 0.0, 0.5), look(1.9, 0.5))),
        ("came back", notes(look(0.6, 0.0, 0.5), look(3.1, 0.5, ahead_s=9), look(3.2, 0.0, 0.5, ahead_s=9))),
        ("brief disorder", notes(look(0.6, 0.5, 0.0))),
        ("brief disorder", notes(look(0.6, 0.1))),
        ("brief and refused", notes(look(0.6, 0.0), refused=True)),
    ],
)
def test_wrong_expiry_is_named(kind, wrong):
    assert kind in {each.kind for each in judged(wrong)}


def test_messages_that_had_expired_when_the_time_to_live_changed_stay_gone():
    for changed_s, kinds in ((1.0, []), (0.7, ["came back"])):
        found = notes(look(0.6, 0.0, 0.5), look(0.9, 0.0, 0.5))
        found.floors.append((changed_s, BEGAN_MS + 300))
        assert [each.kind for each in judged(found)] == kinds


def a_garden(*happened: str) -> Model:
    model = Model()
    for number, verb in enumerate(happened):
        model.happened(verb, (b"%d" % number,) if verb == "publish" else ())
    assert not model.wrong
    return model


def shown(model: Model, *contents: bytes) -> bool:
    """True if a remaining world has these messages."""
    model.said(lambda world: world.alive and world.contents == contents, "shown")
    return not model.wrong


def test_an_undeleted_topic_is_unchanged():
    assert shown(a_garden("create", "publish", "delete", "undelete", "publish"), b"1", b"4")
    assert not shown(a_garden("create", "publish", "delete", "undelete"))


def test_a_recreated_topic_is_empty():
    assert shown(a_garden("create", "publish", "delete", "create"))
    assert not shown(a_garden("create", "publish", "delete", "create"), b"1")


@pytest.mark.parametrize("contents", [(b"1",), (b"1", b"x"), (b"1", b"2", b"x"), (b"1", b"2")])
def test_an_unanswered_request_may_happen_late_or_never_and_at_most_once(contents):
    model = a_garden("create", "publish")
    model.unknown("publish", (b"x",))
    if b"2" in contents:
        model.happened("publish", (b"2",))
    assert shown(model, *contents)
    assert not shown(model, *contents, b"x", b"x")


def test_answers_that_no_order_of_events_explains_are_wrong():
    for verb in ("delete", "publish", "undelete"):
        model = Model()
        model.happened(verb)
        assert model.wrong, verb


# --- as of a moment --------------------------------------------------------------------------------


def a_history() -> History:
    """A history: plain messages at 1 s and 4 s, and three transactions over two topics: two committed one after the
    other, and one aborted."""
    history = History()
    early, late = Transaction(1, asked_s=3.0, committed_s=3.1, state="committed"), Transaction(2, state="committed")
    late.asked_s, late.committed_s = 5.0, 5.1
    history.transactions = [early, late, Transaction(3, state="aborted")]
    for topic in "tu":
        history.logs[topic] = [
            (message_id(1.0), b"plain", 0),
            (message_id(2.0), b"late " + topic.encode(), 2),
            (message_id(2.1), b"early " + topic.encode(), 1),
            (message_id(2.2), b"aborted", -3),
            (message_id(4.0), b"plain", 0),
        ]
        for one, owner in ((b"early ", early), (b"late ", late)):
            history.writes.append(Write(topic, (one + topic.encode(),), 2.0, owner, ended_s=2.5))
    return history


def seen(at_s: float, topic: str, *places: int, whole: bool = True) -> moments.Look:
    """Return a read that shows the messages at these places of the log."""
    rows = [a_history().logs[topic][place] for place in places]
    shown = tuple((row_id, payload) for row_id, payload, _ in rows)
    return moments.Look(BEGAN_MS + int(at_s * 1000), topic, "a", shown, whole)


def moments_judged(*looks: moments.Look) -> set[str]:
    decided_ms = {1: BEGAN_MS + 3_000, 2: BEGAN_MS + 5_000}
    return {each.kind for each in moments.judged(moments.Notes(list(looks), decided_ms), a_history())}


def test_a_correct_read_as_of_its_time_is_accepted():
    for at_s, places in ((0.9, ()), (1, (0,)), (2.9, (0,)), (3, (0, 2)), (4, (0, 2, 4)), (5, (0, 1, 2, 4))):
        assert not moments_judged(seen(at_s, "t", *places), seen(at_s, "u", *places), seen(at_s, "t", *places))
    assert not moments_judged(seen(5, "t", 0, 1, whole=False), seen(5, "t", 0, 1, 2, 4))


@pytest.mark.parametrize(
    ("kind", "looks"),
    [
        ("shown early", [seen(0.9, "t", 0)]),
        ("shown early", [seen(2.9, "t", 0, 2)]),
        ("not shown", [seen(3, "t", 0)]),
        ("not shown", [seen(5, "t", 0, 2, whole=False)]),
        ("never committed", [seen(3, "t", 0, 2, 3)]),
        ("moment disorder", [seen(5, "t", 0, 2, 1, 4)]),
        ("moment disorder", [seen(5, "t", 0, 1, 4), seen(5, "u", 0, 1, 4)]),
        ("moment changed", [seen(5, "t", 0, 1, 2, 4), seen(5, "t", 0, 2, 4)]),
        ("moment changed", [seen(5, "t", 0, 1, 2, 4), seen(5, "t", 0, 2, whole=False)]),
        ("moment split", [seen(5, "t", 0, 1, 2, 4), seen(5, "u", 0, 2, 4)]),
    ],
)
def test_a_wrong_read_as_of_a_moment_is_named(kind, looks):
    assert kind in moments_judged(*looks)
