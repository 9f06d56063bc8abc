"""Tephra's clients with the daemon's own transaction service: a Thrift library's client over a real socket."""

from contextlib import asynccontextmanager

import pytest
import trio
from tephra_thrift import TEPHRA, struct_bytes, struct_of
from thriftpy2.protocol import TCyBinaryProtocolFactory
from thriftpy2.rpc import make_client
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TCyFramedTransportFactory
from transaction_snapshots import decode_snapshot

from actors.pointers import PointerIndex
from actors.tephra import ForeignTephra
from actors.transactions import TransactionService
from broker.config.config import config_of
from broker.http.budgets import BodyBudget
from broker.http.reactor import open_reactor
from broker.thrift import TephraMethods, serve_thrift
from plainsong.protocol.tephra.rpc import ILLEGAL_ARGUMENT, INTERNAL_ERROR, TOO_LARGE, decode_reply, encode_call
from plainsong.protocol.tephra.state import EntryType, decode_transaction
from plainsong.protocol.tephra.thrift import ThriftFrames, framed
from plainsong.protocol.transactions.ledger import TransactionSettings
from plainsong.protocol.transactions.transaction import Transaction, TransactionType
from plainsong.protocol.transactions.view import Verdict, View
from storage.memory import MemoryStore

START_MS = 1_700_000_000_000
SETTINGS = TransactionSettings(max_change_set_bytes=1000)


class SetClock:
    regressions = 0

    def __init__(self):
        self.ms = START_MS

    def now_ms(self):
        return self.ms


class Tephra:
    """A Thrift library's client, run in threads; takes and returns our transactions."""

    def __init__(self, address):
        host, port = address.split(":")
        self.client = make_client(
            TEPHRA.TTransactionServer,
            host,
            int(port),
            proto_factory=TCyBinaryProtocolFactory(),
            trans_factory=TCyFramedTransportFactory(),
            timeout=20_000,
        )

    async def call(self, method, *args):
        given = [struct_of(arg) if isinstance(arg, Transaction) else arg for arg in args]
        found = await trio.to_thread.run_sync(getattr(self.client, method), *given)
        if isinstance(found, TEPHRA.TBoolean):
            return found.value
        return decode_transaction(struct_bytes(found)) if isinstance(found, TEPHRA.TTransaction) else found


class Harness:
    """A transaction service, its Thrift server, and clients."""

    def __init__(self):
        self.clock = SetClock()
        self.stop = trio.Event()
        self.clients = []

    async def start(self, nursery):
        async def no_topic(name, ask):
            raise AssertionError(f"{name} was asked {ask}")

        self.service = TransactionService(MemoryStore(), self.clock, PointerIndex(), no_topic, SETTINGS)
        loaded = trio.Event()
        nursery.start_soon(self.service.run, loaded.set)
        await loaded.wait()

        async def serve(*, task_status):
            async with open_reactor(1000.0) as reactor:
                await serve_thrift(
                    "127.0.0.1:0",
                    TephraMethods(self.service),
                    budget=BodyBudget(1 << 20),
                    stop=self.stop,
                    grace_s=5,
                    settings=config_of({}).http,
                    reactor=reactor,
                    task_status=task_status,
                )

        (self.address,) = await nursery.start(serve)

    async def client(self):
        client = await trio.to_thread.run_sync(Tephra, self.address)
        self.clients.append(client)
        return client


@asynccontextmanager
async def running():
    harness = Harness()
    async with trio.open_nursery() as nursery:
        await harness.start(nursery)
        yield harness
        for client in harness.clients:
            client.client.close()
        harness.stop.set()
        harness.service.close()


@pytest.fixture
async def harness():
    async with running() as harness:
        yield harness


@pytest.fixture
async def tephra(harness):
    return await harness.client()


async def committed(tephra, *changes):
    tx = await tephra.call("startShortClientId", "first")
    await tephra.call("canCommitOrThrow", tx.transaction_id, list(changes))
    await tephra.call("commitOrThrow", tx.transaction_id, tx.write_pointer)
    return tx


