"""Many clients, slow clients, clients that vanish, and every kind of overload."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import time
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
import trio

from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import Answer, Talk, ask, create, metric, poll_call, publish, publish_call, read_all
from tests.freezing import freeze, thaw
from tests.patience import PATIENCE_S

PARKED = 1000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _enough_open_files():
    """Raise the limit on open files: this process holds the client ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * PARKED)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def parked(running: Daemon, count: int) -> None:
    """Wait until exactly ``count`` polls are parked."""
    await trio.to_thread.run_sync(
        eventually, f"{count} are parked", lambda: metric(running.address, "plainsong_parked_polls") == count
    )


async def test_a_thousand_parked_polls_cost_nothing_and_wake_at_once(daemon):
    running = daemon(forked=False)
    create(running.address, "t")
    payloads: list[bytes] = []
    delays_s: list[float] = []
    begun = 0.0

    async def woken(talk: Talk) -> None:
        answer = await talk.answer()
        delays_s.append(time.monotonic() - begun)
        payloads.extend(payload for _, payload in answer.messages())

    async with AsyncExitStack() as stack:
        talks = [await stack.enter_async_context(await Talk.to(running.address)) for _ in range(PARKED)]
        for talk in talks:
            await talk.send(*poll_call("t", PollRequest(), "avro", wait_ms=60_000))
        await parked(running, PARKED)

        cpu_s, since_s = running.cpu_s(), time.monotonic()
        await trio.sleep(1)
        cpu_s = (running.cpu_s() - cpu_s) / (time.monotonic() - since_s)
        assert cpu_s < 0.25, f"{cpu_s} s of processor time in a second of waiting"

        begun = time.monotonic()
        async with trio.open_nursery() as nursery:
            for talk in talks:
                nursery.start_soon(woken, talk)
            async with await Talk.to(running.address) as publisher:
                assert (await publisher.ask(*publish_call("t", [b"wake up"]))).status == 200
    assert payloads == [b"wake up"] * PARKED
    delays_s.sort()
    print(f"parked: {cpu_s} s of CPU a second; first woken after {delays_s[0]:.3f} s, last after {delays_s[-1]:.3f} s")
    assert delays_s[-1] < 30  # the limit was a minute


async def test_clients_that_disconnect_free_their_resources(daemon):
    running = daemon()
    create(running.address, "t")
    sockets = await trio.to_thread.run_sync(settled_sockets, running)
    async with AsyncExitStack() as stack:
        for _ in range(200):
            talk = await stack.enter_async_context(await Talk.to(running.address))
            await talk.send(*poll_call("t", PollRequest(), wait_ms=60_000))
        await parked(running, 200)
        assert running.open_sockets() >= 200
    await parked(running, 0)
    await trio.to_thread.run_sync(eventually, "all are closed", lambda: running.open_sockets() <= sockets)


def settled_sockets(running: Daemon) -> int:
    """Return the number of the daemon's own sockets, once there are no connections and the number is stable."""
    counts = [running.open_sockets()]

    def same_for_a_while() -> bool:
        counts.append(running.open_sockets())
        return len(counts) > 5 and len(set(counts[-5:])) == 1

    eventually("the number of sockets is stable", same_for_a_while)
    return counts[-1]


#: Short, but longer than a busy machine ever delays a client that sends its whole request at once.
SLOW = ("http.header_timeout_s=4", "http.body_timeout_s=4", "http.send_timeout_s=4")


