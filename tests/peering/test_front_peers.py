"""A link that reaches a front end is served by the owning process, to which its connection is handed."""

from __future__ import annotations

import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import trio
from linked import echo

from broker.config.config import config_of
from broker.front import descriptors
from broker.front.parent import serve_front_ends
from broker.peering.bounds import LinkBounds
from broker.peering.door import peer_door
from broker.peering.links import Links


async def test_a_link_through_a_front_end_outlives_it_and_ends_with_the_stop():
    config = config_of({"http.bind": "127.0.0.1:0", "http.processes": 2, "shutdown.drain_s": 5.0})
    answering = cast("Any", SimpleNamespace(service=None, dispatch=echo))
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serving = partial(serve_front_ends, config, answering, peer_door(echo), stop=stop)
        (address,) = await nursery.start(serving)
        links = Links(nursery, LinkBounds(dial_s=60))
        link = await links.to(address)
        reply = await link.call("echo", (1, 2), b"x" * 500_000)
        assert (reply.value, reply.body) == ((1, 2), b"x" * 500_000)
        stop.set()
        await link.ended.wait()


async def test_a_connection_arrives_with_what_was_read_of_it():
    door, other = descriptors.pair()
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = await trio.open_tcp_stream(*listener.getsockname())
    accepted, _ = await listener.accept()
    await descriptors.give(door, socket.socket(fileno=accepted.detach()), b"read ahead")
    taken = await descriptors.take(other)
    assert taken is not None
    connection, already_read = taken
    assert already_read == b"read ahead"
    async with descriptors.stream_of(connection) as stream:
        await stream.send_all(b"hello")
        assert await client.receive_some() == b"hello"
    door.close()
    assert await descriptors.take(other) is None
    other.close()
    listener.close()
    await client.aclose()
