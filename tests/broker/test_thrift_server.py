"""The Thrift server and its connections: partial frames, errors that keep a connection open, limits, shutdown."""

import logging
import struct
import threading
import time

import pytest
import trio
import trio.testing
from tephra_thrift import TEPHRA, struct_bytes
from transaction_snapshots import decode_snapshot

from broker.config.config import config_of
from broker.http.budgets import BodyBudget
from broker.http.descriptors import Descriptors
from broker.http.reactor import open_reactor
from broker.thrift import FRAME_TIMEOUT_S, LOOP_BYTES, TephraMethods, serve_thrift
from broker.tls import load
from plainsong.protocol.errors import OutcomeUnknown, Overloaded, TransactionsUnavailable
from plainsong.protocol.tephra.rpc import (
    INTERNAL_ERROR,
    PROTOCOL_ERROR,
    UNKNOWN_METHOD,
    ApplicationError,
    Call,
    decode_call,
    decode_reply,
    encode_call,
    encode_result,
)
from plainsong.protocol.tephra.state import ManagerState, encode_snapshot
from plainsong.protocol.tephra.thrift import MAX_FRAME_BYTES, ThriftFrames, framed
from plainsong.protocol.transactions.asks import ServiceFigures
from tests.certificates import Authority

MAX_CONNECTIONS = 60
SETTINGS = config_of({}).http


class Service:
    """A stub of the transaction service: the code under test is the server in front of it."""

    def __init__(self):
        self.down = None
        self.key = b"key"
        self.pausing = trio.Event()
        self.go_on = trio.Event()

    def figures(self):
        if self.down:
            raise self.down
        return ServiceFigures(1, 7, 0, None)

    def state(self):
        if self.down:
            raise self.down
        return ManagerState(1, 2, 3, committed={4: (self.key,)})

    async def truncate(self, pointers):
        self.pausing.set()
        await self.go_on.wait()
        return len(pointers)

    async def reset(self):
        raise Overloaded("too much") if self.down is None else self.down

    prepare = None


class HeldMethods:
    """Starts every call without a task, and leaves the answer to the test."""

    def __init__(self):
        self.started = trio.Event()
        self.answered = None

    def start(self, message, answered):
        self.answered = answered
        self.started.set()
        return True

    def answer(self, message, remote=""):
        raise AssertionError("the call was left to the task")


class Client:
    """A connection that sends raw bytes and reads whole messages."""

    def __init__(self, stream):
        self.stream = stream
        self.frames = ThriftFrames()

    async def send(self, method, *args, sequence_id=1):
        await self.stream.send_all(framed(encode_call(method, sequence_id, *args)))

    async def message(self):
        """Return the next message; None if the server has closed the connection."""
        while (message := self.frames.take()) is None:
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self.frames.feed(data)
        return message

    async def call(self, method, *args, sequence_id=1):
        await self.send(method, *args, sequence_id=sequence_id)
        return decode_reply(await self.message(), method, sequence_id)


class Served:
    """A running server and connections to it."""

    def __init__(self, nursery):
        self.nursery = nursery
        self.service = Service()
        self.budget = BodyBudget(64 << 20)
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.clients = []

    async def start(self, methods=None, **more):
        async def serve(*, task_status):
            async with open_reactor(SETTINGS.keep_alive_s) as self.reactor:
                await serve_thrift(
                    "127.0.0.1:0",
                    methods or TephraMethods(self.service),
                    budget=self.budget,
                    stop=self.stop,
                    grace_s=5,
                    settings=SETTINGS,
                    reactor=self.reactor,
                    task_status=task_status,
                    **more,
                )
            self.ended.set()

        (self.address,) = await self.nursery.start(serve)
        return self

    async def connect(self):
        host, port = self.address.split(":")
        client = Client(await trio.open_tcp_stream(host, int(port)))
        self.clients.append(client)
        return client


@pytest.fixture
async def server(nursery):
    served = Served(nursery)
    yield await served.start(max_connections=MAX_CONNECTIONS)
    for client in served.clients:
        await client.stream.aclose()
    served.stop.set()
    await served.ended.wait()
    assert served.budget.reserved_bytes == 0


async def test_a_call_is_answered_with_its_sequence_id(server):
    client = await server.connect()
    for sequence_id in (1, 0, -1, 2**31 - 1):
        assert await client.call("status", sequence_id=sequence_id) == "OK"