async def test_a_transaction_is_hidden_until_it_is_committed(tephra):
    first = await tephra.call("startShort")
    assert first.write_pointer == first.transaction_id
    assert first.type is TransactionType.SHORT
    second = await tephra.call("startShort")
    assert second.in_progress == (first.transaction_id,)
    assert second.first_short_in_progress == first.transaction_id
    await tephra.call("canCommitOrThrow", first.transaction_id, [])
    await tephra.call("commitOrThrow", first.transaction_id, first.write_pointer)
    third = await tephra.call("startShort")
    assert View.of(second).verdict(first.write_pointer) is Verdict.HOLD
    assert View.of(third).verdict(first.write_pointer) is Verdict.DELIVER


@pytest.mark.parametrize(
    ("method", "args", "type", "client", "seconds"),
    [
        ("startShort", (), TransactionType.SHORT, "unknown", 30),
        ("startShortClientId", ("me",), TransactionType.SHORT, "me", 30),
        ("startShortTimeout", (7,), TransactionType.SHORT, "unknown", 7),
        ("startShortWithTimeout", (7,), TransactionType.SHORT, "unknown", 7),
        ("startShortWithClientIdAndTimeOut", ("me", 7), TransactionType.SHORT, "me", 7),
        ("startLong", (), TransactionType.LONG, "unknown", 86_400),
        ("startLongClientId", ("me",), TransactionType.LONG, "me", 86_400),
    ],
)
async def test_old_and_new_clients_begin_transactions(harness, tephra, method, args, type, client, seconds):  # noqa: A002
    tx = await tephra.call(method, *args)
    assert tx.type is type
    status = await harness.service.look(tx.transaction_id)
    assert (status.client_id, status.expires_ms) == (client, START_MS + seconds * 1000)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("startShortWithTimeout", (0,)),
        ("startShortWithTimeout", (-1,)),
        ("startShortWithClientIdAndTimeOut", ("me", 2**31 - 1)),
        ("startShortClientId", (None,)),
        ("startLongClientId", (None,)),
    ],
)
async def test_a_wrong_argument_has_the_java_name_that_clients_rethrow(tephra, method, args):
    with pytest.raises(TEPHRA.Generic) as caught:
        await tephra.call(method, *args)
    assert caught.value.originalExceptionClass == ILLEGAL_ARGUMENT


async def test_a_wrong_argument_of_the_oldest_clients_is_an_internal_error(tephra):
    with pytest.raises(TApplicationException) as caught:
        await tephra.call("startShortTimeout", 0)
    assert caught.value.type == INTERNAL_ERROR


async def test_an_unknown_method_is_reported_with_its_number(tephra):
    with pytest.raises(TApplicationException) as caught:
        await tephra.call("unknownToTephra")
    assert caught.value.type == TApplicationException.UNKNOWN_METHOD
    assert await tephra.call("status") == "OK"


async def test_a_conflict_names_transaction_key_and_the_other_client(tephra):
    tx = await tephra.call("startShortClientId", "second")
    await committed(tephra, b"a", b"k\xff", b"")
    with pytest.raises(TEPHRA.Conflict) as caught:
        await tephra.call("canCommitOrThrow", tx.transaction_id, [b"x", b"k\xff"])
    conflict = caught.value
    assert (conflict.transactionId, conflict.conflictingKey) == (tx.transaction_id, "k\\xFF")
    assert conflict.conflictingClient == "first"
    assert await tephra.call("canCommitTx", tx, [b"k\xff"]) is False
    assert await tephra.call("canCommitTx", tx, [b"x"]) is True
    assert await tephra.call("commitTx", tx) is True


async def test_a_conflict_at_commit_is_an_error_and_false_to_older_clients(tephra):
    one, two = [await tephra.call("startShort") for _ in range(2)]
    await tephra.call("canCommitOrThrow", one.transaction_id, [b"k"])
    await tephra.call("canCommitOrThrow", two.transaction_id, [b"k"])
    await committed(tephra, b"k")
    with pytest.raises(TEPHRA.Conflict):
        await tephra.call("commitOrThrow", one.transaction_id, one.write_pointer)
    assert await tephra.call("commitTx", two) is False


async def test_a_change_set_over_the_bound_has_the_java_name_that_clients_rethrow(tephra):
    tx = await tephra.call("startShort")
    with pytest.raises(TEPHRA.Generic) as caught:
        await tephra.call("canCommitOrThrow", tx.transaction_id, [bytes(1001)])
    assert caught.value.originalExceptionClass == TOO_LARGE
    assert await tephra.call("canCommitTx", tx, [bytes(1001)]) is False


