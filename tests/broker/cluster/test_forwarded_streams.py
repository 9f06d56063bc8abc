"""Forwarding of bodies that are not a single answer: polls of any length, and WebSocket streams of publishes."""

from __future__ import annotations

import json
import random

import pytest
import trio
import trio.testing

from broker.cluster.remote_stream import RemoteStream
from broker.http.budgets import BodyBudget
from broker.link.flow import LinkBroken
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PollRequest
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.broker.listeners import Reader, post
from tests.broker.stream_talk import knock, open_stream, request
from tests.waiting import until

LARGE = "x" * 100_000


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c", poll__max_messages=10) as running:
        running.move("ns:t", "b")
        await running["b"].create()
        yield running


async def poll_of_any_length(node):
    """Start a version 1 poll on a new socket, without reading from it yet."""
    host, _, port = node.address.partition(":")
    socket = await trio.open_tcp_stream(host, int(port))
    body = AVRO.encode_poll(PollRequest(None, True, None))
    await socket.send_all(post("t/poll", body, f"Content-Type: {AVRO.content_type}"))
    return socket


async def calm():
    """Wait until every task that does not depend on a reader has finished."""
    for _ in range(5):
        await trio.testing.wait_all_tasks_blocked(0.05)


async def test_a_forwarded_poll_of_any_length_equals_that_of_the_owner_byte_for_byte(nodes):
    for _ in range(4):
        await nodes["b"].publish("t", *[LARGE] * 10)
    bodies = []
    for name in "ba":
        async with await poll_of_any_length(nodes[name]) as socket:
            reply = await Reader(socket).reply()
            assert reply.status == 200
            assert ("plainsong-owner" in reply.headers) == (name == "a")
            bodies.append(reply.body)
    assert len(bodies[0]) > 4_000_000
    assert bodies[0] == bodies[1]


async def test_a_reader_that_stops_pauses_the_owner_and_fills_no_memory(nodes):
    for _ in range(24):
        await nodes["b"].publish("t", *[LARGE] * 10)
    budget = nodes["b"].service.directory.budget
    before = budget.hits + budget.misses
    async with await poll_of_any_length(nodes["a"]) as socket:
        await calm()
        pages = budget.hits + budget.misses - before
        assert 0 < pages < 20  # of twenty-four; the owner holds back the rest
        assert sum(link.under_way for _, link in nodes["a"].cluster.links) == 1
        reply = await Reader(socket).reply()
        assert len(reply.body) > 24_000_000


@pytest.mark.parametrize("asked", "ab")
async def test_a_poll_of_any_length_continues_while_its_topic_changes_hands(nodes, asked):
    for _ in range(24):
        await nodes["b"].publish("t", *[LARGE] * 10)
    async with await poll_of_any_length(nodes[asked]) as socket:
        await calm()
        nodes.move("ns:t", "c")
        reply = await Reader(socket).reply()
        assert len(reply.body) > 24_000_000
        assert reply.body.endswith(b"\0")


async def test_a_reader_that_leaves_ends_its_answer_at_the_owner(nodes):
    for _ in range(24):
        await nodes["b"].publish("t", *[LARGE] * 10)
    socket = await poll_of_any_length(nodes["a"])
    await calm()
    await trio.aclose_forcefully(socket)
    await until(lambda: sum(link.under_way for _, link in nodes["a"].cluster.links) == 0)


async def test_an_answer_truncated_at_the_owner_is_truncated_here(nodes):
    for _ in range(24):
        await nodes["b"].publish("t", *[LARGE] * 10)
    async with await poll_of_any_length(nodes["a"]) as socket:
        await calm()
        nodes["b"].kill()
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            await Reader(socket).reply()


# --- streams of publishes --------------------------------------------------------------------------


async def test_a_stream_to_a_topic_of_another_instance_is_answered_in_order(nodes):
    async with knock(nodes["a"]) as (stream, accepted):
        headers = {name.decode().lower(): value.decode() for name, value in accepted.extra_headers}
        assert headers["plainsong-owner"] == nodes["b"].address
        for start in range(0, 2000, 100):
            await stream.send(*[request(number, b"%d" % number) for number in range(start, start + 100)])
        answers = await stream.answers(2000)
    assert [number for number, *_ in answers] == list(range(2000))
    ids = [fields["firstId"] for _, status, fields in answers if status == 200]
    assert len(ids) == 2000
    assert ids == sorted(set(ids))
    assert nodes["b"].metric("plainsong_requests_total", route="stream", status="200") == 2000


