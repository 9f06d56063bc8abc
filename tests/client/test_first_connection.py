"""A first connection that is refused is an error at once: retries are for what once worked."""

from __future__ import annotations

import pytest

from plainsong import Client, calls
from plainsong.errors import ConnectFailed, NotSent
from plainsong.protocol.errors import InvalidParameter
from tests.client.simulation import NOBODY, Simulation, said
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("both_clients")
TOPICS = calls.list_topics("default")


def test_a_refused_first_connection_raises_within_a_second_and_says_what_is_not_running():
    world = Simulation(lambda _: NOBODY)
    with pytest.raises(ConnectFailed) as caught:
        world.run(world.channel(reached=False).call, TOPICS)
    assert world.now_s < 1
    assert str(caught.value) == (
        "no daemon answers at http://one: refused (hint: plainsong serve starts one; or give another url)"
    )
    assert caught.value.outcome == "not-applied"


def test_a_daemon_that_starts_a_moment_later_is_found():
    world = Simulation([NOBODY, NOBODY, said(["t"])])
    assert world.run(world.channel(reached=False).call, TOPICS) == ["t"]


def test_every_url_is_tried_before_that():
    world = Simulation([NOBODY, said(["t"])])
    channel = world.channel(["http://one", "http://two"], reached=False, wait_for_daemon_s=0)
    assert world.run(channel.call, TOPICS) == ["t"]
    world = Simulation([NOBODY, NOBODY])
    with pytest.raises(ConnectFailed):
        world.run(world.channel(["http://one", "http://two"], reached=False, wait_for_daemon_s=0).call, TOPICS)


def test_what_once_worked_is_retried_until_the_deadline():
    world = Simulation([said(["t"]), *[NOBODY] * 6, said(["u"])])
    channel = world.channel(reached=False)
    assert [world.run(channel.call, TOPICS) for _ in range(2)] == [["t"], ["u"]]


def test_how_long_the_first_one_waits_can_be_said():
    world = Simulation([*[NOBODY] * 9, said(["t"])])
    assert world.run(world.channel(reached=False, wait_for_daemon_s=30).call, TOPICS) == ["t"]
    for wrong in (-1, float("nan"), 1e12):
        with pytest.raises(InvalidParameter, match="wait_for_daemon_s"):
            Client(wait_for_daemon_s=wrong)


def test_a_publisher_and_a_reader_that_follows_find_no_daemon_either():
    nowhere = f"http://127.0.0.1:{free_port()}"
    with Client(nowhere, wait_for_daemon_s=0) as client:
        with pytest.raises(ConnectFailed, match="no daemon answers at"):
            next(iter(client.read("t", follow=True)))
        publisher = client.publisher("t")
        publisher.send(b"x")
        publisher.send(b"y")
        with pytest.raises(NotSent, match=r"messages? not sent: no daemon answers at") as caught:
            publisher.flush()
        assert isinstance(caught.value.__cause__, ConnectFailed)
        publisher.close()
