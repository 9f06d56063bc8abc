"""A refused first connection is an error at once: only a daemon that has answered before is retried."""

from __future__ import annotations

import socket
import threading

import pytest

from plainsong import Client, calls
from plainsong.errors import ConnectFailed, NotSent
from plainsong.protocol.errors import InvalidParameter
from tests.client.simulation import NO_DAEMON, Simulation, said
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("both_clients")
TOPICS = calls.list_topics("default")


def test_a_refused_first_connection_raises_within_a_second_and_names_the_missing_daemon():
    world = Simulation(lambda _: NO_DAEMON)
    with pytest.raises(ConnectFailed) as caught:
        world.run(world.channel(reached=False).call, TOPICS)
    assert world.now_s < 1
    assert str(caught.value) == (
        "no daemon answers at http://one: refused (hint: start one with plainsong serve, or give another URL)"
    )
    assert caught.value.outcome == "not-applied"


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_connect_failed_is_raised_at_the_time_limit_however_long_the_pauses_are(luck):
    world = Simulation(lambda _: NO_DAEMON)
    channel = world.channel(reached=False, wait_for_daemon_s=0.5)
    channel.random = lambda: luck
    with pytest.raises(ConnectFailed):
        world.run(channel.call, TOPICS)
    assert world.now_s == pytest.approx(0.5, abs=0.01)


def test_https_at_a_port_without_tls_is_reported_as_such():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_answer_plainly, args=(server,))
        answering.start()
        port = server.getsockname()[1]
        with Client(f"https://127.0.0.1:{port}", wait_for_daemon_s=0) as client, pytest.raises(ConnectFailed) as caught:
            client.topics()
        answering.join()
    assert caught.value.hint == "that port does not speak TLS: use http://"


def _answer_plainly(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def test_a_daemon_that_starts_a_moment_later_is_found():
    world = Simulation([NO_DAEMON, NO_DAEMON, said(["t"])])
    assert world.run(world.channel(reached=False).call, TOPICS) == ["t"]


def test_every_url_is_tried_before_it_is_raised():
    world = Simulation([NO_DAEMON, said(["t"])])
    channel = world.channel(["http://one", "http://two"], reached=False, wait_for_daemon_s=0)
    assert world.run(channel.call, TOPICS) == ["t"]
    world = Simulation([NO_DAEMON, NO_DAEMON])
    with pytest.raises(ConnectFailed):
        world.run(world.channel(["http://one", "http://two"], reached=False, wait_for_daemon_s=0).call, TOPICS)


def test_a_url_that_once_worked_is_retried_until_the_deadline():
    world = Simulation([said(["t"]), *[NO_DAEMON] * 6, said(["u"])])
    channel = world.channel(reached=False)
    assert [world.run(channel.call, TOPICS) for _ in range(2)] == [["t"], ["u"]]


def test_the_time_limit_of_the_first_connection_can_be_set():
    world = Simulation([*[NO_DAEMON] * 9, said(["t"])])
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