async def test_a_transaction_that_is_not_in_progress_is_reported_as_such(tephra):
    unknown = Transaction(1, 999, 999)
    for method, args in (
        ("canCommitTx", (unknown, [])),
        ("canCommitOrThrow", (999, [])),
        ("commitTx", (unknown,)),
        ("commitOrThrow", (999, 999)),
        ("checkpoint", (unknown,)),
    ):
        with pytest.raises(TEPHRA.NotInProgress):
            await tephra.call(method, *args)
    assert await tephra.call("invalidateTx", 999) is False
    await tephra.call("abortTx", unknown)


async def test_a_commit_whose_answer_was_lost_can_be_repeated(tephra):
    tx = await committed(tephra, b"k")
    await tephra.call("commitOrThrow", tx.transaction_id, tx.write_pointer)
    assert await tephra.call("commitTx", tx) is True


async def test_a_committed_transaction_is_never_reported_as_aborted(tephra):
    tx = await committed(tephra, b"k")
    with pytest.raises(TApplicationException) as caught:
        await tephra.call("abortTx", tx)
    assert caught.value.type == INTERNAL_ERROR
    assert await tephra.call("invalidateTx", tx.transaction_id) is False


async def test_a_write_pointer_from_the_wire_moves_no_read_pointer(tephra):
    tx = await tephra.call("startShort")
    await tephra.call("commitOrThrow", tx.transaction_id, 2**62)
    await tephra.call("abortTx", Transaction(1, 2**62, 2**62))
    assert (await tephra.call("startShort")).read_pointer < 2**62


async def test_checkpoints_give_new_write_pointers_to_the_same_transaction(tephra):
    tx = await tephra.call("startShort")
    once = await tephra.call("checkpoint", tx)
    twice = await tephra.call("checkpoint", once)
    assert (twice.transaction_id, twice.read_pointer) == (tx.transaction_id, tx.read_pointer)
    assert twice.checkpoint_write_pointers == (once.write_pointer, twice.write_pointer)
    other = await tephra.call("startShort")
    assert set(twice.pointers) <= set(other.in_progress)
    assert await tephra.call("commitTx", twice) is True
    view = View.of(await tephra.call("startShort"))
    assert {view.verdict(pointer) for pointer in twice.pointers} == {Verdict.DELIVER}


async def test_a_late_abort_heals_a_transaction_that_timed_out_and_its_checkpoints(tephra, mock_clock):
    tx = await tephra.call("checkpoint", await tephra.call("startShort"))
    mock_clock.jump(31)
    with pytest.raises(TEPHRA.NotInProgress):
        await tephra.call("commitOrThrow", tx.transaction_id, tx.write_pointer)
    assert await tephra.call("invalidTxSize") == 2
    await tephra.call("abortTx", tx)
    assert await tephra.call("invalidTxSize") == 0


async def test_the_invalid_list_is_kept_and_truncated(harness, tephra):
    tx = await tephra.call("startLong")
    await tephra.call("abortTx", tx)
    assert await tephra.call("invalidTxSize") == 1
    other = await tephra.call("startShort")
    assert other.invalids == (tx.transaction_id,)
    assert await tephra.call("invalidateTx", other.transaction_id) is True
    assert await tephra.call("invalidateTx", other.transaction_id) is False
    assert await tephra.call("truncateInvalidTx", [tx.transaction_id]) is True
    assert await tephra.call("truncateInvalidTx", [tx.transaction_id]) is False
    harness.clock.ms += 1000
    last = await tephra.call("startShort")
    with pytest.raises(TEPHRA.InvalidTruncateTime):
        await tephra.call("truncateInvalidTxBefore", harness.clock.ms + 1)
    assert await tephra.call("truncateInvalidTxBefore", harness.clock.ms) is True
    assert await tephra.call("truncateInvalidTxBefore", harness.clock.ms) is False
    assert (await tephra.call("startShort")).in_progress == (last.transaction_id,)


async def test_the_snapshot_is_the_whole_state(tephra):
    gone = await committed(tephra, b"k")
    long = await tephra.call("startLong")
    await tephra.call("canCommitOrThrow", long.transaction_id, [b"l"])
    short = await tephra.call("checkpoint", await tephra.call("startShort"))
    invalid = await tephra.call("startShort")
    await tephra.call("invalidateTx", invalid.transaction_id)
    state = decode_snapshot(await tephra.call("getSnapshot"))
    assert state.timestamp_ms == START_MS
    assert state.read_pointer >= gone.write_pointer
    assert state.last_write_pointer >= invalid.transaction_id
    assert state.invalids == (invalid.transaction_id,)
    assert {pointer: entry.type for pointer, entry in state.in_progress.items()} == {
        long.transaction_id: EntryType.LONG,
        short.transaction_id: EntryType.SHORT,
        short.write_pointer: EntryType.CHECKPOINT,
    }
    assert state.in_progress[short.transaction_id].checkpoints == (short.write_pointer,)
    assert state.committing == {long.transaction_id: (b"l",)}