async def test_a_frame_may_arrive_byte_by_byte(server):
    client = await server.connect()
    for byte in framed(encode_call("status", 5)):
        await client.stream.send_all(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
    assert decode_reply(await client.message(), "status", 5) == "OK"


async def test_calls_that_arrive_together_are_answered_in_order(server):
    client = await server.connect()
    await client.stream.send_all(b"".join(framed(encode_call("invalidTxSize", number)) for number in range(50)))
    for number in range(50):
        assert decode_reply(await client.message(), "invalidTxSize", number) == 7


async def test_other_tasks_run_between_calls_that_arrive_together(server, monkeypatch):
    turns, at = 0, []

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    def figures(self):
        at.append(turns)
        return ServiceFigures(1, 7, 0, None)

    monkeypatch.setattr(Service, "figures", figures)
    client = await server.connect()
    server.nursery.start_soon(others)
    await client.stream.send_all(b"".join(framed(encode_call("invalidTxSize", number)) for number in range(500)))
    for number in range(500):
        assert decode_reply(await client.message(), "invalidTxSize", number) == 7
    # Trio runs the tasks of a turn in random order, so the other task is sure to run only once in two calls.
    assert all(later > earlier for earlier, later in zip(at, at[2:], strict=False))


async def test_a_large_call_is_decoded_in_a_thread(server, monkeypatch):
    threads, loop = [], threading.get_ident()

    def decode(message):
        threads.append(threading.get_ident())
        return decode_call(message)

    monkeypatch.setattr("broker.thrift.decode_call", decode)
    server.service.go_on.set()
    client = await server.connect()
    assert await client.call("truncateInvalidTx", range(LOOP_BYTES // 8)) is True
    assert loop not in threads
    threads.clear()
    assert await client.call("truncateInvalidTx", (1,)) is True
    assert set(threads) == {loop}


async def test_a_snapshot_is_encoded_in_a_thread(server, monkeypatch):
    threads = []

    def encode(state):
        threads.append(threading.get_ident())
        return encode_snapshot(state)

    monkeypatch.setattr("broker.thrift.encode_snapshot", encode)
    client = await server.connect()
    assert decode_snapshot(await client.call("getSnapshot")) == server.service.state()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def failure(client, message, method, sequence_id=1):
    await client.stream.send_all(framed(message))
    with pytest.raises(ApplicationError) as caught:
        decode_reply(await client.message(), method, sequence_id)
    return caught.value


async def test_a_refusal_ends_no_connection(server):
    client = await server.connect()
    unknown = encode_call("status", 3).replace(b"status", b"statuz")
    error = await failure(client, unknown, "statuz", 3)
    assert (error.number, error.message) == (UNKNOWN_METHOD, "Invalid method name: 'statuz'")
    error = await failure(client, encode_call("invalidateTx", 1, None), "invalidateTx")
    assert error.number == PROTOCOL_ERROR
    assert await client.call("status") == "OK"


async def test_an_error_that_is_not_declared_is_an_internal_error(server, caplog):
    client = await server.connect()
    error = await failure(client, encode_call("resetState", 1), "resetState")
    assert (error.number, error.message) == (INTERNAL_ERROR, "Internal error processing resetState: too much")
    server.service.down = ZeroDivisionError("secret")
    error = await failure(client, encode_call("resetState", 1), "resetState")
    assert error.number == INTERNAL_ERROR
    assert "secret" not in error.message
    assert [record.message for record in caplog.records] == ["a method failed"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OutcomeUnknown("the disk failed"), "the disk failed; it is not known whether it happened"),
        (Overloaded("the mailbox is full"), "the mailbox is full; nothing happened"),
    ],
)
async def test_an_error_that_is_not_declared_says_whether_the_call_happened(error, text):
    class Failing(Service):
        async def ask(self, ask):
            del ask
            raise error

    answer = await TephraMethods(Failing()).answer(encode_call("commitOrThrow", 1, 7, 7))
    with pytest.raises(ApplicationError) as caught:
        decode_reply(answer, "commitOrThrow", 1)
    assert caught.value.message == f"Internal error processing commitOrThrow: {text}"


async def test_a_service_that_is_down_is_reported_as_down(server):
    client = await server.connect()
    server.service.down = TransactionsUnavailable("not loaded")
    assert await client.call("status") == "NOTOK"
    await client.send("getSnapshot")
    reply = await client.message()
    expected = TEPHRA.TTransactionServer.getSnapshot_result(e=TEPHRA.CouldNotTakeSnapshot("not loaded"))
    assert reply.endswith(struct_bytes(expected))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">i", MAX_FRAME_BYTES + 1),
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        framed(b"noise"),
        framed(encode_call("status", 1)[:-3]),
        framed(bytes.fromhex("8001000200000006737461747573 00000001 00")),
    ],
)
async def test_a_malformed_call_ends_its_own_connection_only(server, sent, caplog):
    other, client = await server.connect(), await server.connect()
    await client.stream.send_all(sent)
    assert await client.message() is None
    assert await other.call("status") == "OK"
    assert "sent an invalid call" in caplog.text


