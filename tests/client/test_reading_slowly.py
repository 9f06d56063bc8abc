"""A reader whose requests, saves or messages take longer than it waits goes on all the same; in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from plainsong.calls import Answer, Failure, Send
from plainsong.errors import DeadlineExceeded
from plainsong.positions import ServerPosition
from plainsong.protocol.errors import PositionChanged
from plainsong.protocol.ids import pack_id
from tests.client.simulation import LOST, NOBODY, SILENT, Simulation, kind
from tests.client.test_reading import FakeDaemon, reading

pytestmark = pytest.mark.usefixtures("both_clients")


def simulated(daemon: FakeDaemon, takes_s: Callable[[Send], float] = lambda _: 0.0) -> Simulation:
    """A daemon whose answers take so long, for clients that wait for each no longer than they say."""

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
    """A reader that follows."""
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


def test_a_message_may_take_longer_than_the_idling_that_it_ended():
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
    assert simulation.now_s == pytest.approx(22), "it idles anew, for its whole time"
    assert daemon.readers["a"] == pack_id(1, 0).hex()


def test_a_save_that_the_time_of_get_cuts_off_is_left_to_the_next_one():
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
def test_a_beginning_that_is_cut_off_is_made_again_and_delivers_every_message_once(cut_off, options):
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


def test_a_save_without_an_answer_that_was_taken_is_no_other_readers():
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
    assert daemon.readers["a"] == pack_id(1, 0).hex(), "the second one comes to a position that it does not know of"
    assert got(simulation, reader) == b"3"
    simulation.run(reader.save)
    assert daemon.readers["a"] == pack_id(3, 0).hex()
    assert not position._in_doubt["a"]


@pytest.mark.parametrize("failure", [SILENT, NOBODY])
def test_a_save_without_an_answer_hides_no_other_reader(failure):
    daemon = FakeDaemon(a=[b"1", b"2", b"3", b"4"])
    simulation = simulated(daemon)
    reader = followed(simulation, position=ServerPosition("me"), page_messages=9, save_interval_s=inf)
    answer = simulation._answer
    assert got(simulation, reader) == b"1"
    simulation._answer = lambda _: failure
    with pytest.raises(DeadlineExceeded):
        simulation.run(reader.save)
    simulation._answer = answer
    # One that was sent nowhere is another reader's, if the daemon has it.
    daemon.readers["a"] = pack_id(2 if failure is SILENT else 1, 0).hex()
    assert got(simulation, reader) == b"2"
    assert got(simulation, reader) == b"3"
    for _ in range(2):
        with pytest.raises(PositionChanged):
            simulation.run(reader.save)