async def test_each_request_of_a_forwarded_stream_has_its_own_verdict(nodes):
    async with open_stream(nodes["a"]) as stream:
        await stream.send(request(7, b"fine"), request(8, b"no", ttlSeconds=-1), request(9, b"fine", producer="p"))
        answers = await stream.answers(3)
    async with open_stream(nodes["b"]) as stream:
        await stream.send(request(7, b"fine"), request(8, b"no", ttlSeconds=-1), request(9, b"fine", producer="p"))
        assert [(number, status, sorted(fields)) for number, status, fields in await stream.answers(3)] == [
            (number, status, sorted(fields)) for number, status, fields in answers
        ]


async def test_malformed_input_ends_a_forwarded_stream_after_the_requests_before_it(nodes):
    async with open_stream(nodes["a"]) as stream:
        await stream.send(request(1, b"one"), b"\xc1")
        assert [(number, status) for number, status, _ in await stream.answers(1)] == [(1, 200)]
        assert (await stream.closed())[0] == 1007
    assert await nodes["c"].poll() == ["one"]


async def test_a_stream_follows_its_topic_from_owner_to_owner(nodes):
    async with open_stream(nodes["a"]) as stream:
        number = 0
        for owner in "bcabac":
            nodes.move("ns:t", owner)
            await stream.send(*[request(number + more, b"%d" % (number + more)) for more in range(20)])
            answers = await stream.answers(20)
            assert [(each, status) for each, status, _ in answers] == [(number + more, 200) for more in range(20)]
            number += 20
    read = [int(text) for text in await _all(nodes["a"])]
    assert read == list(range(number))


async def test_a_stream_is_not_refused_while_the_forwarding_instance_still_sees_the_previous_owner(nodes):
    async with open_stream(nodes["a"]) as stream:
        await stream.send(request(1, b"1"))
        await stream.answers(1)
        nodes.move("ns:t", "c", seen_by="b")
        await stream.send(request(2, b"2"), request(3, b"3"))
        await until(lambda: nodes["b"].metric("plainsong_forward_retries_total"))
        nodes.move("ns:t", "c", seen_by="c")
        await stream.send(request(4, b"4"))
        assert [(number, status) for number, status, _ in await stream.answers(3)] == [(2, 200), (3, 200), (4, 200)]
        nodes.move("ns:t", "c", seen_by="a")
        await stream.send(request(5, b"5"))
        assert [(number, status) for number, status, _ in await stream.answers(1)] == [(5, 200)]
    assert await nodes["a"].poll() == ["1", "2", "3", "4", "5"]


class LostChannel:
    """A channel to an owner that is lost before it answers."""

    async def send(self, data):
        raise LinkBroken("cut", sent=True)

    async def receive(self):
        raise LinkBroken("cut", sent=True)

    def finish(self):
        pass

    def close(self):
        pass


async def test_a_request_that_the_lost_owner_did_not_answer_counts_as_answered():
    stream = RemoteStream(LostChannel(), None, BodyBudget(1 << 20).reserve())
    await stream.take([request(number, b"x") for number in range(3)])
    assert await stream.answers()
    # An instance in between passes this number on: if it were smaller, the instance before it would answer them again.
    assert stream.answered == 3