async def test_sixty_connections_stay_open_and_served(server, mock_clock):
    clients = [await server.connect() for _ in range(MAX_CONNECTIONS)]
    for _ in range(2):
        for client in clients:
            assert await client.call("status") == "OK"
        mock_clock.jump(30 * 86_400)


async def test_connections_over_the_bound_are_closed(server, caplog):
    clients = [await server.connect() for _ in range(MAX_CONNECTIONS)]
    for client in clients:
        assert await client.call("status") == "OK"
    over = await server.connect()
    assert await over.message() is None
    assert "refused" in caplog.text
    await clients[0].stream.send_eof()
    assert await clients[0].message() is None  # so the server has noticed that it ended
    assert await (await server.connect()).call("status") == "OK"


async def test_a_connection_with_one_of_the_last_descriptors_is_closed_in_one_line_and_readiness_says_it(
    nursery, monkeypatch, caplog
):
    descriptors = Descriptors()
    served = await Served(nursery).start(descriptors=descriptors)
    client = await served.connect()
    assert await client.call("status") == "OK"
    assert not descriptors.are_short
    monkeypatch.setattr(Descriptors, "has_room_for", lambda self, descriptor: False)
    for _ in range(5):
        assert await (await served.connect()).message() is None
    assert await client.call("status") == "OK"
    assert descriptors.are_short
    assert [each.message for each in caplog.records] == ["a Thrift connection was refused"]
    for each in served.clients:
        await each.stream.aclose()
    served.stop.set()
    await served.ended.wait()


async def test_connections_leave_descriptors_for_the_store(nursery, monkeypatch):
    monkeypatch.setattr(Descriptors, "allowed", 601)
    served = await Served(nursery).start()
    clients = [await served.connect() for _ in range(601 // 4)]
    for client in clients:
        assert await client.call("status") == "OK"
    assert await (await served.connect()).message() is None
    for client in served.clients:
        await client.stream.aclose()
    served.stop.set()
    await served.ended.wait()


async def test_a_flood_of_invalid_calls_is_one_line(server, caplog):
    for _ in range(20):
        client = await server.connect()
        await client.stream.send_all(framed(b"noise"))
        assert await client.message() is None
    assert [each.message for each in caplog.records] == ["a Thrift connection sent an invalid call"]


async def test_a_frame_that_does_not_arrive_in_time_ends_its_connection(server, mock_clock):
    client = await server.connect()
    assert await client.call("status") == "OK"
    await client.stream.send_all(framed(encode_call("status", 1))[:9])
    while not server.budget.reserved_bytes:
        await trio.testing.wait_all_tasks_blocked()
    await trio.testing.wait_all_tasks_blocked()  # the connection's task waits for the rest
    mock_clock.jump(FRAME_TIMEOUT_S + 1)
    assert await client.message() is None


async def test_a_client_that_stops_reading_is_cut_and_others_are_served(server, mock_clock):
    server.service.key = bytes(4 << 20)
    deaf, other = await server.connect(), await server.connect()
    for number in range(8):
        await deaf.send("getSnapshot", sequence_id=number)
    while not trio.lowlevel.current_statistics().io_statistics.tasks_waiting_write:
        await trio.testing.wait_all_tasks_blocked(0.01)  # an answer is being sent and is blocked
    assert await other.call("status") == "OK"
    mock_clock.jump(SETTINGS.send_timeout_s + 1)
    assert await other.call("status") == "OK"
    count = 0
    while await deaf.message() is not None:
        count += 1
    assert count < 8


async def test_frames_beyond_the_budget_end_their_connection(server, caplog):
    server.budget.max_bytes = 1 << 20
    client, other = await server.connect(), await server.connect()
    with pytest.raises(trio.BrokenResourceError):
        await client.stream.send_all(struct.pack(">i", 8 << 20) + bytes(8 << 20))
    assert await other.call("status") == "OK"
    assert "closed" in caplog.text


async def test_stopping_closes_idle_connections_and_answers_the_call_in_progress(server):
    idle, busy = await server.connect(), await server.connect()
    assert await idle.call("status") == "OK"
    await busy.send("truncateInvalidTx", (1, 2))
    await server.service.pausing.wait()
    server.stop.set()
    assert await idle.message() is None
    with pytest.raises(OSError, match="connect"):
        await server.connect()
    server.service.go_on.set()
    assert decode_reply(await busy.message(), "truncateInvalidTx", 1) is True
    await server.ended.wait()


async def test_stopping_waits_no_longer_than_the_grace(server, mock_clock):
    busy = await server.connect()
    await busy.send("truncateInvalidTx", (1, 2))
    await server.service.pausing.wait()
    server.stop.set()
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(6)
    await server.ended.wait()
    assert await busy.message() is None


async def test_a_client_that_leaves_before_the_answer_affects_no_other(server, caplog):
    leaving, other = await server.connect(), await server.connect()
    await leaving.send("truncateInvalidTx", (1, 2))
    await server.service.pausing.wait()
    leaving.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))
    await leaving.stream.aclose()
    server.service.go_on.set()
    assert await other.call("status") == "OK"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_an_address_in_use_is_an_error_and_leaves_nothing_open(server):
    with pytest.raises(OSError, match="in use"):
        await serve_thrift(
            server.address,
            TephraMethods(server.service),
            budget=server.budget,
            stop=trio.Event(),
            grace_s=1,
            settings=SETTINGS,
            reactor=server.reactor,
        )


