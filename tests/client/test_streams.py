"""Streams of publishes, from threads and event loops: order, receipts, bounds, and every way of ending."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha1

import anyio
import pytest

from plainsong import TEXT, AsyncClient, Outgoing
from plainsong.errors import Closed, ConnectFailed, NotSent
from plainsong.protocol.errors import (
    BadRequest,
    InvalidName,
    InvalidParameter,
    OutcomeUnknown,
    PlainsongError,
    TooLarge,
    TopicNotFound,
)
from plainsong.protocol.requests import PublishRequest, PublishResponse
from tests.client.client_under_test import Client, only_threads
from tests.client.conftest import url_of
from tests.client.proxy import Proxy
from tests.client.simulation import kind
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")

#: Enough to have many in progress at once.
COUNT = 2_000


def test_each_call_gets_its_own_receipt_in_the_order_of_the_calls(client: Client, topic: str):
    with client.stream(topic) as stream:
        tickets = [stream.publish(b"%d" % n) for n in range(COUNT)]
    ids = [ticket.result().first_id for ticket in tickets]
    found = [(message.id, message.payload) for message in client.read(topic)]
    assert found == [(each, b"%d" % n) for n, each in enumerate(ids)]


def test_a_stream_accepts_everything_that_publish_accepts(client: Client, topic: str):
    with client.topic(topic).stream(serializer=TEXT) as stream:
        many = stream.publish(["a", "b", Outgoing("c", ttl_s=60)], ttl_s=600)
        empty = stream.publish("")
    assert many.result().count == 3
    assert [message.payload for message in client.read(topic)] == [b"a", b"b", b"c", b""]
    assert many.result().first_id < many.result().last_id < empty.result().first_id


def test_a_request_that_cannot_be_written_is_refused_and_the_others_are_stored(client: Client, topic: str):
    with client.stream(topic) as stream:
        stream.publish(b"before")
        with pytest.raises(InvalidParameter, match="cannot be written"):
            stream.publish(Outgoing(b"bad", attributes={"file": "caf\udce9"}))
        for bad in (
            PublishRequest([b"bad"], attributes=[{"file": "caf\udce9"}]),
            PublishRequest([b"bad"], ttl_s=1 << 64),
            PublishRequest([b"bad"], routing_key=object()),
        ):
            with pytest.raises(InvalidParameter, match="cannot be written"):
                stream.send(bad)
        stream.publish(b"after")
    assert [message.payload for message in client.read(topic)] == [b"before", b"after"]


def test_requests_of_a_producer_are_deduplicated_over_a_stream(client: Client, topic: str):
    def again(stream):
        return [stream.send(PublishRequest([b"%d" % n], producer="p", sequence_ids=[n])) for n in range(10)]

    with client.stream(topic) as stream:
        first, second = again(stream), again(stream)
    assert [ticket.result().duplicate for ticket in first + second] == [False] * 10 + [True] * 10
    ids = [ticket.result().first_id for ticket in first]
    assert [ticket.result().first_id for ticket in second][-5:] == ids[-5:]  # the stream still has its last results
    assert len(list(client.read(topic))) == 10


def test_a_write_pointer_gets_its_publish_response(client: Client, topic: str):
    transaction = client.transactions.begin()
    with client.stream(topic) as stream:
        answer = stream.send(PublishRequest([b"x"], write_pointer=transaction.write_pointer)).result(PATIENCE_S)
    assert isinstance(answer, PublishResponse)
    assert answer.write_pointer == transaction.write_pointer
    client.transactions.abort(transaction)


def test_a_refused_request_says_why_and_the_others_are_stored(client: Client, topic: str):
    stream = client.stream(topic)
    good, bad, more = (
        stream.publish(b"a"),
        stream.send(PublishRequest([b"x"], generation=-1)),
        stream.publish(b"b"),
    )
    assert isinstance(bad.exception(PATIENCE_S), BadRequest)
    assert bad.exception().outcome == "not-applied"
    assert good.result(PATIENCE_S).first_id < more.result(PATIENCE_S).first_id
    stream.close()


def test_unretrieved_failures_are_reported_by_flush_and_close(client: Client):
    stream = client.stream("no-such-topic")
    stream.publish(b"a")
    with pytest.raises(NotSent):
        stream.flush()
    asked = stream.publish(b"b")
    assert isinstance(asked.exception(PATIENCE_S), TopicNotFound)
    stream.close()


def test_a_full_buffer_makes_publish_wait_and_never_grows(client: Client, topic: str):
    with client.stream(topic, max_pending_bytes=10_000) as stream:
        most = 0
        for n in range(COUNT):
            stream.publish(b"%d" % n)
            most = max(most, stream._queue.pending_bytes)
    assert most <= 10_000
    assert [int(message.payload) for message in client.read(topic)] == list(range(COUNT))


def test_threads_may_share_a_stream(client: Client, topic: str):
    with client.stream(topic) as stream:

        def send(which: int) -> None:
            for n in range(500):
                stream.publish(b"%d %d" % (which, n))

        threads = [threading.Thread(target=send, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [tuple(map(int, message.payload.split())) for message in client.read(topic)]
    for which in range(4):
        assert [n for each, n in found if each == which] == list(range(500))


def test_a_closed_stream_accepts_nothing(client: Client, topic: str):
    stream = client.stream(topic)
    stream.close()
    stream.close()
    with pytest.raises(Closed):
        stream.publish(b"x")


def test_closing_the_client_closes_its_streams(shared_url: str, topic: str):
    only_threads("streams of tasks end with their own blocks")
    with Client(shared_url) as client:
        ticket = client.stream(topic).publish(b"x")
    assert ticket.result(0).count == 1


def test_a_stream_that_cannot_be_opened_raises(shared_url: str):
    with Client("http://127.0.0.1:1") as client, pytest.raises(ConnectFailed):
        client.stream("t")
    with Client(shared_url) as client, pytest.raises(InvalidName):
        client.stream("no topic")


def test_a_stream_is_opened_at_the_first_daemon_that_answers(shared_url: str, topic: str):
    urls = ["http://127.0.0.1:1", shared_url]
    with Client(urls) as client, client.stream(topic) as stream:
        stream.publish(b"x").result(PATIENCE_S)

    async def main() -> None:
        async with AsyncClient(urls) as own, own.stream(topic) as stream:
            await (await stream.publish(b"y"))

    anyio.run(main)


def test_a_forked_child_cannot_use_a_stream_of_its_parent(client: Client, topic: str):
    only_threads("event loops do not fork")
    stream = client.stream(topic)
    stream.publish(b"before").result(PATIENCE_S)
    if not (child := os.fork()):  # pytest must not continue in the child
        try:
            stream.publish(b"child")
        except Closed:
            stream.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stream.publish(b"after").result(PATIENCE_S)
    stream.close()
    assert [message.payload for message in client.read(topic)] == [b"before", b"after"]


# --- the connection breaks ---------------------------------------------------------------------------


def test_a_cut_leaves_each_unanswered_request_unknown_and_ends_the_stream(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        stream = through.stream(topic)
        stream.publish(b"answered").result(PATIENCE_S)
        proxy.mode = "lose"
        lost = stream.publish(b"lost")
        with pytest.raises(OutcomeUnknown) as caught:
            lost.result(PATIENCE_S)
        assert caught.value.outcome == "unknown"
        with pytest.raises(Closed):
            stream.publish(b"more")
        stream.close()
    assert [message.payload for message in client.read(topic)] == [b"answered", b"lost"]


def test_an_answer_that_does_not_arrive_in_time_is_unknown(topic: str, shared_address: tuple[str, int]):
    with Proxy(shared_address) as proxy, Client(proxy.url, request_timeout_s=2) as through:
        stream = through.stream(topic)
        proxy.mode = "swallow"
        with pytest.raises(OutcomeUnknown):
            stream.publish(b"x").result(PATIENCE_S)
        stream.close()


@pytest.fixture
def deaf_url() -> Iterator[str]:
    """The URL of a daemon that accepts the handshake, pings a little later, and never reads."""
    with socket.socket() as listening, ExitStack() as taken:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            with suppress(OSError):
                connection = taken.enter_context(listening.accept()[0])
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(4096)
                key = re.search(rb"(?i)sec-websocket-key: *(\S+)", head).group(1)
                accepted = b64encode(sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
                lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
                named = re.search(rb"(?i)sec-websocket-protocol: *([^\r]+)", head)
                lines += [b"Sec-WebSocket-Accept: " + accepted]
                lines += [b"Sec-WebSocket-Protocol: " + named.group(1)] if named else []
                connection.sendall(b"\r\n".join([*lines, b"", b""]))

                def ping() -> None:
                    with suppress(OSError):  # the client may have closed the connection
                        connection.sendall(b"\x89\x00")

                pinging = threading.Timer(0.3, ping)
                pinging.start()
                pinging.join()

        serving = threading.Thread(target=serve)
        serving.start()
        yield "http://{}:{}".format(*listening.getsockname())
        serving.join()


def test_limits_hold_at_a_daemon_that_pings_and_reads_nothing(deaf_url: str):
    with Client(deaf_url, request_timeout_s=1) as client:
        stream = client.stream("t", max_pending_bytes=64 << 20)
        tickets: list = []
        with suppress(Closed):  # the limit may pass during the loop
            tickets.extend(stream.publish(b"x" * 15_000) for _ in range(1_400))  # too few bytes to extend the limit
        assert isinstance(tickets[0].exception(PATIENCE_S), OutcomeUnknown)
        with pytest.raises(NotSent):
            stream.close(1)


def test_closing_within_a_limit_does_not_wait_for_a_daemon_that_reads_nothing(deaf_url: str):
    with Client(deaf_url, request_timeout_s=1000) as client:
        stream = client.stream("t", max_pending_bytes=64 << 20)
        tickets = [stream.publish(b"x" * 1_000_000) for _ in range(20)]
        with pytest.raises(NotSent):
            stream.close(0.5)
        assert all(isinstance(ticket.exception(PATIENCE_S), OutcomeUnknown) for ticket in tickets)


def publish_until_closed(stream, tickets, form, after_each=lambda sent: None) -> None:
    """Publish consecutive numbers until the stream ends."""
    with suppress(Closed):
        while True:
            tickets.append(stream.publish(form % len(tickets)))
            after_each(len(tickets))


def test_a_stopping_daemon_answers_the_requests_that_it_accepted_and_the_rest_did_not_happen(
    daemon: Callable[..., Daemon],
):
    running = daemon()
    with Client(url_of(running)) as client:
        client.create_topic("t")
        stream = client.stream("t")
        tickets = [stream.publish(b"0")]
        tickets[0].result(PATIENCE_S)
        running.signal(signal.SIGTERM)
        publish_until_closed(stream, tickets, b"%d")
        assert running.wait() == 0
        stored = 0
        for ticket in tickets:
            error = ticket.exception(PATIENCE_S)
            stored += error is None
            assert error is None or error.outcome == "not-applied"
        with suppress(NotSent):  # the stream does not remember every failed ticket
            stream.close()
        running.start()
        with Client(url_of(running)) as again:
            assert [int(message.payload) for message in again.read("t")] == list(range(stored))


def test_acknowledged_requests_survive_sigkill_in_order(daemon: Callable[..., Daemon]):
    # In the synchronous client's adapter each publish switches threads twice.
    enough = 5_000 if kind().name == "sync" else 1_000
    running = daemon()
    with Client(url_of(running)) as client:
        client.create_topic("t")
    for turn in range(3):
        with Client(url_of(running)) as client:
            stream = client.stream("t")
            tickets = []
            publish_until_closed(stream, tickets, b"%d %%d" % turn, lambda sent: sent == enough and running.kill())
            outcomes = [ticket.exception(PATIENCE_S) for ticket in tickets]
            with suppress(NotSent):
                stream.close()
        promised = sum(error is None for error in outcomes)
        assert all(error is None for error in outcomes[:promised]), "answers come in order"
        assert all(error.outcome in ("unknown", "not-applied") for error in outcomes[promised:])
        running.start()
        with Client(url_of(running)) as client:
            found = [(message.id, message.payload.split()) for message in client.read("t")]
        mine = [(each, int(number)) for each, (which, number) in found if int(which) == turn]
        assert [n for _, n in mine] == list(range(len(mine))), "a prefix of what was sent, in order"
        assert len(mine) >= promised
        assert [tickets[n].result().first_id for n in range(promised)] == [each for each, _ in mine[:promised]]


# --- event loops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stream_works_on_an_event_loop(shared_url: str, client: Client, topic: str, backend: str):
    async def main() -> None:
        async with AsyncClient(shared_url) as own, own.stream(topic, max_pending_bytes=100_000) as stream:
            tickets = [await stream.publish(b"%d" % n) for n in range(COUNT)]
            bad = await stream.send(PublishRequest([b"x"], generation=-1))
            with pytest.raises(BadRequest):
                await bad
            assert (await tickets[0]).count == 1
            await stream.flush()
            assert all(ticket.done() for ticket in tickets)
            await stream.aclose()
            with pytest.raises(Closed):
                await stream.publish(b"x")

    anyio.run(main, backend=backend)
    assert [int(message.payload) for message in client.read(topic)] == list(range(COUNT))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cut_is_reported_on_an_event_loop(shared_address: tuple[str, int], topic: str, backend: str):
    async def main() -> None:
        async with AsyncClient(proxy.url) as own, own.stream(topic) as stream:
            await (await stream.publish(b"x"))
            proxy.mode = "lose"
            lost = await stream.publish(b"y")
            with pytest.raises(OutcomeUnknown):
                await lost
            with pytest.raises(Closed):
                await stream.publish(b"z")

    with Proxy(shared_address) as proxy:
        anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_block_left_by_an_error_leaves_the_stream_at_once(shared_url: str, topic: str, backend: str):
    async def main() -> None:
        async with AsyncClient(shared_url) as own:
            with suppress(ZeroDivisionError):
                async with own.stream(topic) as stream:
                    ticket = await stream.publish(b"x")
                    raise ZeroDivisionError
            with pytest.raises(PlainsongError):
                await ticket

    anyio.run(main, backend=backend)


def test_the_error_of_a_stream_says_why_its_requests_failed(client: Client, topic: str):
    with pytest.raises(NotSent, match=r"1 message not sent: .*nowhere") as caught, client.stream("nowhere") as stream:
        stream.publish(b"x")
    assert isinstance(caught.value.__cause__, TopicNotFound)
    assert (caught.value.unsent, caught.value.unknown) == (1, 0)
    with pytest.raises(NotSent) as caught, client.stream(topic) as stream:
        stream.publish(bytes(9 << 20))
    assert isinstance(caught.value.__cause__, TooLarge)
    assert str(caught.value).startswith("1 message not sent: ")
    assert caught.value.causes[0].detail in str(caught.value)


def test_a_request_whose_error_was_retrieved_is_not_reported_again(client: Client, topic: str):
    with client.stream("nowhere") as stream:
        assert isinstance(stream.publish(b"x").exception(PATIENCE_S), TopicNotFound)
