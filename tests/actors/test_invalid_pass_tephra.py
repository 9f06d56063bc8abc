"""The pass over Tephra's invalid list: Tephra's state determines the rollbacks, and how far the list may be pruned."""

from __future__ import annotations

import pytest
from actors_in_process import NAME, SetClock, actors
from pointers_in_process import publish
from test_foreign_tephra import CALL_S, STATE, Tephra

from actors.invalid_list import InvalidPass
from actors.pointers import PointerIndex
from actors.reading import read_page
from actors.tephra import LATE_MS, ForeignTephra
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.rows import decode_row
from plainsong.protocol.tephra.state import Entry, ManagerState, encode_snapshot
from plainsong.protocol.topic.asks import Look
from plainsong.protocol.topic.state import TopicLimits
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from storage.memory import MemoryStore
from tests.storage.shared_memory import SharedMemory

LIFETIME_MS = 90_000_000


@pytest.mark.parametrize(
    ("store", "lifetime_ms", "bound"),
    [
        (MemoryStore(), 0, 49),
        (MemoryStore(), LIFETIME_MS, 49),
        (SharedMemory().store(), 0, None),  # another instance may still write under it
        (SharedMemory().store(), LIFETIME_MS, 19),
    ],
)
async def test_the_list_may_be_pruned_up_to_where_no_instance_accepts_messages(nursery, store, lifetime_ms, bound):
    tephra, clock = await nursery.start(Tephra().run), SetClock()
    clock.ms = LIFETIME_MS + LATE_MS + 20
    at = [number * POINTERS_PER_MS for number in (10, 49, 50)]
    state = ManagerState(clock.ms, at[2] + 9, at[2] + 9, (at[0], at[1] + 7), {at[2]: Entry(5000, at[2])})
    tephra.behave = tephra.serve(encode_snapshot(state))
    foreign = ForeignTephra(
        "127.0.0.1",
        tephra.port,
        clock,
        PointerIndex(),
        store,
        refresh_s=60.0,
        max_lifetime_ms=lifetime_ms,
        call_timeout_s=CALL_S,
    )
    await foreign.refresh()
    passed = foreign.begin_pass()
    assert passed.invalids == state.invalids
    await foreign.complete(passed)
    found = foreign.pruning().safe_bound
    assert (None if found is None else found // POINTERS_PER_MS) == bound
    await foreign._client.aclose()
    nursery.cancel_scope.cancel()


async def test_pointers_that_a_tephra_calls_invalid_are_rolled_back_and_its_list_is_left_alone(nursery):
    tephra = await nursery.start(Tephra().run)
    index, clock = PointerIndex(), SetClock()
    foreign = ForeignTephra(
        "127.0.0.1", tephra.port, clock, index, MemoryStore(), refresh_s=60.0, max_lifetime_ms=0, call_timeout_s=CALL_S
    )
    open_ones = {pointer: Entry(5000, 49) for pointer in (50, 100, 120, 310)}
    tephra.behave = tephra.serve(encode_snapshot(ManagerState(4000, 300, 310, (), open_ones)))
    await foreign.refresh()
    async with actors(clock=clock, limits=TopicLimits(max_lifetime_ms=0), pointers=index, authority=foreign) as harness:
        await harness.create()
        for pointer in (50, 100, 120):
            await publish(harness, pointer, f"{pointer}")
        tephra.behave = tephra.serve(encode_snapshot(STATE))
        await foreign.refresh()
        report = await InvalidPass(harness.directory, foreign).run_once()
        assert (report.complete, report.invalid, report.rolled_back, report.pruned) == (True, 2, 2, 0)
        rows = harness.store.inner.tables[Table.MESSAGE].rows.values()
        assert [decode_row(value).pointer for value in rows] == [-50, 100, -120]
        figures = foreign.pruning()
        assert (figures.safe_bound, figures.invalid, figures.oldest_by_topic) == (99, 2, {NAME: 50})
        assert figures.kept_because
        span = await harness.ask(Look(FIRST_BOUND))
        page = await read_page(harness.store, None, span, limit=9, max_bytes=999, view=foreign.view())
        assert (list(page.messages()), page.held.write_pointer) == ([], 100)
    await foreign._client.aclose()
    nursery.cancel_scope.cancel()
