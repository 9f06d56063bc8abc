"""Readers that do not read their answers: the memory that they hold is bounded, and they are cut off."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import Any

import h2.config
import h2.connection
import pytest
import trio

from broker.http import budgets
from broker.http.budgets import SMALL_BYTES
from tests.broker.broker_in_process import InProcess, in_process
from tests.broker.listeners import Reader, post, running
from tests.patience import PATIENCE_S
from tests.waiting import until

MIB = 1 << 20
LISTENERS = pytest.mark.parametrize("listener", ["hot", "application"])
POLL = post("t/poll", b"{}", "Content-Type: application/json")
#: Number of messages, which fit on one page, and the bytes of each: more than a socket buffers for a stalled reader.
STORED = 2
SIZE = 6 * MIB


async def stalled(daemon: InProcess, readers: AsyncExitStack, window_bytes: int = 4096) -> trio.SocketStream:
    """Connect a client that requests every message and reads nothing."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    url = daemon.http.base_url
    await sock.connect((url.host, url.port))
    stream = await readers.enter_async_context(trio.SocketStream(sock))
    await stream.send_all(POLL)
    return stream


async def filled(daemon: InProcess) -> None:
    await daemon.create()
    for _ in range(STORED):
        await daemon.publish("x" * SIZE)


@LISTENERS
async def test_readers_that_stop_reading_hold_no_more_than_the_budget(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 8 * SIZE
    monkeypatch.setattr(budgets, "YIELD_S", 60.0)
    async with in_process(listener=listener, http__max_answer_bytes=bound) as daemon, AsyncExitStack() as readers:
        await filled(daemon)
        answers = daemon.service.answers
        answers.patience_s = 0.05
        most = asked = 0

        def is_settled() -> bool:  # otherwise a page that is being read or encoded may still use memory
            return bool(answers.refused) or sum(room.reserved_bytes > 0 for room in answers._blocked) == asked

        while not answers.refused:
            await stalled(daemon, readers)
            asked += 1
            await until(is_settled)
            most = max(most, answers.reserved_bytes)
        assert bound // 2 <= most <= bound
        refused = await daemon.call("POST", "/v1/namespaces/ns/topics/t/poll", json={}, status=503, code="overloaded")
        assert refused.headers["retry-after"]
        # Small answers, and those about the daemon's state, still succeed.
        await daemon.create("small")
        await daemon.publish("hello", topic="small")
        assert len(await daemon.poll("small")) == 1
        await daemon.call("GET", "/metrics")
        # Readers that have read nothing for this time are cut off in favour of one that reads.
        monkeypatch.setattr(budgets, "YIELD_S", 0.0)
        answers.patience_s = PATIENCE_S
        await daemon.call("POST", "/v1/namespaces/ns/topics/t/poll", json={})
        assert answers.cut
    assert answers.reserved_bytes == 0


@LISTENERS
async def test_pages_are_cut_and_marked_when_little_budget_is_left(listener: str) -> None:
    async with in_process(listener=listener, http__max_answer_bytes=8 * SIZE) as daemon:
        await filled(daemon)
        path = "/v1/namespaces/ns/topics/t/poll"
        whole = await daemon.call("POST", path, json={})
        assert (len(whole.json()), whole.headers["plainsong-end"]) == (STORED, "end")
        held = daemon.service.answers.room()
        held.must_have(4 * SIZE)
        seen: list[str] = []
        since = None
        while len(seen) < STORED:
            page = await daemon.call(
                "POST", path, json={} if since is None else {"startFrom": since, "inclusive": False}
            )
            assert 1 <= len(page.json()) < STORED
            seen += [message["id"] for message in page.json()]
            since = page.headers["plainsong-last-id"]
            assert page.headers["plainsong-end"] == ("end" if len(seen) == STORED else "more")
        assert seen == [message["id"] for message in whole.json()]
        held.release()
        await until(lambda: not daemon.service.answers.reserved_bytes)


@LISTENERS
async def test_a_page_is_cut_by_its_encoded_size(listener: str) -> None:
    """In JSON, a control character takes six bytes."""
    async with in_process(listener=listener, http__max_answer_bytes=64 * MIB) as daemon:
        await daemon.create()
        payloads = [f"{number:04}" + "\x01" * 996 for number in range(300)]
        await daemon.publish(*payloads)
        daemon.service.answers.patience_s = 0.0
        held = daemon.service.answers.room()
        held.must_have(56 * MIB)
        seen: list[str] = []
        pages = 0
        body: dict[str, Any] = {}
        plain = {"Accept-Encoding": "identity"}
        while len(seen) < len(payloads):
            page = await daemon.call("POST", "/v1/namespaces/ns/topics/t/poll", json=body, headers=plain)
            assert len(page.content) <= SMALL_BYTES
            seen += [message["payload"] for message in page.json()]
            assert page.headers["plainsong-end"] == ("end" if len(seen) == len(payloads) else "more")
            body = {"startFrom": page.headers["plainsong-last-id"], "inclusive": False}
            pages += 1
        assert seen == payloads
        assert pages > 1
        held.release()
        await until(lambda: not daemon.service.answers.reserved_bytes)


@LISTENERS
async def test_a_stalled_reader_is_cut_and_its_memory_freed(listener: str) -> None:
    async with in_process(listener=listener, http__send_timeout_s=0.3) as daemon, AsyncExitStack() as readers:
        await filled(daemon)
        answers = daemon.service.answers
        await stalled(daemon, readers)
        await until(lambda: answers.reserved_bytes > 0)
        await until(lambda: answers.reserved_bytes == 0)


@LISTENERS
async def test_a_reader_that_leaves_frees_its_memory(listener: str) -> None:
    async with in_process(listener=listener) as daemon, AsyncExitStack() as readers:
        await filled(daemon)
        answers = daemon.service.answers
        stream = await stalled(daemon, readers)
        await until(lambda: answers.reserved_bytes > SMALL_BYTES)
        await stream.aclose()
        await until(lambda: answers.reserved_bytes == 0)


@LISTENERS
async def test_a_slow_reader_gets_its_whole_answer(listener: str) -> None:
    async with in_process(listener=listener) as daemon, AsyncExitStack() as readers:
        await filled(daemon)
        reader = Reader(await stalled(daemon, readers, MIB))
        await until(lambda: daemon.service.answers.reserved_bytes > 0)
        reply = await reader.reply()
        assert reply.status == 200
        assert reply.body.count(b"x") >= STORED * SIZE


async def test_an_http_2_stream_without_a_window_ends_its_connection() -> None:
    """The connection is alive, only the stream is blocked."""
    async with running(hot=False, send_timeout_s=0.3) as listener, await listener.connect() as stream:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        headers = [(":method", "POST"), (":path", "/v1/namespaces/ns/topics/t/store"), (":scheme", "http"),
                   (":authority", "localhost"), ("content-type", "avro/binary")]  # fmt: skip
        client.send_headers(1, headers)
        client.send_data(1, bytes(10_000), end_stream=True)
        await stream.send_all(client.data_to_send())
        with trio.fail_after(PATIENCE_S):
            while await stream.receive_some(1 << 16):
                pass
        await until(lambda: listener.budget.answers.reserved_bytes == 0)