@pytest.mark.parametrize("view", ["all at once", "contradicting", "links cut"])
async def test_a_busy_stream_loses_and_doubles_nothing_while_its_topic_changes_hands(nodes, view):
    chance = random.Random(8)

    async def disturb():
        while True:
            await trio.sleep(0.02)
            if view == "links cut":
                nodes[chance.choice("ab")].cut_links()
            for node in "abc" if view == "contradicting" else ["abc"]:
                nodes.move("ns:t", chance.choice("abc"), seen_by=node)

    outcomes = {}
    async with open_stream(nodes["a"]) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(disturb)

        async def send():
            for start in range(0, 1000, 10):
                await stream.send(*[request(number, b"%d" % number) for number in range(start, start + 10)])
                await trio.sleep(0.001)

        nursery.start_soon(send)
        for number, status, fields in await stream.answers(1000):
            assert number == len(outcomes)
            outcomes[number] = "applied" if status == 200 else fields["outcome"]
        nursery.cancel_scope.cancel()
    nodes.move("ns:t", "c")
    read = [int(text) for text in await _all(nodes["a"])]
    assert read == sorted(set(read))
    known = [number for number, outcome in outcomes.items() if outcome == "applied"]
    assert set(known) <= set(read)
    assert not {number for number, outcome in outcomes.items() if outcome == "not-applied"} & set(read)
    assert len(known) > 200


async def test_a_stream_whose_link_breaks_reports_unknown_outcomes_and_continues(nodes):
    async with open_stream(nodes["a"]) as stream:
        await stream.send(request(1, b"one"))
        await stream.answers(1)
        nodes["b"].store.reachable = trio.Event()
        await stream.send(request(2, b"two"), request(3, b"three"))
        await until(lambda: nodes["b"].metric("plainsong_queue_requests") or _is_stepping(nodes["b"]))
        nodes["a"].cut_links()
        answers = await stream.answers(2)
        assert [(number, status, fields["code"]) for number, status, fields in answers] == [
            (2, 503, "outcome_unknown"),
            (3, 503, "outcome_unknown"),
        ]
        nodes["b"].store.reachable.set()
        await stream.send(request(4, b"four"))
        assert [(number, status) for number, status, _ in await stream.answers(1)] == [(4, 200)]
    read = await nodes["a"].poll()
    assert read[0] == "one"
    assert read[-1] == "four"
    assert set(read[1:-1]) in (set(), {"two", "three"})


async def test_a_stream_without_an_owner_refuses_each_request(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.remote_stream.PATIENCE_S", 0.2)
    async with open_stream(nodes["a"]) as stream:
        nodes.move("ns:t", None)
        await stream.send(request(1, b"one"), request(2, b"two"))
        answers = await stream.answers(2)
        assert [(number, status, fields["code"], fields["outcome"]) for number, status, fields in answers] == [
            (1, 503, "no_owner", "not-applied"),
            (2, 503, "no_owner", "not-applied"),
        ]
        nodes.move("ns:t", "c")
        await stream.send(request(3, b"three"))
        assert [(number, status) for number, status, _ in await stream.answers(1)] == [(3, 200)]
    assert await nodes["a"].poll() == ["three"]


async def test_a_sender_that_reads_no_answers_is_paused_and_fills_no_memory(nodes):
    """Both ends bound the bytes in progress; a payload's bytes are released once it is answered."""
    nodes["b"].store.reachable = trio.Event()
    sent = 0
    async with open_stream(nodes["a"]) as stream:
        with trio.move_on_after(1.5):
            for number in range(400):
                await stream.send(request(number, b"x" * 100_000))
                sent = number + 1
        assert sent < 250  # 8 MiB in progress at each end, plus the connections' buffers
        nodes["b"].store.reachable.set()
        assert {status for _, status, _ in await stream.answers(sent)} == {200}
    await until(lambda: sum(link.under_way for _, link in nodes["a"].cluster.links) == 0)


async def test_an_idle_stream_does_not_keep_an_owner_from_stopping(nodes):
    async with open_stream(nodes["a"]) as stream:
        await stream.send(request(1, b"one"))
        await stream.answers(1)
        nodes.move("ns:t", "c")
        await until(lambda: sum(link.under_way for _, link in nodes["a"].cluster.links) == 0)


async def _all(node):
    """Return all payloads, page by page."""
    found, since = [], None
    while True:
        body = {"startFrom": since, "inclusive": False} if since else {}
        answer = await node.call("POST", f"{TOPICS}/t/poll", json=body)
        page = json.loads(answer.content)
        found += [message["payload"] for message in page]
        if answer.headers["plainsong-end"] == "end":
            return found
        since = answer.headers["plainsong-last-id"]


def _is_stepping(node):
    return any(not entry.actor.is_idle for entry in node.service.directory)
