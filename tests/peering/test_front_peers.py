"""A link that reaches a front end is served by the owning process, to which its connection is handed."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from linked import echo

from broker.config.config import config_of
from broker.front import parent
from broker.http import sockets
from broker.http import sockets as descriptors
from broker.link.client import Links, connect_by_tls
from broker.link.proof import LinkSecret
from broker.link.server import in_task, peer_handler
from broker.link.wire import LinkBounds
from broker.tls import Certificates
from tests.certificates import Authority
from tests.freezing import freeze
from tests.waiting import until


async def test_a_link_through_a_front_end_outlives_it_and_ends_with_the_stop():
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0})
    answering = cast("Any", SimpleNamespace(flush=lambda: None, dispatch=in_task(echo), security=None))
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = partial(parent.serve_front_ends, config, answering, peer_handler(in_task(echo)), stop=stop)
        (address,) = await nursery.start(serving)
        links = Links(nursery, LinkBounds(dial_s=60))
        link = await links.to(address)
        reply = await link.call("echo", (1, 2), b"x" * 500_000)
        assert (reply.value, reply.body) == ((1, 2), b"x" * 500_000)
        stop.set()
        await link.ended.wait()


async def test_no_client_is_accepted_before_all_front_ends_run_and_no_other_process_gets_the_address(monkeypatch):
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0})
    answering = cast("Any", SimpleNamespace(flush=lambda: None, dispatch=in_task(echo), security=None))
    stop = trio.Event()
    looked = []

    def look(together: list[list[socket.socket]]) -> None:
        address = together[0][0].getsockname()
        bind = f"{address[0]}:{address[1]}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        for take in (sockets.listen_on, partial(sockets.bind_shared, count=2)):
            with pytest.raises(OSError, match="in use"):
                take(bind)
        sockets.start_listening(together)
        socket.create_connection(address).close()
        looked.append(bind)

    monkeypatch.setattr(parent, "start_listening", look)
    async with trio.open_nursery() as nursery:
        assert await nursery.start(partial(parent.serve_front_ends, config, answering, None, stop=stop)) == looked
        stop.set()


async def test_a_front_end_that_is_frozen_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(parent, "SILENCE_S", 6.0)
    monkeypatch.setattr(parent, "AFTER_LINK_S", 0.0)
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0})
    answering = cast("Any", SimpleNamespace(flush=lambda: None, dispatch=in_task(echo), security=None))
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(parent.serve_front_ends, config, answering, None, stop=stop))
        before = children()
        frozen = before[0]
        freeze(frozen)
        await until(lambda: frozen not in children() and len(children()) >= len(before))
        stop.set()
    assert "a front end ended" in caplog.messages


async def test_a_front_end_that_failed_to_start_is_started_again(monkeypatch, caplog):
    """A start can fail, for example, for lack of descriptors, processes or memory, which may become free later."""
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0})
    answering = cast("Any", SimpleNamespace(flush=lambda: None, dispatch=in_task(echo), security=None))
    stop = trio.Event()
    begin = trio.lowlevel.open_process
    failed = 0

    async def scarce(*args: Any, **more: Any) -> trio.Process:
        nonlocal failed
        if ready and not failed:
            failed += 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await begin(*args, **more)

    ready = False
    monkeypatch.setattr(trio.lowlevel, "open_process", scarce)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(parent.serve_front_ends, config, answering, None, stop=stop))
        ready = True
        before = children()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: failed and before[0] not in children() and len(children()) >= len(before))
        stop.set()
    assert caplog.messages.count("a front end ended") == 2


def children() -> list[int]:
    """Return this process's children that run front ends."""
    started = " ".join(text_of(path) for path in Path("/proc/self/task").glob("*/children"))
    return [int(pid) for pid in started.split() if "broker.front\0" in text_of(Path(f"/proc/{pid}/cmdline"))]


def text_of(path: Path) -> str:
    with suppress(OSError):  # its thread or process has ended
        return path.read_text()
    return ""


async def test_a_connection_arrives_with_the_bytes_already_read_from_it():
    handover, other = descriptors.handover_pair()
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = await trio.open_tcp_stream(*listener.getsockname())
    accepted, _ = await listener.accept()
    await descriptors.send_connection(handover, socket.socket(fileno=accepted.detach()), b"read ahead")
    taken = await descriptors.receive_connection(other)
    assert taken is not None
    connection, already_read = taken
    assert already_read == b"read ahead"
    async with descriptors.stream_of(connection) as stream:
        await stream.send_all(b"hello")
        assert await client.receive_some() == b"hello"
    handover.close()
    assert await descriptors.receive_connection(other) is None
    other.close()
    listener.close()
    await client.aclose()


async def test_a_link_over_tls_through_a_front_end_reaches_the_owning_process(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    values = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.file}
    settings = {f"tls.{name}": str(path) for name, path in values.items()}
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0} | settings)
    certificates = Certificates(config.tls)
    answering = cast("Any", SimpleNamespace(flush=lambda: None, dispatch=in_task(echo), security=None))
    secret, stop = LinkSecret(b"s" * 32, "a"), trio.Event()
    async with trio.open_nursery() as nursery:
        peers = peer_handler(in_task(echo), secret=secret)
        serving = partial(parent.serve_front_ends, config, answering, peers, stop=stop, certificates=certificates)
        (address,) = await nursery.start(serving)
        dial = partial(connect_by_tls, lambda: certificates.now.links)
        links = Links(nursery, LinkBounds(dial_s=60), dial=dial, secret=secret)
        link = await links.to(address)
        reply = await link.call("echo", (1, 2), b"x" * 2_000_000)
        assert (reply.value, reply.body) == ((1, 2), b"x" * 2_000_000)
        link.cut()
        await link.ended.wait()
        assert (await (await links.to(address)).call("echo", 3)).value == 3
        stop.set()