async def test_a_reset_forgets_everything_except_issued_ids(tephra):
    tx = await tephra.call("startShort")
    await tephra.call("invalidateTx", (await tephra.call("startLong")).transaction_id)
    await tephra.call("resetState")
    assert await tephra.call("invalidTxSize") == 0
    fresh = await tephra.call("startShort")
    assert (fresh.in_progress, fresh.invalids) == ((), ())
    assert fresh.transaction_id > tx.transaction_id
    await tephra.call("pruneNow")


async def test_many_clients_share_one_service(harness):
    clients = [await harness.client() for _ in range(20)]
    found = []

    async def some(client):
        for _ in range(5):
            tx = await client.call("startShort")
            found.append(tx.transaction_id)
            await client.call("commitOrThrow", tx.transaction_id, tx.write_pointer)

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(some, client)
    assert len(set(found)) == 100
    assert (await clients[0].call("startShort")).in_progress == ()


async def test_one_daemon_uses_the_transactions_of_another(harness, tephra):
    host, port = harness.address.split(":")
    pointers = PointerIndex()
    other = ForeignTephra(host, int(port), SetClock(), pointers, MemoryStore(), refresh_s=5, max_lifetime_ms=0)
    done = await committed(tephra, b"k")
    doing, undone = [await tephra.call("startShort") for _ in range(2)]
    await tephra.call("invalidateTx", undone.transaction_id)
    await other.refresh()
    standings = [other.standing(tx.transaction_id) for tx in (done, doing, undone)]
    assert standings == ["committed", "in_progress", "invalid"]
    assert other.invalids() == harness.service.invalids()
    ours, theirs = other.view(), harness.service.view()
    for pointer in (done.transaction_id, doing.transaction_id, undone.transaction_id, undone.transaction_id + 1):
        assert ours.verdict(pointer) is theirs.verdict(pointer)
    await other._client.aclose()


class Raw:
    """A connection that sends calls without waiting for their answers."""

    def __init__(self, stream):
        self.stream = stream
        self.frames = ThriftFrames()

    async def send(self, *calls):
        messages = [framed(encode_call(method, number, *args)) for number, (method, *args) in enumerate(calls)]
        await self.stream.send_all(b"".join(messages))

    async def answer(self, method, number=0):
        while (message := self.frames.take()) is None:
            self.frames.feed(await self.stream.receive_some())
        return decode_reply(message, method, number)


async def raw(harness):
    host, port = harness.address.split(":")
    return Raw(await trio.open_tcp_stream(host, int(port)))


async def test_a_whole_transaction_is_answered_without_the_task_of_its_connection(harness, tephra, monkeypatch):
    async def in_task(self, message, remote=""):
        raise AssertionError(f"{message} was left to the task")

    monkeypatch.setattr(TephraMethods, "answer", in_task)
    tx = await committed(tephra, b"key")
    assert (await harness.service.look(tx.transaction_id)).state == "committed"


async def test_calls_sent_together_are_answered_one_after_the_other(harness):
    client = await raw(harness)
    await client.send(("startShort",), ("status",), ("startShort",), ("invalidTxSize",), ("startLong",))
    first = await client.answer("startShort", 0)
    assert await client.answer("status", 1) == "OK"
    second = await client.answer("startShort", 2)
    assert await client.answer("invalidTxSize", 3) == 0
    third = await client.answer("startLong", 4)
    assert second.in_progress == (first.transaction_id,)
    assert third.in_progress == (first.transaction_id, second.transaction_id)
    await client.stream.aclose()


async def test_a_call_of_a_half_closed_client_is_answered(harness):
    client = await raw(harness)
    await client.send(("startShort",))
    await client.stream.send_eof()
    begun = await client.answer("startShort")
    assert (await harness.service.look(begun.transaction_id)).state == "in_progress"
    assert await client.stream.receive_some() == b""
    await client.stream.aclose()