def is_cut(connection: socket.socket) -> bool:
    """Read until the other end closes, within the connection's time-out; return True if it closed."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_clients_that_send_slowly_or_never_read_are_cut_while_others_are_served(daemon):
    running = daemon(*SLOW)
    create(running.address, "t")
    create(running.address, "large")
    for _ in range(20):
        publish(running.address, "large", bytes(MIB))
    sockets = settled_sockets(running)
    head = b"POST /v1/namespaces/ring/topics/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: avro/binary\r\n"
    slow = {
        "half a head": head[:30],
        "half a body": head % b"t/publish" + b"Content-Length: 100\r\n\r\nabc",
        "never reads": head % b"large/poll" + b"Content-Length: 4\r\n\r\n\x04\x01\x02\x02",
    }
    with ExitStack() as stack:
        connections = {}
        for name, data in slow.items():
            connection = connections[name] = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(PATIENCE_S)
            connection.connect(running.address)
            connection.sendall(data)
        for number in range(50):
            publish(running.address, "t", b"%d" % number)
        eventually("all of them are cut", lambda: running.open_sockets() <= sockets)
        for name, connection in connections.items():
            assert is_cut(connection), name
    eventually("no body is held", lambda: metric(running.address, "plainsong_inflight_body_bytes") == 0)
    assert len(read_all(running.address, "t")) == 50


async def test_a_full_mailbox_asks_to_retry_and_refused_requests_never_happened(daemon):
    running = daemon("topic.mailbox_requests=1")
    create(running.address, "t")
    answers: dict[bytes, Answer] = {}

    async with AsyncExitStack() as stack:
        talks = [await stack.enter_async_context(await Talk.to(running.address)) for _ in range(100)]
        await trio.to_thread.run_sync(eventually, "all are accepted", lambda: running.open_sockets() > len(talks))
        freeze(running.pid)  # so that the daemon receives all of them at once
        for number, talk in enumerate(talks):
            await talk.send(*publish_call("t", [b"%d" % number]))
        thaw(running.pid)
        with trio.fail_after(PATIENCE_S):
            for number, talk in enumerate(talks):
                answers[b"%d" % number] = await talk.answer()
    taken = {message for message, answer in answers.items() if answer.status == 200}
    refused = [answer for answer in answers.values() if answer.status != 200]
    assert taken
    assert refused
    for answer in refused:
        assert (answer.status, answer.code, answer.json()["outcome"]) == (503, "overloaded", "not-applied")
        assert int(answer.headers["retry-after"]) > 0
    assert {payload for _, payload in read_all(running.address, "t")} == taken


def test_one_request_may_have_more_messages_than_one_millisecond_has_ids(daemon):
    running = daemon()
    create(running.address, "t")
    sent = [b"%d" % number for number in range(70_000)]
    receipt = publish(running.address, "t", *sent)
    there = read_all(running.address, "t")
    assert [payload for _, payload in there] == sent
    ids = [message_id for message_id, _ in there]
    assert ids == sorted(set(ids))
    assert (receipt.first_id, receipt.last_id) == (ids[0], ids[-1])
    running.kill()
    running.start()
    assert read_all(running.address, "t") == there
    assert publish(running.address, "t", b"next").first_id > ids[-1]


def memory_peak_bytes(running: Daemon) -> int:
    (line,) = [line for line in Path(f"/proc/{running.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


async def test_a_body_over_the_bound_is_refused_before_it_is_sent_or_held(daemon):
    running = daemon()
    create(running.address, "t")
    peak_bytes = memory_peak_bytes(running)
    head = (
        b"POST /v1/namespaces/ring/topics/t/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    with trio.fail_after(PATIENCE_S):
        for _ in range(5):
            async with await Talk.to(running.address) as talk:
                await talk.send_raw(head + b"Content-Length: %d\r\n\r\n" % (64 * MIB + 1))
                answer = await talk.answer()
                assert (answer.status, answer.code, answer.json()["outcome"]) == (413, "body_too_large", "not-applied")
    assert memory_peak_bytes(running) - peak_bytes < 16 * MIB
    assert ask(running.address, *publish_call("t", [b"x"])).status == 200


@pytest.mark.skipif(
    shutil.which("prlimit") is None, reason="NOT TESTED: few open files, since prlimit is not installed"
)
def test_connections_over_the_descriptor_limit_are_refused_and_reported(daemon):
    running = daemon(wrapper=["prlimit", "--nofile=128:128"])
    create(running.address, "t")
    publish(running.address, "t", b"before")
    with ExitStack() as stack:
        first = stack.enter_context(closing(HTTPConnection(*running.address, timeout=PATIENCE_S)))
        first.connect()
        for _ in range(100):  # the kernel accepts all of them
            stack.enter_context(socket.create_connection(running.address))
        running.wait_for_line("cannot accept connections at the moment")
        said = b""
        while b"file descriptors" not in said:  # if the machine stalls for seconds, the refusals are no longer recent
            stack.enter_context(socket.create_connection(running.address))
            # The first of these requests loads most of the server's code, file by file.
            first.request("GET", "/readyz")
            said = first.getresponse().read()
        assert json.loads(said)["reasons"][0]["code"] == "overloaded"

    def is_published():
        with suppress(ConnectionError):  # the daemon may not have noticed yet that the others disconnected
            return ask(running.address, *publish_call("t", [b"after"])).status == 200
        return False

    eventually("there is room", is_published)
    assert [payload for _, payload in read_all(running.address, "t")] == [b"before", b"after"]
    assert len([line for line in running.lines if "cannot accept connections at the moment" in line]) == 1
