"""A Tephra service as the authority: its state as seen by topics and readers, and its misbehaviour."""

import struct
from functools import partial

import pytest
import trio
import trio.testing
from actors_in_process import NAME, SetClock

from actors.pointers import PointerIndex
from actors.tephra import STALE_AFTER, ForeignTephra, TephraClient
from plainsong.protocol.errors import MalformedTransaction, TransactionsUnavailable
from plainsong.protocol.tephra.rpc import (
    TephraCouldNotTakeSnapshot,
    decode_call,
    encode_call,
    encode_error,
    encode_failure,
    encode_result,
)
from plainsong.protocol.tephra.state import Entry, ManagerState, encode_snapshot
from plainsong.protocol.tephra.thrift import ThriftFrames, framed
from plainsong.protocol.transactions.view import Verdict
from storage.memory import MemoryStore
from tests.patience import PATIENCE_S

#: Long enough for the last state to stay fresh, however long a test takes.
REFRESH_S = 60.0
#: Time limit for an answer, which arrives through a real socket and must not be too late on a busy machine.
CALL_S = PATIENCE_S
STATE = ManagerState(4000, 300, 310, (50, 120), {100: Entry(5000, 99), 310: Entry(6000, 99)})


class Tephra:
    """A server with scripted answers to getSnapshot, which counts connections and calls."""

    def __init__(self):
        self.behave = self.serve(encode_snapshot(STATE))
        self.connections = 0
        self.calls = 0
        self.called = trio.Event()

    @staticmethod
    def serve(snapshot):
        return lambda call: framed(encode_result(call, snapshot))

    async def run(self, *, task_status):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, self.connection, 0, host="127.0.0.1"))
            self.port = listeners[0].socket.getsockname()[1]
            task_status.started(self)

    async def connection(self, stream):
        self.connections += 1
        frames = ThriftFrames()
        async for data in stream:
            frames.feed(data)
            while (message := frames.take()) is not None:
                self.calls += 1
                self.called.set()
                answer = self.behave(decode_call(message))
                if answer is None:
                    return
                await stream.send_all(answer)


@pytest.fixture
async def tephra(nursery):
    return await nursery.start(Tephra().run)


@pytest.fixture
def pointers():
    return PointerIndex()


@pytest.fixture
async def foreign(tephra, pointers):
    foreign = ForeignTephra(
        "127.0.0.1",
        tephra.port,
        SetClock(),
        pointers,
        MemoryStore(),
        refresh_s=REFRESH_S,
        max_lifetime_ms=7,
        call_timeout_s=CALL_S,
    )
    yield foreign
    await foreign._client.aclose()


async def test_nothing_is_known_before_the_first_answer(foreign):
    assert foreign.standing(100) == "unknown"
    assert foreign.age_s is None
    with pytest.raises(TransactionsUnavailable, match="never"):
        foreign.view()


async def test_pointer_states_follow_the_polled_state(foreign):
    await foreign.refresh()
    standings = {pointer: foreign.standing(pointer) for pointer in (50, 99, 100, 120, 300, 301, 310, 311)}
    assert standings == {
        50: "invalid",
        99: "committed",
        100: "in_progress",
        120: "invalid",
        300: "committed",
        301: "unknown",
        310: "in_progress",
        311: "unknown",
    }
    assert 0 <= foreign.age_s < PATIENCE_S


async def test_committed_readers_see_the_transactions_that_the_state_calls_decided(foreign):
    await foreign.refresh()
    view = foreign.view()
    assert [view.verdict(pointer) for pointer in (50, 99, 100, 300, 301)] == [
        Verdict.SKIP,
        Verdict.DELIVER,
        Verdict.HOLD,
        Verdict.DELIVER,
        Verdict.HOLD,
    ]


async def test_a_stale_state_refuses_committed_readers_and_accepts_publishers(foreign, mock_clock):
    await foreign.refresh()
    mock_clock.jump(STALE_AFTER * REFRESH_S)
    foreign.view()
    mock_clock.jump(0.01)
    for ask in (foreign.view, foreign.invalids, foreign.prune_bound, foreign.begin_pass):
        with pytest.raises(TransactionsUnavailable, match="last received"):
            ask()
    assert foreign.standing(50) == "invalid"


async def test_the_invalid_list_and_its_bound_reach_the_janitor_and_the_operator(foreign, pointers):
    pointers.begin(NAME, [120, 50, 200])
    await foreign.refresh()
    passed = foreign.begin_pass()
    assert (passed.invalids, passed.bound) == ((50, 120), 99)
    assert foreign.pruning().safe_bound is None
    assert await foreign.complete(passed) == 0
    figures = foreign.pruning()
    assert (figures.invalid, figures.oldest_invalid, figures.safe_bound) == (2, 50, 99)
    assert figures.last_pass_ms == passed.begun_ms
    assert figures.oldest_by_topic == {NAME: 50}
    assert figures.max_lifetime_ms == 7
    assert foreign.address in figures.kept_because


