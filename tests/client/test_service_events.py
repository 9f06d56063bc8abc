"""A client follows the service's events: from the start, across kills of the daemon, and until it is stopped."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import anyio
import pytest

from plainsong import AsyncClient, Client, calls
from plainsong.credentials import Credentials
from plainsong.errors import ConnectFailed, InvalidName, InvalidParameter, PlainsongError, UnexpectedAnswer
from plainsong.transport.event_source import MAX_EVENT_BYTES, EventSource, RawEvent
from tests.client.conftest import url_of
from tests.client.test_restarts import kill_and_restart
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S
from tests.ports import free_address

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


# --- a real daemon -----------------------------------------------------------------------------------


def test_a_client_gets_the_current_state_and_then_the_changes(client: Any, topic: str):
    with client.admin.events(topic, kinds=["topics", "attention"]) as events:
        assert next(events).kind == "topics"
        attention = next(events)
        # A slow disk is reported for minutes, which no test can prevent.
        assert (attention.kind, [each for each in attention.data if each["kind"] != "slow-sync"]) == ("attention", [])
        client.publish(topic, [b"a", b"b"])
        changed = next(event for event in events if event.data[0]["messages"] == 2)
        assert (changed.kind, changed.data[0]["name"]) == ("topics", topic)


def test_events_of_all_kinds_are_sent_and_those_of_topics_only_if_topics_are_named(client: Any, topic: str):
    with client.admin.events() as events:
        assert [each.kind for each in islice(events, 3)] == ["transactions", "attention", "cluster"]
    with client.admin.events(f"default:{topic}") as events:
        assert {each.kind for each in islice(events, 4)} == {"topics", "transactions", "attention", "cluster"}
    with client.admin.events(f"default:{topic}", kinds=["topics"]) as events:
        # Streams share the state found within the last second, which may predate the topic.
        (row,) = next(event.data for event in events if event.data)
        assert (row["namespace"], row["name"]) == ("default", topic)


def test_after_a_kill_it_continues_by_itself_and_reports_only_changes(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running)) as client, client.admin.events(kinds=["transactions", "attention"]) as events:
        told = {each.kind: each.data for each in islice(events, 2)}
        assert list(told) == ["transactions", "attention"]
        kill_and_restart(running)
        begun = client.transactions.begin()
        # A disk that was slow in between also changes the attention event.
        for event in events:
            assert event.data != told[event.kind], "it was sent before"
            told[event.kind] = event.data
            if event.kind == "transactions":
                break
        assert (event.data["total"], event.data["open"][0]["id"]) == (1, str(begun.id))


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_asynchronous_clients_continue_after_a_kill_and_end_on_request(daemon: Callable[..., Daemon], loop: str):
    running = daemon(bind=free_address())

    async def main() -> None:
        async with AsyncClient(url_of(running)) as client:
            seen: list[Any] = []
            first, changed = anyio.Event(), anyio.Event()
            async with client.admin.events(kinds=["transactions"]) as events, anyio.create_task_group() as tasks:

                async def follow() -> None:
                    async for event in events:
                        seen.append(event.data["total"])
                        (first if len(seen) == 1 else changed).set()

                tasks.start_soon(follow)
                await first.wait()
                await anyio.to_thread.run_sync(kill_and_restart, running)
                await client.transactions.begin()
                with anyio.fail_after(PATIENCE_S):
                    await changed.wait()
                events.stop()
            assert seen == [0, 1]

    anyio.run(main, backend=loop)


def test_a_stopped_loop_does_not_begin(client: Any):
    with client.admin.events(kinds=["attention"]) as events:
        events.stop()
        assert list(events) == []


def test_a_waiting_thread_is_ended_by_a_stop_and_by_the_end_of_the_block(shared_url: str):
    with Client(shared_url) as client:
        for end in ("stop", "close"):
            with client.admin.events(kinds=["attention"]) as events:
                next(events)
                thread = threading.Thread(target=list, args=(events,))
                thread.start()
                getattr(events, end)()
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


def test_an_invalid_subscription_is_an_error_at_once(client: Any, shared_url: str):
    with pytest.raises(InvalidName):
        client.admin.events("no/name")
    with client.admin.events(kinds=["things"]) as events, pytest.raises(InvalidParameter):
        next(events)
    nobody = Client("http://127.0.0.1:1", wait_for_daemon_s=0)
    with nobody, nobody.admin.events() as events, pytest.raises(ConnectFailed):
        next(events)


# --- a scripted server -------------------------------------------------------------------------------


@contextmanager
def playing(*answers: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives each connection one of these answers and closes it; yields its URL and the requests."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(65536)
                    asked.append(request.decode())
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        thread.join(PATIENCE_S)


def followed(url: str) -> None:
    """Follow a server until an error, without a retry."""
    with Client(url, retry=False) as client, client.admin.events() as events:
        list(events)


def event(kind: str, data: Any, event_id: str = "") -> bytes:
    return f"id: {event_id}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def test_a_client_that_reconnects_names_the_last_complete_event():
    first = HEAD + event("attention", 1, "one") + event("attention", 2, "two") + b"id: three\nevent: attention\ndata: 3"
    second = HEAD + event("attention", 3, "three") + event("end", {})
    third = HEAD + event("attention", 4, "four")
    with (
        playing(first, second, third) as (url, asked),
        Client(url) as client,
        client.admin.events(kinds=["attention"]) as events,
    ):
        assert [each.data for each in islice(events, 4)] == [1, 2, 3, 4]
    assert [line for each in asked for line in each.split("\r\n") if line.startswith("Last-Event-ID")] == [
        "Last-Event-ID: two",
        "Last-Event-ID: three",
    ]


def test_without_retries_a_broken_connection_is_an_error():
    with playing(HEAD + event("attention", 1)) as (url, _), pytest.raises(PlainsongError) as broken:
        followed(url)
    assert broken.value.code == "connection_lost"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno",
        HEAD + b"event: attention\ndata: {\n\n",
    ],
)
def test_a_response_without_events_is_an_unexpected_answer(answer: bytes):
    with playing(answer) as (url, _), pytest.raises(UnexpectedAnswer):
        followed(url)


# --- the bytes ---------------------------------------------------------------------------------------


def read(*pieces: bytes) -> list[RawEvent]:
    source = EventSource("http://localhost", "/v1/events", Credentials())
    assert source.request().startswith(b"GET /v1/events HTTP/1.1\r\n")
    return [event for piece in (HEAD, *pieces) for event in source.receive(piece)]


def test_events_are_the_same_however_their_bytes_are_split():
    body = (
        ": ping\n\nretry: 5\n\nevent: a\ndata: ä\nid: 1\n\ndata:b\r\ndata: c\r\n\r\nevent: none\n\nid: 2\ndata: d\n\n"
    )
    whole = read(body.encode())
    assert whole == [RawEvent("a", "ä", "1"), RawEvent("message", "b\nc", "1"), RawEvent("message", "d", "2")]
    encoded = body.encode()
    assert read(*(encoded[at : at + 1] for at in range(len(encoded)))) == whole


def test_an_endless_event_is_not_kept():
    piece = b"data: " + b"x" * (1 << 20)
    with pytest.raises(UnexpectedAnswer, match="more than"):
        read(*([piece] * (MAX_EVENT_BYTES // len(piece) + 1)))
    with pytest.raises(UnexpectedAnswer, match="more than"):
        read(*([piece + b"\n"] * (MAX_EVENT_BYTES // len(piece) + 2)))


def test_the_path_names_topics_and_kinds():
    assert calls.events_path("ns", [], []) == "/v1/events?kinds=transactions,attention,cluster"
    assert calls.events_path("ns", ["t", "x:u"], ["topics"]) == "/v1/events?topics=ns:t,x:u&kinds=topics"
