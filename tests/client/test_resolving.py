"""The client's time limits hold even if the resolver does not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from math import inf
from typing import Any

import anyio
import pytest

from plainsong import AsyncClient
from plainsong.errors import ConnectFailed, DeadlineExceeded, PlainsongError
from tests.client.client_under_test import Client, only_threads
from tests.client.test_async import on_both_loops
from tests.client.test_interrupted import in_time
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")

STUCK = "http://stuck.test:7420"
#: A short time limit, for tests that let it expire.
SHORT_S = 0.2
#: The second text comes from an event loop that was busy until both limits had passed, and detects both at once.
NOT_CONNECTED = r"stuck\.test was not resolved within|no connection within"


class Resolver:
    """Resolves names as usual, except ``stuck.test``, for which it answers at the end of the test."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.times = 0
        self.ends = threading.Event()
        self._answer = socket.getaddrinfo

    def getaddrinfo(self, host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("stuck.test", b"stuck.test") or options.get("flags", 0) & socket.AI_NUMERICHOST:
            return self._answer(host, *arguments, **options)
        self.times += 1
        self.asked.release()
        self.ends.wait()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.ends.set()
    for thread in threading.enumerate():
        if thread.name == "plainsong-resolver":
            thread.join(PATIENCE_S)  # the next test must not receive this one's answer


def test_a_deadline_holds_while_a_name_is_being_resolved(resolver: Resolver):
    with Client(STUCK, deadline_s=SHORT_S, wait_for_daemon_s=PATIENCE_S) as client:
        with pytest.raises((DeadlineExceeded, ConnectFailed), match=NOT_CONNECTED) as error:
            in_time(lambda: client.publish("t", b"x"))
        assert error.value.outcome == "not-applied"


def test_the_next_url_is_tried_while_a_name_is_being_resolved(resolver: Resolver, shared_url: str, topic: str):
    with Client([STUCK, shared_url], connect_timeout_s=SHORT_S) as client:
        in_time(lambda: client.publish(topic, b"x"))
        assert [message.payload for message in client.poll(topic)] == [b"x"]
    assert resolver.times == 1


def test_an_unresolved_name_occupies_one_thread_however_often_it_is_looked_up(resolver: Resolver):
    with Client(STUCK, deadline_s=SHORT_S, retry=False) as client:
        for _ in range(5):
            with pytest.raises(PlainsongError):
                in_time(lambda: client.poll("t"))
    assert resolver.times == 1


def test_a_reader_is_stopped_while_a_name_is_being_resolved(resolver: Resolver):
    with Client(STUCK, connect_timeout_s=PATIENCE_S * 9, request_timeout_s=PATIENCE_S * 9) as client:
        reader = client.read("t", follow=True)
        ended = threading.Event()

        def read() -> None:
            assert list(reader) == []
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        assert resolver.asked.acquire(timeout=PATIENCE_S)
        reader.stop()
        assert ended.wait(PATIENCE_S)


def test_events_are_stopped_while_a_name_is_being_resolved(resolver: Resolver):
    with Client(STUCK, connect_timeout_s=PATIENCE_S * 9, request_timeout_s=PATIENCE_S * 9) as client:
        events = client.admin.events()
        ended = threading.Event()

        def read() -> None:
            assert list(events) == []
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        assert resolver.asked.acquire(timeout=PATIENCE_S)
        events.stop()
        assert ended.wait(PATIENCE_S)


def test_opening_a_stream_times_out_while_a_name_is_being_resolved(resolver: Resolver):
    with Client(STUCK, connect_timeout_s=SHORT_S) as client, pytest.raises(ConnectFailed, match="was not resolved"):
        in_time(lambda: client.stream("t"))


def refuse_threads(monkeypatch: pytest.MonkeyPatch, times: float = inf) -> None:
    """Refuse to start threads, ``times`` times."""
    start, refused = threading.Thread.start, count()

    def refuse(thread: threading.Thread) -> None:
        if next(refused) < times:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_without_a_thread_a_name_is_not_resolved_and_nothing_was_sent(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
):
    only_threads("the test's event loop has a thread by now")
    refuse_threads(monkeypatch)
    with Client(STUCK, retry=False) as client:
        with pytest.raises(ConnectFailed, match=r"stuck\.test was not resolved: can't start new thread") as error:
            client.publish("t", b"x")
        assert error.value.outcome == "not-applied"
    assert not resolver.times


def test_the_next_attempt_resolves_the_name_for_which_no_thread_could_be_started(
    shared_url: str, topic: str, monkeypatch: pytest.MonkeyPatch
):
    only_threads("the test's event loop has a thread by now")
    refuse_threads(monkeypatch, times=1)
    with Client(shared_url.replace("127.0.0.1", "localhost"), wait_for_daemon_s=PATIENCE_S) as client:
        client.publish(topic, b"x")
        assert [message.payload for message in client.poll(topic)] == [b"x"]


def test_without_a_thread_an_address_is_connected_to(shared_url: str, topic: str, monkeypatch: pytest.MonkeyPatch):
    only_threads("the test's event loop has a thread by now")
    refuse_threads(monkeypatch)
    with Client(shared_url) as client:
        client.publish(topic, b"x")


@on_both_loops
async def test_an_event_loop_that_may_start_no_thread_does_not_resolve_a_name(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
):
    async with AsyncClient(STUCK, retry=False) as client:
        refuse_threads(monkeypatch)
        with pytest.raises(ConnectFailed, match=r"stuck\.test was not resolved: can't start new thread") as error:
            await client.publish("t", b"x")
        assert error.value.outcome == "not-applied"


@on_both_loops
async def test_the_end_of_an_event_loop_does_not_wait_for_a_name(resolver: Resolver):
    async with AsyncClient(STUCK, deadline_s=SHORT_S, retry=False) as client:
        with pytest.raises(PlainsongError):
            await client.poll("t")


@on_both_loops
async def test_nothing_was_sent_if_the_loop_was_busy_until_all_limits_had_passed(resolver: Resolver):
    async def publish() -> None:
        with pytest.raises((DeadlineExceeded, ConnectFailed), match=NOT_CONNECTED) as error:
            await client.publish("t", b"x")
        assert error.value.outcome == "not-applied"
        resolver.asked.release()  # on a busy machine the time may be over before the name is looked up

    async with AsyncClient(STUCK, deadline_s=SHORT_S) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await anyio.to_thread.run_sync(partial(resolver.asked.acquire, timeout=PATIENCE_S))
        time.sleep(3 * SHORT_S)  # noqa: ASYNC251 - the program keeps the loop busy


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_call_is_cancelled_while_a_name_is_being_resolved(resolver: Resolver, loop: str):
    async def main() -> None:
        limits = {"connect_timeout_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
        async with AsyncClient(STUCK, **limits) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.poll, "t")
            await anyio.to_thread.run_sync(partial(resolver.asked.acquire, timeout=PATIENCE_S))
            tasks.cancel_scope.cancel()

    in_time(partial(anyio.run, main, backend=loop))


def test_the_second_address_of_a_name_is_tried_when_the_first_refuses(
    shared_url: str, topic: str, monkeypatch: pytest.MonkeyPatch
):
    port = int(shared_url.rpartition(":")[2])
    answer: Callable[..., Any] = socket.getaddrinfo

    def two(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != "localhost" or options.get("flags"):
            return answer(host, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.7", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with Client(f"http://localhost:{port}") as client:
        client.publish(topic, b"x")
        assert len(client.poll(topic)) == 1
