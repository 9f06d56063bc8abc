"""The memory of all answers: who gets how much, who waits, who is refused; and the pages that are read within it."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from broker.api.messages.poll import FIRST_BYTES, TIMES, bytes_within, hold_gathered, read_within
from broker.config.sections import HttpConfig
from broker.http.budgets import LAST_PART, SHARE, SMALL_BYTES, YIELD_S, AnswerBudget, MinimumRate
from broker.http.messages import Answer
from broker.http.wire import admitted
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.page import Page

MIB = 1 << 20


def filled(max_bytes: int, reserved_bytes: int, patience_s: float = 60.0) -> AnswerBudget:
    """Return a budget with ``reserved_bytes`` in use."""
    budget = AnswerBudget(max_bytes, patience_s)
    budget.room().must_have(reserved_bytes)
    return budget


class Stored:
    """Messages of one size, and the pages that were read from them."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self.asked: list[int] = []

    async def read(self, max_bytes: int) -> Page:
        self.asked.append(max_bytes)
        count = min(self.count, max(1, max_bytes // self.size))
        end = "more" if count < self.count else "end"
        return Page(count=count, payload_bytes=count * self.size, end=end)


class Stream:
    """A stream that records whether it was closed."""

    closed = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


async def test_one_answer_is_always_possible_whatever_its_size() -> None:
    budget = AnswerBudget(MIB, patience_s=0)
    room = budget.room()
    page = await read_within(room, 10, 16 * MIB, Stored(10, 8 * MIB).read)
    assert page.count == 1
    assert room.reserved_bytes == budget.reserved_bytes == TIMES * 8 * MIB
    room.release()
    room.release()
    assert budget.reserved_bytes == 0


async def test_a_page_takes_no_more_than_its_share_of_the_remaining_budget() -> None:
    budget = filled(64 * MIB, 24 * MIB)
    room = budget.room()
    stored = Stored(1000, 64 << 10)
    page = await read_within(room, 1000, 16 * MIB, stored.read)
    left = 64 * MIB - 64 * MIB // LAST_PART - 24 * MIB
    assert stored.asked == [FIRST_BYTES, left // SHARE // TIMES]
    assert page.end == "more"
    assert 0 < room.reserved_bytes == TIMES * page.payload_bytes <= left // SHARE


async def test_a_page_is_read_once_and_whole_while_plenty_is_left() -> None:
    stored = Stored(1000, 16 << 10)
    assert (await read_within(AnswerBudget(256 * MIB).room(), 1000, 16 * MIB, stored.read)).count == 1000
    assert stored.asked == [16 * MIB]


async def test_a_small_page_does_not_wait_for_larger_ones() -> None:
    budget = filled(64 * MIB, 60 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_within, budget.room(), 1000, 16 * MIB, Stored(1, 8 * MIB).read)
        await wait_all_tasks_blocked()
        stored = Stored(10, 1000)
        assert (await read_within(budget.room(), 1000, 16 * MIB, stored.read)).count == 10
        assert stored.asked == [FIRST_BYTES]
        nursery.cancel_scope.cancel()
    assert budget.reserved_bytes == 60 * MIB + TIMES * 10_000


async def test_the_last_part_of_the_budget_is_for_small_answers() -> None:
    budget = filled(64 * MIB, 64 * MIB - 64 * MIB // LAST_PART, patience_s=0)
    with pytest.raises(Overloaded):
        await budget.take(SMALL_BYTES + 1, SMALL_BYTES + 1)
    assert await budget.take(SMALL_BYTES, 16 * MIB) == SMALL_BYTES
    assert not budget.room().has(SMALL_BYTES + 1)
    assert budget.room().has(SMALL_BYTES)


@pytest.mark.parametrize("leaves", ["it is refused", "its client leaves"])
async def test_a_request_that_waits_after_one_that_gave_up_gets_its_turn(leaves: str) -> None:
    budget = filled(64 * MIB, 32 * MIB, patience_s=0.05 if leaves == "it is refused" else 60.0)
    scope = trio.CancelScope()

    async def wait_without_room() -> None:
        with scope, pytest.raises(Overloaded):
            await budget.take(60 * MIB, 60 * MIB)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_without_room)
        await wait_all_tasks_blocked()
        budget.patience_s = 60.0
        nursery.start_soon(budget.take, 8 * MIB, 8 * MIB)
        await wait_all_tasks_blocked()
        if leaves == "its client leaves":
            assert budget.reserved_bytes == 32 * MIB
            scope.cancel()
    assert budget.reserved_bytes == 40 * MIB


async def test_a_large_answer_gets_its_turn_among_any_number_of_small_ones() -> None:
    budget = AnswerBudget(64 * MIB, 60.0)
    small = [budget.room() for _ in range(100)]
    assert all(room.has(SMALL_BYTES) for room in small)
    taken: list[int] = []

    async def wait(least: int) -> None:
        taken.append(await budget.take(least, least))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 40 * MIB)
        await wait_all_tasks_blocked()
        for _ in range(200):
            if taken:
                break
            small.pop(0).release()
            next_one = budget.room()
            if next_one.has(SMALL_BYTES):
                small.append(next_one)
            await wait_all_tasks_blocked()
        assert taken == [40 * MIB]
        nursery.start_soon(wait, 8 * MIB + 1)
        await wait_all_tasks_blocked()
        # Small ones do not wait for one that larger answers keep waiting.
        assert budget.room().has(SMALL_BYTES) or budget.reserved_bytes + SMALL_BYTES > 64 * MIB
        nursery.cancel_scope.cancel()


async def test_a_waiting_large_answer_is_not_overtaken_by_another_large_one_that_fits() -> None:
    budget = filled(64 * MIB, 40 * MIB)
    taken: list[int] = []

    async def wait() -> None:
        taken.append(await budget.take(20 * MIB, 20 * MIB))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        late = budget.room()
        assert not late.has(8 * MIB)
        assert not late.takes_now(SMALL_BYTES + 1)
        budget.resize(40 * MIB, 30 * MIB)
        await wait_all_tasks_blocked()
        assert taken == [20 * MIB]
        assert late.has(SMALL_BYTES + 1)


async def test_an_oversized_answer_needs_only_the_part_of_large_answers() -> None:
    budget = AnswerBudget(64 * MIB, 60.0)
    small = [budget.room() for _ in range(32)]
    assert all(room.has(SMALL_BYTES) for room in small)
    taken: list[int] = []

    async def wait() -> None:
        taken.append(await budget.take(100 * MIB, 100 * MIB))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        for room in small[:15]:
            room.release()
        await wait_all_tasks_blocked()
        assert taken == []
        small[15].release()
        await wait_all_tasks_blocked()
        assert taken == [100 * MIB]


async def test_freed_memory_goes_to_waiting_answers_in_their_order() -> None:
    budget = AnswerBudget(64 * MIB, 60.0)
    first = budget.room()
    first.must_have(64 * MIB)
    got: list[str] = []

    async def wait(name: str, least: int) -> None:
        await budget.take(least, least)
        got.append(name)

    async with trio.open_nursery() as nursery:
        for name in ("one", "two", "three"):
            nursery.start_soon(wait, name, 20 * MIB)
            await wait_all_tasks_blocked()
        assert first.has(40 * MIB)
        await wait_all_tasks_blocked()
        assert got == []
        assert first.has(10 * MIB)
        await wait_all_tasks_blocked()
        assert sorted(got) == ["one", "two"]
        first.release()
        await wait_all_tasks_blocked()
        assert sorted(got) == ["one", "two"]
        budget.resize(20 * MIB, 0)
    assert got[2:] == ["three"]
    assert budget.reserved_bytes == 40 * MIB


async def test_a_request_that_waits_too_long_gets_a_retry_hint_and_reserves_nothing() -> None:
    budget = filled(4 * MIB, 4 * MIB, patience_s=0.01)
    room = budget.room()
    with pytest.raises(Overloaded) as caught:
        await read_within(room, 10, 16 * MIB, Stored(10, MIB).read)
    assert caught.value.retry_after_s is not None
    assert "http.max_answer_bytes" in caught.value.hint
    assert (room.reserved_bytes, budget.reserved_bytes, budget.refused) == (0, 4 * MIB, 1)


async def test_stalled_readers_are_cut_for_others_the_longest_first(mock_clock: MockClock) -> None:
    budget = AnswerBudget(64 * MIB, patience_s=0)
    cut: list[int] = []
    rooms = [budget.room() for _ in range(3)]
    for number, (room, size) in enumerate(zip(rooms, (0, 30, 24), strict=True)):
        assert room.has(size * MIB)
        room.blocks(partial(cut.append, number))
        mock_clock.jump(YIELD_S)
    assert await budget.room().take(8 * MIB, 8 * MIB) == 8 * MIB
    assert (cut, budget.cut, rooms[1].reserved_bytes) == ([1], 1, 0)
    assert await budget.room().take(20 * MIB, 20 * MIB) == 20 * MIB
    rooms[2].moves()
    with pytest.raises(Overloaded):
        await budget.room().take(20 * MIB, 20 * MIB)
    rooms[2].blocks(partial(cut.append, 2))
    with pytest.raises(Overloaded):
        await budget.room().take(20 * MIB, 20 * MIB)
    mock_clock.jump(YIELD_S)
    assert await budget.room().take(20 * MIB, 20 * MIB) == 20 * MIB
    assert cut == [1, 2]


async def test_a_reader_stalled_since_a_request_arrived_is_cut_for_it(autojump_clock: MockClock) -> None:
    budget = AnswerBudget(64 * MIB, patience_s=2 * YIELD_S)
    room = budget.room()
    assert room.has(48 * MIB)
    room.blocks(lambda: None)
    begun_s = trio.current_time()
    assert await budget.room().take(24 * MIB, 24 * MIB) == 24 * MIB
    assert trio.current_time() - begun_s == YIELD_S


def test_an_answer_may_wait_for_its_reader_for_half_a_minute_and_a_second_for_each_16_kib_taken() -> None:
    minimum_rate = MinimumRate(HttpConfig())
    assert minimum_rate.left_s() == 30.0
    minimum_rate.waited(25.0, 0)
    assert minimum_rate.left_s() == 5.0
    minimum_rate.waited(2.0, 160 << 10)
    assert minimum_rate.left_s() == 13.0
    minimum_rate.waited(1.0, 16 * MIB)
    assert minimum_rate.left_s() == 30.0
    minimum_rate.waited(1100.0, 0)
    assert minimum_rate.left_s() < 0.0
    minimum_rate.restart()
    assert minimum_rate.left_s() == 30.0


async def test_an_abandoned_wait_leaves_nothing() -> None:
    budget = AnswerBudget(4 * MIB, 60.0)
    first = budget.room()
    first.must_have(4 * MIB)

    async def wait() -> None:
        room = budget.room()
        try:
            await room.take(2 * MIB, 2 * MIB)
            await trio.sleep_forever()
        finally:
            room.release()

    for is_granted in (False, True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            if is_granted:
                first.release()  # at the same moment
            nursery.cancel_scope.cancel()
    assert budget.reserved_bytes == 0
    assert await budget.take(4 * MIB, 4 * MIB) == 4 * MIB


async def test_a_message_larger_than_estimated_is_read_again_once_there_is_room() -> None:
    budget = AnswerBudget(64 * MIB, 60.0)
    first = budget.room()
    first.must_have(60 * MIB)
    stored = Stored(3, 8 * MIB)
    room = budget.room()
    pages: list[Page] = []

    async def read() -> None:
        pages.append(await read_within(room, 1, 16 * MIB, stored.read))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert (pages, room.reserved_bytes) == ([], 0)
        first.release()
    assert pages[0].count == 1
    assert room.reserved_bytes == TIMES * 8 * MIB


async def test_gathered_answers_are_bounded_too() -> None:
    budget = filled(64 * MIB, 50 * MIB, patience_s=0)
    room = budget.room()
    most = await bytes_within(room, 16 * MIB)
    assert TIMES * most == room.reserved_bytes <= 6 * MIB // SHARE
    hold_gathered(room, 100)
    assert room.reserved_bytes == TIMES * 100
    with pytest.raises(Overloaded):
        hold_gathered(room, 8 * MIB)


async def test_an_answer_without_room_is_refused_only_if_nothing_was_done() -> None:
    budget = filled(4 * MIB, 4 * MIB, patience_s=0)
    done = await admitted(Answer(200, bytes(MIB)), room := budget.room(), only_looks=False)
    assert (done.status, room.reserved_bytes) == (200, MIB)
    room.release()
    assert (await admitted(Answer(200, bytes(MIB)), budget.room(), only_looks=True)).status == 503
    stream = Stream()
    refused = await admitted(Answer(200, stream, length=100 * MIB), budget.room(), only_looks=True)
    assert (refused.status, stream.closed) == (503, True)
    assert (await admitted(Answer(200, b"ok"), budget.room(), only_looks=True)).status == 200
