"""Large answers through an instance that does not own the topic: the same bytes, buffered only at the owner."""

from __future__ import annotations

import socket

import pytest
import trio
from in_process import TOPICS, cluster

from broker.http.sockets import split_bind
from broker.http.wire import PASSED_BYTES
from tests.waiting import until

POLL = f"{TOPICS}/t/poll"
MIB = 1 << 20


@pytest.fixture
async def nodes():
    async with cluster("a", "b") as running:
        running.move("ns:t", "b")
        await running["b"].create()
        yield running


def held(node):
    return node.service.answers.reserved_bytes


async def nothing_is_held(nodes):
    await until(lambda: not any(held(node) for node in nodes.values()))


@pytest.mark.parametrize("size", [10_000, 200_000, 3 * MIB])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_an_answer_is_the_same_through_any_instance(nodes, size, coding):
    await nodes["a"].publish("t", "x" * size, "y")
    here, there = [await nodes[name].call("POST", POLL, json={}, headers={"Accept-Encoding": coding}) for name in "ba"]
    assert there.content == here.content
    assert there.headers["plainsong-end"] == "end"
    if coding == "identity":
        assert there.headers["content-length"] == here.headers["content-length"] == str(len(here.content))
    await nothing_is_held(nodes)


async def test_a_poll_of_many_topics_returns_whole_pages(nodes):
    nodes.move("ns:u", "a")
    await nodes["a"].create("u")
    await nodes["a"].publish("u", "small")
    await nodes["a"].publish("t", "x" * 3 * MIB)
    answer = await nodes["a"].call("POST", "/v1/namespaces/ns/poll", json={"topics": {"t": {}, "u": {}}})
    found = {name: [len(each["payload"]) for each in one["messages"]] for name, one in answer.json()["topics"].items()}
    assert found == {"t": [3 * MIB], "u": [5]}
    await nothing_is_held(nodes)


async def test_a_reader_that_stops_is_held_up_by_the_owner_and_by_a_window_on_the_link(nodes):
    for _ in range(2):
        await nodes["b"].publish("t", "x" * 6 * MIB)
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(split_bind(nodes["a"].address))
    async with trio.SocketStream(sock) as reader:
        await reader.send_all(f"POST {POLL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n".encode())
        await reader.send_all(b"Content-Type: application/json\r\n\r\n{}")
        await until(lambda: 0 < held(nodes["a"]) <= PASSED_BYTES and 12 * MIB <= held(nodes["b"]) < 13 * MIB)
    await nothing_is_held(nodes)


async def test_the_owner_checks_an_if_match(nodes):
    etag = (await nodes["a"].call("GET", f"{TOPICS}/t")).headers["etag"]
    path = f"{TOPICS}/t/properties"
    await nodes["a"].call("PUT", path, json={"ttl": 61}, headers={"If-Match": etag})
    refused = {"status": 412, "code": "precondition_failed"}
    await nodes["a"].call("PUT", path, json={"ttl": 62}, headers={"If-Match": etag}, **refused)
