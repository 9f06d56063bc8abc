"""The memory for request bodies: only received bytes count, small bodies always pass, and the slowest are dropped."""

from __future__ import annotations

import itertools

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from broker.config.sections import HttpConfig
from broker.http.budgets import (
    FEW_PARTS,
    FREE_BYTES,
    LAST_PART,
    REST,
    SMALL_BODY_BYTES,
    YIELD_S,
    BodyBudget,
    LongWork,
    Reservation,
    body_deadline,
)
from broker.http.intake import SLICE_CHUNKS
from plainsong.protocol.errors import Overloaded
from tests.broker.listeners import Reader, Reply, ask, post, running
from tests.patience import PATIENCE_S

MIB = 1 << 20
BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])


class Body:
    """A body with ``size`` received bytes."""

    def __init__(self, budget: BodyBudget, size: int) -> None:
        self.share: Reservation = budget.reserve()
        self.gave_way = 0
        self.share.may_give_way(self._give_way)
        self.share.grow(size)

    def _give_way(self) -> None:
        self.gave_way += 1


def full_of(budget: BodyBudget, size: int) -> list[Body]:
    """Return as many unfinished bodies of a size as fit."""
    bodies = []
    while True:
        try:
            bodies.append(Body(budget, size))
        except Overloaded:
            return bodies


async def test_the_slowest_incoming_bodies_are_dropped_until_there_is_room(mock_clock: MockClock) -> None:
    budget = BodyBudget(64 * MIB)
    slow = full_of(budget, 8 * MIB)
    mock_clock.jump(YIELD_S)
    slow[0].share.shrink(6 * MIB)
    slow[3].share.shrink(5 * MIB)
    other = budget.reserve()
    other.grow(15 * MIB)
    assert [body.gave_way for body in slow] == [1, 0, 0, 1, *[0] * (len(slow) - 4)]
    with pytest.raises(Overloaded):
        slow[0].share.grow(1)
    assert budget.reserved_bytes == 15 * MIB + 8 * MIB * (len(slow) - 2)


async def test_a_body_is_not_dropped_in_its_first_second_or_once_it_is_complete(mock_clock: MockClock) -> None:
    budget = BodyBudget(64 * MIB)
    slow = full_of(budget, 8 * MIB)
    with pytest.raises(Overloaded):
        budget.reserve().grow(8 * MIB)
    slow[0].share.keeps()
    mock_clock.jump(YIELD_S)
    for _ in range(len(slow) - 1):
        budget.reserve().grow(8 * MIB)
    assert [body.gave_way for body in slow] == [0, *[1] * (len(slow) - 1)]
    mock_clock.jump(YIELD_S)
    with pytest.raises(Overloaded):
        budget.reserve().grow(8 * MIB)


async def test_no_body_is_dropped_for_a_slower_one_or_without_need(mock_clock: MockClock) -> None:
    budget = BodyBudget(64 * MIB)
    slowest = Body(budget, 10)
    mock_clock.jump(YIELD_S)
    faster = full_of(budget, 9 * MIB)
    mock_clock.jump(YIELD_S)
    with pytest.raises(Overloaded):
        slowest.share.grow(8 * MIB)
    with pytest.raises(Overloaded):
        budget.reserve().grow(64 * MIB)
    assert not any(body.gave_way for body in [slowest, *faster])


async def test_a_request_of_up_to_4_kib_is_always_accepted_and_small_ones_have_a_part_of_their_own() -> None:
    budget = BodyBudget(64 * MIB)
    full_of(budget, MIB)
    assert budget.reserved_bytes == 64 * MIB - 64 * MIB // LAST_PART
    small = full_of(budget, SMALL_BODY_BYTES)
    assert len(small) == 64 * MIB // LAST_PART // SMALL_BODY_BYTES
    for _ in range(1000):
        budget.reserve().grow(FREE_BYTES)
    with pytest.raises(Overloaded):
        budget.reserve().grow(FREE_BYTES + 1)


def test_a_body_may_take_half_a_minute_plus_a_second_for_each_16_kib_and_ten_minutes_at_most() -> None:
    settings = HttpConfig()
    assert body_deadline(5.0, 0, settings) == 35.0
    assert body_deadline(5.0, 16 << 10, settings) == 36.0
    assert body_deadline(5.0, 64 * MIB, settings) == 605.0


@BOTH_WAYS
async def test_a_thousand_connections_that_announce_64_mib_and_send_a_byte_hold_a_kilobyte(hot: bool) -> None:
    """Other requests are served as usual, including those with large bodies."""
    sizes = {"max_body_bytes": 64 * MIB, "max_inflight_bytes": 128 * MIB}
    async with running(hot=hot, **sizes) as listener, trio.open_nursery() as nursery:
        streams: list[trio.SocketStream] = []
        for _ in range(1000):
            streams.append(await listener.connect())
            await streams[-1].send_all(post("t/store", b"x", "Content-Length: 67108864"))
        with trio.fail_after(PATIENCE_S):
            while listener.budget.reserved_bytes < 1000:
                await trio.lowlevel.checkpoint()
        assert listener.budget.reserved_bytes == 1000
        for size in (1, FREE_BYTES, MIB, 32 * MIB):
            assert (await ask(listener, post("t/publish", bytes(size)))).status == 200
        for stream in streams:
            nursery.start_soon(stream.aclose)