async def test_under_tls_only_holders_of_a_certificate_call(nursery, tmp_path):
    authority = Authority(tmp_path)
    pair, mine = authority.issue("server"), authority.issue("client")
    values = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.file}
    settings = {f"tls.{name}": str(path) for name, path in values.items()} | {"tls.client_certificates": "required"}
    context = load(config_of(settings).tls, time.time()).server
    served = await Served(nursery).start(tls=lambda: context)
    host, port = served.address.split(":")
    answers = []
    for trusting in (authority.trusting(), authority.trusting(mine)):
        stream = await trio.open_tcp_stream(host, int(port))
        client = Client(trio.SSLStream(stream, trusting, server_hostname="127.0.0.1", https_compatible=True))
        try:
            answers.append(await client.call("status"))
        except (trio.BrokenResourceError, TypeError):
            answers.append(None)  # no message arrived
        await trio.aclose_forcefully(client.stream)
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await Client(stream).send("status")
        assert await Client(stream).message() is None
    assert answers == [None, "OK"]
    served.stop.set()
    await served.ended.wait()


@pytest.fixture
async def held(nursery):
    """A server whose calls the test answers, and a client with a call in progress."""
    methods = HeldMethods()
    served = await Served(nursery).start(methods)
    client = await served.connect()
    await client.send("startShort")
    await methods.started.wait()
    yield served, methods, client
    await client.stream.aclose()
    served.stop.set()
    await served.ended.wait()
    assert served.budget.reserved_bytes == 0


ANSWER = encode_result(Call("status", 1, ()), "OK")


async def test_a_call_without_a_task_is_answered_after_the_server_was_stopped(held):
    served, methods, client = held
    served.stop.set()
    await trio.testing.wait_all_tasks_blocked()
    methods.answered(ANSWER)
    assert await client.message() == ANSWER
    assert await client.message() is None
    await served.ended.wait()


async def test_the_next_call_waits_until_the_one_before_it_is_answered(held):
    _, methods, client = held
    answered, methods.started = methods.answered, trio.Event()
    await client.send("startShort")
    await trio.testing.wait_all_tasks_blocked()
    assert not methods.started.is_set()
    answered(ANSWER)
    assert await client.message() == ANSWER
    await methods.started.wait()
    methods.answered(ANSWER)
    assert await client.message() == ANSWER


async def test_the_answer_to_a_client_that_was_cut_off_is_dropped(held, mock_clock):
    served, methods, client = held
    served.stop.set()
    await trio.testing.wait_all_tasks_blocked()
    mock_clock.jump(6)
    await served.ended.wait()
    methods.answered(ANSWER)
    assert await client.message() is None


async def test_an_answer_that_the_client_does_not_read_is_sent_by_the_task(held):
    _, methods, client = held
    methods.answered(encode_result(Call("getSnapshot", 1, ()), bytes(8 << 20)))
    while not trio.lowlevel.current_statistics().io_statistics.tasks_waiting_write:
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(await client.message()) > 8 << 20
