"""An instance verifies its advertised address: itself, no listener, another instance, or another program."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import trio
import trio.testing
from test_peer_handler import serving

from broker.cluster.join import WHO, verify_advertised_address, who_handler
from plainsong.protocol.errors import BadRequest

SAYS = "this instance cannot reach itself at its own address"


def an_older_version(call, reply):
    raise BadRequest(f"{call.kind} is nothing this version answers")


def as_instance(name):
    answer = who_handler(name)

    def handler(call, reply):
        assert call.kind == WHO
        answer(call, reply)

    return handler


@pytest.mark.parametrize("handler", [as_instance("a"), an_older_version])
async def test_an_instance_that_reaches_itself_logs_nothing(caplog, handler):
    async with serving(handler) as server:
        assert await verify_advertised_address("a", server.address) == ""
    assert SAYS not in caplog.messages


async def test_another_instance_at_its_address_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        async with serving(as_instance("b")) as server:
            assert await verify_advertised_address("a", server.address) == "another instance, 'b', answers there"
    (said,) = [record for record in caplog.records if record.getMessage() == SAYS]
    assert (said.instance, said.address) == ("a", server.address)
    assert "cluster.advertise" in said.hint


async def test_an_unreachable_address_is_logged_with_the_reason(caplog):
    with caplog.at_level(logging.WARNING):
        async with serving(as_instance("a")) as server:
            address = server.address
        assert "failed" in await verify_advertised_address("a", address)
    assert SAYS in caplog.messages


async def test_a_foreign_server_and_a_silent_one_are_logged(caplog):
    async def other(stream):
        await stream.send_all(b"SSH-2.0-somebody\r\n")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, other, 0, host="127.0.0.1"))
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        assert "not an instance of this cluster" in await verify_advertised_address("a", address)
        nursery.cancel_scope.cancel()
    ours, theirs = trio.testing.memory_stream_pair()

    async def dial(address):
        return ours

    assert await verify_advertised_address("a", "far:7420", dial, within_s=0.05) == "it does not answer"
    await theirs.aclose()