@BOTH_WAYS
async def test_stalled_bodies_are_dropped_for_one_that_progresses(hot: bool, mock_clock: MockClock) -> None:
    """The clock is stopped while the last body arrives; otherwise a stall of the machine could make it the slowest."""
    part_bytes = 400 << 10
    async with running(hot=hot) as listener:  # at most 1 MiB per body, 4 MiB in all
        async with trio.open_nursery() as nursery:
            stalled = [await listener.connect() for _ in range(8)]
            for stream in stalled:
                part = post("t/store", bytes(part_bytes), f"Content-Length: {1 << 20}")
                nursery.start_soon(stream.send_all, part)
            with trio.fail_after(PATIENCE_S):
                while listener.budget.reserved_bytes < 8 * part_bytes:
                    await trio.lowlevel.checkpoint()
        mock_clock.jump(YIELD_S)
        assert (await ask(listener, post("t/publish", bytes(1 << 20)))).status == 200
        with trio.fail_after(PATIENCE_S):
            while listener.budget.reserved_bytes % part_bytes:  # the publish still holds its share
                await trio.lowlevel.checkpoint()
        dropped = 8 - listener.budget.reserved_bytes // part_bytes
        assert dropped
        replies: list[Reply] = []

        async def read(stream: trio.SocketStream) -> None:
            replies.append(await Reader(stream).reply())

        async with trio.open_nursery() as nursery:
            for stream in stalled:
                nursery.start_soon(read, stream)
            with trio.fail_after(PATIENCE_S):
                while len(replies) < dropped:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert [(reply.status, reply.code) for reply in replies] == [(503, "overloaded")] * dropped
        assert all(reply.headers["retry-after"] == "1" for reply in replies)
        for stream in stalled:
            await stream.aclose()
        mock_clock.autojump_threshold = 0  # time may pass from now on: closing waits for time-outs
    assert listener.budget.reserved_bytes == 0


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_a_fast_body_that_never_ends_is_refused_at_its_time_limit(hot: bool) -> None:
    settings = {"body_timeout_s": 0.1, "body_max_s": 0.5, "body_min_bytes_per_s": 1}
    async with (
        running(hot=hot, **settings) as listener,
        await listener.connect() as stream,
        trio.open_nursery() as nursery,
    ):

        async def trickle() -> None:
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.01)

        await stream.send_all(post("t/store", b"", f"Content-Length: {1 << 20}"))
        nursery.start_soon(trickle)
        reply = await Reader(stream).reply()
        assert (reply.status, reply.code) == (400, "malformed_body")
        nursery.cancel_scope.cancel()


@BOTH_WAYS
async def test_half_a_megabyte_of_one_byte_chunks_does_not_starve_others(hot: bool) -> None:
    body = b"1\r\nx\r\n" * (MIB // 2 // 6) + b"0\r\n\r\n"
    turns = 0
    async with (
        running(hot=hot, max_body_bytes=4 * MIB, max_inflight_bytes=8 * MIB) as listener,
        await listener.connect() as stream,
        trio.open_nursery() as nursery,
    ):

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        nursery.start_soon(stream.send_all, post("t/publish", b"", "Transfer-Encoding: chunked") + body)
        nursery.start_soon(count)
        assert (await Reader(stream).reply()).status == 200
        nursery.cancel_scope.cancel()
    assert turns >= len(body) // len(b"1\r\nx\r\n") // SLICE_CHUNKS


async def test_slices_of_long_work_run_one_at_a_time_in_order_and_leave_two_thirds_of_the_time(
    autojump_clock: MockClock,
) -> None:
    work = LongWork()
    slices: list[tuple[int, float, float]] = []

    async def work_in_slices(number: int) -> None:
        for _ in range(3):
            async with work:
                begun_s = trio.current_time()
                await trio.sleep(1)  # the duration of the slice
                slices.append((number, begun_s, trio.current_time()))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(work_in_slices, number)
            await wait_all_tasks_blocked()
    assert [number for number, _, _ in slices] == [0, 1, 2] * 3
    for (_, _, ended_s), (_, begun_s, _) in itertools.pairwise(slices):
        assert begun_s - ended_s >= REST


async def test_a_waiter_that_gives_up_its_slice_delays_no_other(
    autojump_clock: MockClock,
) -> None:
    work = LongWork()

    async def hold() -> None:
        async with work:
            await trio.sleep(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await wait_all_tasks_blocked()
        with trio.move_on_after(1) as waiting:
            async with work:
                raise AssertionError("there is a slice already")
        assert waiting.cancelled_caught
    with trio.move_on_after(1) as resting:
        async with work:
            raise AssertionError("it rests")
    assert resting.cancelled_caught
    with trio.fail_after(2 * REST):
        async with work:
            pass


async def test_a_body_of_few_chunks_waits_for_no_slice() -> None:
    async with running() as listener, listener.budget.long_work, await listener.connect() as stream:
        chunks = b"".join(b"40\r\n%b\r\n" % (b"x" * 64) for _ in range(FEW_PARTS - 2)) + b"0\r\n\r\n"
        await stream.send_all(post("t/publish", b"", "Transfer-Encoding: chunked") + chunks)
        assert (await Reader(stream).reply()).status == 200
