"""A reader whose requests, saves or messages take longer than its time-outs still makes progress; in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf, log2
from typing import Any

import pytest

from plainsong._sync.reading import UNAVAILABLE_S
from plainsong.calls import Answer, Failure, Send
from plainsong.errors import DeadlineExceeded
from plainsong.positions import PageBytes, ServerPosition
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.errors import PositionChanged, TransactionsUnavailable
from plainsong.protocol.ids import pack_id
from plainsong.retry import PAUSES_S
from tests.client.simulation import LOST, NO_DAEMON, SILENT, Simulation, kind, problem
from tests.client.test_reading import FakeDaemon, reading

pytestmark = pytest.mark.usefixtures("both_clients")


def simulated(daemon: FakeDaemon, takes_s: Callable[[Send], float] = lambda _: 0.0) -> Simulation:
    """A daemon whose answers take this long, for clients that give up after their time-out."""

    def answer(send: Send) -> Answer | Failure:
        took_s = takes_s(send)
        if send.timeout_s <= 0 or took_s > send.timeout_s:
            simulation.now_s += max(0.0, send.timeout_s)
            return SILENT
        simulation.now_s += took_s
        return daemon(send)

    simulation = Simulation(answer)
    return simulation


def followed(simulation: Simulation, topics: str | list[str] = "a", start: Any = "oldest", **options: Any) -> Any:
    """Return a reader that follows."""
    return kind().Reader(reading(simulation, topics, start, **{"follow": True, **options}))


def got(simulation: Simulation, reader: Any, timeout_s: float | None = None) -> bytes | None:
    message = simulation.run(reader.get, timeout_s)
    return None if message is None else message.payload


def is_save(send: Send) -> bool:
    return send.request.method == "PUT"


def test_a_save_between_two_messages_has_the_time_of_its_own_get():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = simulated(daemon)
    reader = followed(simulation, position=ServerPosition("me"), save_every=1)
    assert got(simulation, reader, 1) == b"1"
    simulation.now_s += 10
    assert got(simulation, reader, 1) == b"2"
    assert daemon.readers["a"] == pack_id(1, 0).hex()


def test_a_message_may_take_longer_than_the_idle_time_that_it_ended():
    daemon = FakeDaemon(a=[])
    simulation = simulated(daemon)

    def wait() -> None:
        simulation.now_s += 1
        if daemon.waits == 1:
            daemon.topics["a"].append(b"1")

    daemon.on_wait = wait
    reader = followed(simulation, position=ServerPosition("me"), save_every=1, idle_timeout_s=10)
    assert got(simulation, reader) == b"1"
    simulation.now_s += 11
    assert got(simulation, reader) is None
    assert reader.has_ended
    assert simulation.now_s == pytest.approx(22), "it idles again for the whole time-out"
    assert daemon.readers["a"] == pack_id(1, 0).hex()


def test_a_save_cut_off_by_the_time_of_get_is_left_to_the_next_one():
    daemon = FakeDaemon(a=[b"1"])
    slow = False
    simulation = simulated(daemon, lambda send: 100.0 if slow and is_save(send) else 0.0)
    reader = followed(simulation, position=ServerPosition("me"), save_every=1)
    assert got(simulation, reader, 1) == b"1"
    slow = True
    assert [got(simulation, reader, 1) for _ in range(3)] == [None] * 3
    assert not reader.has_ended
    assert "a" not in daemon.readers
    slow = False
    daemon.topics["a"].append(b"2")
    assert got(simulation, reader, 1) == b"2"
    assert daemon.readers["a"] == pack_id(1, 0).hex()


class Elsewhere:
    """A position in an external store that does not answer in time."""

    def load(self, daemon: Any, topics: Any) -> dict[str, bytes]:
        return {}

    def save(self, daemon: Any, positions: Any) -> None:
        raise DeadlineExceeded("it has no answer", outcome="unknown")


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_a_custom_position_that_was_not_saved_in_time_is_reported(timeout_s):
    simulation = simulated(FakeDaemon(a=[b"1", b"2"]))
    reader = followed(simulation, position=Elsewhere(), save_every=1)
    assert got(simulation, reader, timeout_s) == b"1"
    with pytest.raises(DeadlineExceeded, match="it has no answer"):
        got(simulation, reader, timeout_s)


def test_a_stop_that_meets_a_save_ends_the_loop_and_saves():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = simulated(daemon)
    reader = followed(simulation, position=ServerPosition("me"), save_every=1)
    assert got(simulation, reader) == b"1"
    answer = simulation._answer

    def stop(send: Send) -> Answer | Failure:
        assert is_save(send)
        simulation._answer = answer
        reader.stop()
        return LOST

    simulation._answer = stop
    assert got(simulation, reader) is None
    assert reader.has_ended
    assert daemon.readers["a"] == pack_id(1, 0).hex()


@pytest.mark.parametrize(
    ("cut_off", "options"),
    [
        ("GET", {"follow": True}),
        ("PUT", {"follow": True}),
        ("/topics/b/stats", {"follow": False, "until": "newest"}),
    ],
    ids=["load", "first save", "end"],
)
def test_an_interrupted_beginning_is_repeated_and_every_message_delivered_once(cut_off, options):
    daemon = FakeDaemon(a=[b"a1", b"a2"], b=[b"b1", b"b2"])
    simulation = simulated(
        daemon, lambda send: 100.0 if cut_off in f"{send.request.method} {send.request.path}" else 0.0
    )
    reader = followed(simulation, ["a", "b"], 1, position=ServerPosition("me"), save_every=99, **options)
    assert [got(simulation, reader, 1) for _ in range(2)] == [None] * 2
    cut_off = "nothing"
    daemon.on_wait = lambda: setattr(simulation, "now_s", simulation.now_s + 1)
    seen = [got(simulation, reader, 1) for _ in range(8)]
    assert sorted(filter(None, seen)) == [b"a1", b"a2", b"b1", b"b2"]


def test_a_stored_save_whose_answer_is_lost_is_not_mistaken_for_another_reader():
    daemon = FakeDaemon(a=[b"1", b"2", b"3", b"4"])
    position = ServerPosition("me")
    simulation = simulated(daemon)
    reader = followed(simulation, position=position, page_messages=9, save_interval_s=inf)
    answer = simulation._answer

    def take_and_lose(send: Send) -> Answer | Failure:
        assert is_save(send)
        daemon(send)
        simulation._answer = lambda _: SILENT
        return SILENT

    for payload in (b"1", b"2"):
        assert got(simulation, reader) == payload
        simulation._answer = take_and_lose
        with pytest.raises(DeadlineExceeded):
            simulation.run(reader.save)
        simulation._answer = answer
    assert daemon.readers["a"] == pack_id(1, 0).hex(), "the second one finds a position unknown to it"
    assert got(simulation, reader) == b"3"
    simulation.run(reader.save)
    assert daemon.readers["a"] == pack_id(3, 0).hex()
    assert not position._in_doubt["a"]


@pytest.mark.parametrize("failure", [SILENT, NO_DAEMON])
def test_a_save_whose_answer_is_lost_hides_no_other_reader(failure):
    daemon = FakeDaemon(a=[b"1", b"2", b"3", b"4"])
    simulation = simulated(daemon)
    reader = followed(simulation, position=ServerPosition("me"), page_messages=9, save_interval_s=inf)
    answer = simulation._answer
    assert got(simulation, reader) == b"1"
    simulation._answer = lambda _: failure
    with pytest.raises(DeadlineExceeded):
        simulation.run(reader.save)
    simulation._answer = answer
    # A failure before the request was sent means that another reader wrote the position, if the daemon has it.
    daemon.readers["a"] = pack_id(2 if failure is SILENT else 1, 0).hex()
    assert got(simulation, reader) == b"2"
    assert got(simulation, reader) == b"3"
    for _ in range(2):
        with pytest.raises(PositionChanged):
            simulation.run(reader.save)


@pytest.mark.parametrize("keeps_position", [False, True])
def test_get_waits_longer_after_an_answer_that_came_too_late(keeps_position):
    daemon = FakeDaemon(a=[b"%d" % number for number in range(20)])
    simulation = simulated(daemon, lambda _: 2.0)
    reader = followed(simulation, position=ServerPosition("me") if keeps_position else None)
    seen = [got(simulation, reader, 1) for _ in range(6)]
    assert b"0" in seen
    assert not reader.has_ended
    page_by_page = [got(simulation, reader, 1) for _ in range(5)]
    assert None not in page_by_page, "how long an answer takes is learned once"


def test_get_forgets_slow_answers_after_a_quick_one():
    daemon = FakeDaemon(a=[b"1", b"2", b"3"])
    takes_s = 2.0
    simulation = simulated(daemon, lambda _: takes_s)
    reader = followed(simulation, page_messages=1)
    while got(simulation, reader, 1) is None:
        assert simulation.now_s < 20
    takes_s = 0.0
    assert got(simulation, reader, 1) == b"2"
    takes_s = 100.0
    began_s = simulation.now_s
    assert got(simulation, reader, 1) is None
    assert simulation.now_s - began_s == pytest.approx(1.25)


def test_get_waits_no_longer_for_an_answer_than_a_request_may_take():
    simulation = simulated(FakeDaemon(a=[b"1"]), lambda _: 1e9)
    reader = followed(simulation)
    for _ in range(20):
        began_s = simulation.now_s
        assert got(simulation, reader, 1) is None
        assert simulation.now_s - began_s <= 31
    assert not reader.has_ended


def test_get_waits_no_longer_than_its_timeout_while_the_daemon_is_unavailable():
    daemon = FakeDaemon(a=[b"1"])
    simulation = simulated(daemon)
    answer = simulation._answer
    simulation._answer = lambda _: NO_DAEMON
    reader = followed(simulation)
    for _ in range(20):
        began_s = simulation.now_s
        assert got(simulation, reader, 1) is None
        assert 1 <= simulation.now_s - began_s <= 1.25
    assert not reader.has_ended
    simulation._answer = answer
    assert got(simulation, reader, 1) == b"1"


def test_get_waits_no_longer_than_its_timeout_while_the_transaction_service_is_unavailable():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = simulated(daemon)
    reader = followed(simulation, page_messages=1, isolation="committed")
    assert got(simulation, reader, 1) == b"1"
    answer = simulation._answer
    simulation._answer = lambda _: problem(503, "transactions_unavailable")
    began_s = simulation.now_s
    assert [got(simulation, reader, 1) for _ in range(5)] == [None] * 5
    assert simulation.now_s - began_s == pytest.approx(5, abs=0.25)
    simulation._answer = answer
    assert got(simulation, reader, 1) == b"2"


def test_get_without_a_timeout_asks_for_available_messages():
    daemon = FakeDaemon(a=[])
    simulation = simulated(daemon)
    reader = followed(simulation)
    assert [got(simulation, reader, 0) for _ in range(2)] == [None] * 2
    daemon.topics["a"].append(b"1")
    assert got(simulation, reader, 0) == b"1"
    assert len(simulation.sent) == 3, "once each"


def test_requests_before_a_poll_leave_time_for_its_answer():
    daemon = FakeDaemon(a=[b"1"])
    simulation = simulated(daemon, lambda send: 1.2 if send.request.method == "GET" else 0.2)
    reader = followed(simulation, position=ServerPosition("me"))
    assert got(simulation, reader, 1) == b"1"


NUMBERED = [b"%04d" % number + b"." * 2000 for number in range(1500)]


def asked_bytes(send: Send) -> int | None:
    """Return the ``maxBytes`` of a poll, of one topic or of many."""
    if "payload=" in send.request.path:
        return json.loads(send.request.body).get("maxBytes")
    return AVRO_2.decode_poll(send.request.body).max_bytes


def through(daemon: FakeDaemon, most_bytes: int, verb: str = "poll") -> Simulation:
    """A line that delivers no answer to a poll for more than ``most_bytes``."""

    def takes_s(send: Send) -> float:
        asked = asked_bytes(send) if send.request.path.endswith(verb) else 0
        return 1e9 if asked is None or asked > most_bytes else 0.0

    return simulated(daemon, takes_s)


def timed_out(simulation: Simulation, most_bytes: int) -> int:
    """Return the number of requests for more than ``most_bytes``."""
    return sum(1 for each in map(asked_bytes, simulation.sent) if each is None or each > most_bytes)


@pytest.mark.parametrize("most_bytes", [PageBytes.LEAST, 100_000, 1 << 20])
def test_a_follower_shrinks_its_pages_until_one_arrives_and_reads_every_message_once(most_bytes):
    daemon = FakeDaemon(a=NUMBERED)
    simulation = through(daemon, most_bytes)
    reader = followed(simulation, page_messages=10_000)
    assert got(simulation, reader) == NUMBERED[0]
    # The first request is for as much as the daemon gives.
    assert timed_out(simulation, most_bytes) <= log2(PageBytes.MOST / most_bytes) + 1
    assert [got(simulation, reader) for _ in NUMBERED[1:]] == NUMBERED[1:]
    pages = len(simulation.sent) - timed_out(simulation, most_bytes)
    assert timed_out(simulation, most_bytes) <= log2(PageBytes.MOST / most_bytes) + 2 + log2(pages), "and rarely again"


def test_a_follower_of_many_topics_shrinks_its_pages_until_one_arrives():
    daemon = FakeDaemon(a=[], b=[])
    simulation = through(daemon, PageBytes.LEAST, "payload=base64")
    reader = followed(simulation, ["a", "b"], page_messages=10_000)
    daemon.on_wait = lambda: [messages.extend(NUMBERED[:300]) for messages in daemon.topics.values() if not messages]
    seen = [got(simulation, reader) for _ in range(600)]
    assert sorted(filter(None, seen)) == sorted(2 * NUMBERED[:300])
    of_many = [asked_bytes(each) for each in simulation.sent if each.request.path.endswith("payload=base64")]
    assert of_many[:6] == [None, 1 << 20, 1 << 19, 1 << 18, 1 << 17, 1 << 16]


def slow_line(daemon: FakeDaemon, bytes_per_s: int) -> Simulation:
    """A line with this bandwidth for answers."""

    def answer(send: Send) -> Answer | Failure:
        assert simulation.now_s < 3600
        answered = daemon(send)
        assert isinstance(answered, Answer)
        took_s = len(answered.body) / bytes_per_s
        # A streamed answer makes progress all the time, so only its longest duration counts.
        limit_s = send.timeout_s if send.longest_s is None else send.longest_s
        simulation.now_s += min(took_s, limit_s)
        return SILENT if took_s > limit_s else answered

    simulation = Simulation(answer)
    return simulation


def test_reading_to_the_end_of_a_topic_on_a_slow_line_shrinks_its_pages_too():
    daemon = FakeDaemon(a=NUMBERED)
    simulation = slow_line(daemon, 50_000)
    reader = followed(simulation, page_messages=10_000, follow=False)
    assert [got(simulation, reader) for _ in NUMBERED] == NUMBERED
    assert got(simulation, reader) is None
    assert simulation.now_s < 30 + 1.2 * 1500 * 2004 / 50_000, "one page request failed"


def test_one_message_that_takes_longer_than_a_request_may_arrives_while_it_makes_progress():
    daemon = FakeDaemon(a=[b"." * 4_000_000, b"2"])
    simulation = slow_line(daemon, 50_000)
    reader = followed(simulation)
    assert len(got(simulation, reader) or b"") == 4_000_000
    assert got(simulation, reader) == b"2"


def test_pages_grow_again_once_answers_are_quick():
    daemon = FakeDaemon(a=[b"%d" % number for number in range(100)])
    simulation = through(daemon, PageBytes.LEAST)
    reader = followed(simulation, page_messages=1)
    got(simulation, reader)
    assert asked_bytes(simulation.sent[-1]) == PageBytes.LEAST
    simulation._answer = daemon
    for _ in range(20):
        got(simulation, reader)
    assert asked_bytes(simulation.sent[-1]) is None


def test_pages_keep_their_size_if_twice_as_much_would_be_too_slow():
    size = PageBytes()
    size.timed_out()
    size.came(8.0, 30.0)
    assert size.most == PageBytes.FIRST
    size.came(7.0, 30.0)
    assert size.most == 2 * PageBytes.FIRST


AWAY = problem(503, "transactions_unavailable")


def test_a_follower_waits_for_the_transaction_service_however_long_its_own_work_took():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = simulated(daemon)
    reader = followed(simulation, page_messages=1, isolation="committed")
    assert got(simulation, reader) == b"1"
    simulation.now_s += UNAVAILABLE_S + 1
    daemon.next = [AWAY] * 3
    assert got(simulation, reader) == b"2"


def test_a_follower_waits_for_the_transaction_service_for_a_minute_and_then_raises():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = simulated(daemon)
    reader = followed(simulation, page_messages=1, isolation="committed")
    assert got(simulation, reader) == b"1"
    simulation.now_s += 10
    began_s = simulation.now_s
    daemon.next = [AWAY] * 1000
    with pytest.raises(TransactionsUnavailable):
        got(simulation, reader)
    assert UNAVAILABLE_S < simulation.now_s - began_s <= UNAVAILABLE_S + PAUSES_S[-1]


def test_pauses_start_over_each_time_the_transaction_service_is_unavailable():
    daemon = FakeDaemon(a=[b"1", b"2", b"3"])
    simulation = simulated(daemon)
    reader = followed(simulation, page_messages=1, isolation="committed")
    assert got(simulation, reader) == b"1"
    for payload in (b"2", b"3"):
        simulation.pauses.clear()
        simulation.now_s += UNAVAILABLE_S
        daemon.next = [AWAY] * 7
        assert got(simulation, reader) == payload
        assert simulation.pauses == [max(1, pause_s) for pause_s in PAUSES_S[:7]], (
            "a second is what the daemon asks for"
        )
