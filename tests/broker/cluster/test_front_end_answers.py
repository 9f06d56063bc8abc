"""Streams and publishes through an instance's front end get the same answers as without a front end."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from socket import socketpair

import pytest
import trio

from broker.api.operations.replication import not_leased
from broker.api.routes import ROUTES
from broker.front.forward import FrontForwarding
from broker.front.parent import Answering
from broker.http.budgets import BodyBudget
from broker.http.messages import Request
from broker.http.sockets import stream_of
from broker.link.client import Link
from broker.link.server import serve_link
from broker.link.wire import WITHIN_DAEMON
from plainsong.protocol.errors import ReplicationUnavailable, ShuttingDown
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.broker.stream_talk import request

BUDGET = 1 << 30


@asynccontextmanager
async def front_end_of(node, **options):
    """Return the object that answers a front end of ``node``, and its link."""
    ours, theirs = socketpair()
    service = node.service
    answering = Answering(
        (), service.begin, service.publishing, service.accounting, service.answers, BodyBudget(BUDGET), **options
    )
    link = Link(stream_of(theirs), WITHIN_DAEMON)
    async with trio.open_nursery() as nursery:
        serve = partial(serve_link, stream_of(ours), answering.dispatch, WITHIN_DAEMON, flush=answering.flush)
        nursery.start_soon(serve)
        nursery.start_soon(link.run)
        yield FrontForwarding(link), link
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("asked", "ab")
async def test_a_stream_through_a_front_end_says_where_the_owner_is(asked):
    async with cluster("a", "b") as nodes:
        nodes.move("ns:t", "b")
        await nodes["b"].create()
        budget = BodyBudget(BUDGET)
        async with front_end_of(nodes[asked]) as (passing_on, _):
            stream = passing_on.begin("ns", "t", "r", budget.reserve())
            await stream.opened()
            expected = [("Plainsong-Owner", nodes["b"].address)] if asked == "a" else []
            assert list(stream.headers) == expected
            await stream.take([request(1, b"one")])
            assert await stream.answers()
            stream.close()
        assert budget.reserved_bytes == 0
        assert len(await nodes["b"].poll()) == 1


@pytest.mark.parametrize("messages", [1, 2, 100_000])
async def test_a_publish_through_a_front_end_is_refused_once_the_lease_is_over(messages):
    refusals = [None, not_leased()]
    body = b'{"messages":[' + b",".join([b'"m"'] * messages) + b"]}"
    asked = Request({"namespace": "ns", "topic": "t"}, "", {"content-type": "application/json"}, body)
    async with cluster("a") as nodes:
        nodes.move("ns:t", "a")
        await nodes["a"].create()
        async with front_end_of(nodes["a"], refusal=lambda: refusals[0]) as (passing_on, _):
            publish = passing_on._handler(next(each for each in ROUTES if each.name == "publish"))
            assert (await publish(asked)).status == 200
            refusals.reverse()
            with pytest.raises(ReplicationUnavailable) as caught:
                await publish(asked)
            assert caught.value.outcome == "not-applied"
        topic = await nodes["a"].call("GET", f"{TOPICS}/t/stats")
        assert topic.json()["messages"] == messages


async def test_a_stream_that_cannot_be_opened_is_refused_as_not_applied():
    async with cluster("a") as nodes:
        nodes.move("ns:t", "a")
        async with front_end_of(nodes["a"]) as (passing_on, link):
            link.cut()
            await link.ended.wait()
            stream = passing_on.begin("ns", "t", "r", BodyBudget(BUDGET).reserve())
            with pytest.raises(ShuttingDown):
                await stream.opened()
            stream.close()
