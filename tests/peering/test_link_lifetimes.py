"""A link to an instance that left while it was dialled is closed, not kept; and a link keeps no request alive."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar

import trio
from trio.testing import memory_stream_pair

from broker.link.client import Links
from broker.link.flow import LinkBroken
from broker.link.server import in_task, serve_link
from broker.link.wire import BETWEEN_INSTANCES
from tests.patience import PATIENCE_S
from tests.peering.linked import echo


async def test_a_link_that_was_forgotten_while_it_was_dialled_is_ended():
    dialling, may_go_on, ended = trio.Event(), trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:

        async def serve(theirs):
            await serve_link(theirs, in_task(echo), BETWEEN_INSTANCES, stop=trio.Event(), peer="mine")
            ended.set()

        async def dial(address):
            del address
            dialling.set()
            await may_go_on.wait()
            mine, theirs = memory_stream_pair()
            nursery.start_soon(serve, theirs)
            return mine

        links = Links(nursery, dial=dial)

        async def ask():
            with suppress(LinkBroken):
                await (await links.to("b:7420")).call("echo", 1)

        nursery.start_soon(ask)
        await dialling.wait()
        links.forget("b:7420")
        may_go_on.set()
        with trio.fail_after(PATIENCE_S):
            await ended.wait()
        assert not list(links)
        nursery.cancel_scope.cancel()


async def test_a_link_keeps_nothing_of_the_request_that_needed_it_first():
    request = ContextVar("request", default="none")
    seen = []

    async def dial(address):
        seen.append((address, request.get()))
        raise OSError("no listener")

    async with trio.open_nursery() as nursery:
        links = Links(nursery, dial=dial)
        request.set("the first")
        with suppress(LinkBroken):
            await links.to("b:7420")
    assert seen == [("b:7420", "none")]