async def test_topics_and_held_readers_get_the_outcome_of_their_pointers(foreign, tephra, pointers):
    pointers.begin(NAME, [100, 120, 310, 200])
    pointers.end([100, 120, 310])  # 200 is being written
    await foreign.refresh()
    assert pointers.take_decided(NAME) == []
    async with trio.open_nursery() as waiting:
        for pointer in (100, 310):
            waiting.start_soon(pointers.wait, pointer)
        await trio.testing.wait_all_tasks_blocked()
        # 100 was committed, and 310 timed out.
        tephra.behave = tephra.serve(encode_snapshot(ManagerState(4001, 300, 310, (50, 120, 310))))
        await foreign.refresh()
    assert pointers.take_decided(NAME) == [100]
    pointers.end([200])
    await foreign.refresh()
    assert pointers.take_decided(NAME) == [200]
    assert set(pointers.undecided()) == {120, 310}


async def test_the_state_is_polled_over_one_connection(foreign, tephra, nursery):
    foreign._refresh_s = 0.01
    nursery.start_soon(foreign.run)
    await foreign.loaded()
    for _ in range(3):
        tephra.called = trio.Event()
        await tephra.called.wait()
    assert tephra.connections == 1
    nursery.cancel_scope.cancel()


def close(call):
    return None


def another_id(call):
    return framed(encode_result(call._replace(sequence_id=call.sequence_id + 1), encode_snapshot(STATE)))


RUBBISH = {
    "closes the connection": close,
    "answers another call": another_id,
    "speaks HTTP": lambda call: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a frame without end": lambda call: struct.pack(">i", 2**31 - 1),
    "a negative frame": lambda call: struct.pack(">i", -5),
    "noise in a frame": lambda call: framed(b"\x00" * 50),
    "half a reply": lambda call: framed(encode_result(call, encode_snapshot(STATE))[:-9]),
    "a call": lambda call: framed(encode_call("getSnapshot", call.sequence_id)),
    "void": lambda call: framed(encode_result(call._replace(method="pruneNow"), None)),
    "an error": lambda call: framed(encode_error(call, TephraCouldNotTakeSnapshot("disk"))),
    "a failure": lambda call: framed(encode_failure(call, 6, "oops")),
    "another snapshot": lambda call: framed(encode_result(call, b"\x0a" + bytes(20))),
    "half a snapshot": lambda call: framed(encode_result(call, encode_snapshot(STATE)[:9])),
}


@pytest.mark.parametrize("kind", RUBBISH)
async def test_a_malformed_answer_is_refused_and_the_next_one_accepted(foreign, tephra, kind):
    tephra.behave = RUBBISH[kind]
    with pytest.raises((TransactionsUnavailable, MalformedTransaction)) as caught:
        await foreign.refresh()
    assert caught.value.hint
    assert foreign.age_s is None
    tephra.behave = tephra.serve(encode_snapshot(STATE))
    await foreign.refresh()
    assert foreign.standing(50) == "invalid"


async def test_a_tephra_that_hangs_is_abandoned_after_the_deadline(foreign, tephra, mock_clock):
    tephra.behave = lambda call: b""
    async with trio.open_nursery() as asking:
        asking.start_soon(refused, foreign)
        await tephra.called.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(CALL_S)
    tephra.behave = tephra.serve(encode_snapshot(STATE))
    await foreign.refresh()
    assert tephra.connections == 2


async def refused(foreign):
    with pytest.raises(TransactionsUnavailable, match=f"within {CALL_S:g} s"):
        await foreign.refresh()


async def test_an_unreachable_tephra_is_logged_and_polled_less_often(nursery, caplog, autojump_clock):
    with trio.socket.socket() as unused:
        await unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        foreign = ForeignTephra(
            "127.0.0.1", port, SetClock(), PointerIndex(), MemoryStore(), refresh_s=5, max_lifetime_ms=0
        )
        asked = []
        foreign._client.call = partial(refuse, asked)
        nursery.start_soon(foreign.run)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert [round(at - asked[0]) for at in asked] == [0, 5, 15, 35, 65, 95]
    assert [record.message for record in caplog.records] == ["the Tephra does not answer"]


async def refuse(asked, method):
    asked.append(trio.current_time())
    raise TransactionsUnavailable("not there")


async def test_an_address_without_a_listener_is_refused_with_a_hint():
    with trio.socket.socket() as unused:
        await unused.bind(("127.0.0.1", 0))
        client = TephraClient("127.0.0.1", unused.getsockname()[1], timeout_s=CALL_S)
        with pytest.raises(TransactionsUnavailable) as caught:
            await client.call("getSnapshot")
    assert "transactions.tephra" in caught.value.hint
    assert client.address in caught.value.detail


async def test_a_large_state_is_decoded_off_the_event_loop(foreign, tephra):
    invalids = tuple(range(10**18, 10**18 + 30_000))
    tephra.behave = tephra.serve(encode_snapshot(ManagerState(4000, 10**18 + 10**6, 10**18 + 10**6, invalids)))
    await foreign.refresh()
    assert foreign.invalids() == invalids


async def test_an_oversized_reply_is_refused_by_its_head(tephra):
    client = TephraClient("127.0.0.1", tephra.port, timeout_s=CALL_S, max_reply_bytes=100)
    tephra.behave = lambda call: struct.pack(">i", 101)
    with pytest.raises(TransactionsUnavailable, match="101"):
        await client.call("getSnapshot")
