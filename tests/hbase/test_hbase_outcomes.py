"""The errors of failed writes: certainly not applied, or with unknown outcome."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from plainsong.protocol.effects import Delete, RollBack, Table, put_one
from plainsong.protocol.keys import metadata_key
from storage.base import Deposed, NothingWritten, StoreError
from storage.hbase.pool import NoConnectionFree
from tests.hbase.held_calls import Lost, puts_to
from tests.hbase.test_hbase_owners import KEY, MESSAGE, METADATA, NAME, PAYLOAD, POINTER_KEY, rows, values

M = [rows(MESSAGE, b"m", 1)]
FREE_KEY = b"\x00nspace:"


def asked_twice(store, other, *, lands: bool) -> None:
    """Try to move a head, lose the answer, let ``other`` claim the topic, and try again."""
    ask = store._pool.call_counting
    wanted = puts_to("heads")

    async def twice(name: str, *args: object):
        if not wanted(name, args):
            return await ask(name, *args)
        store._pool.call_counting = ask
        if lands:
            await ask(name, *args)
        await other.claim(NAME)
        return (await ask(name, *args))[0], 2

    store._pool.call_counting = twice


async def test_an_owner_that_finds_another_head_reports_that_its_commit_did_not_happen(store, others):
    claim = await store.claim(NAME)
    await others[0].claim(NAME)
    with pytest.raises(Deposed) as caught:
        await store.write(M, claim=claim)
    assert caught.value.happened is False
    assert await values(others[0]) == []


async def test_after_a_lost_answer_the_next_head_shows_that_a_commit_did_not_happen(store, others):
    claim = await store.claim(NAME)
    await store.write([rows(MESSAGE, b"before", 0)], claim=claim)
    asked_twice(store, others[0], lands=False)
    with pytest.raises(Deposed) as caught:
        await store.write(M, claim=claim)
    assert caught.value.happened is False
    assert await values(others[0]) == [b"before"]


async def test_a_commit_that_happened_before_another_is_not_reported_as_not_happened(store, others):
    claim = await store.claim(NAME)
    asked_twice(store, others[0], lands=True)
    with pytest.raises(Deposed) as caught:
        await store.write(M, claim=claim)
    assert caught.value.happened is None
    assert await values(others[0]) == [b"m"]


@pytest.mark.parametrize("table", ["messages", "payloads", "metadata"])
async def test_a_put_without_an_answer_is_not_an_unknown_outcome_since_the_head_was_not_moved(store, table):
    claim = await store.claim(NAME)
    lost = Lost(store, puts_to(table), happens=False)
    commit = [*M, rows(PAYLOAD, b"p", 1), put_one(METADATA, POINTER_KEY, b"w")]
    with pytest.raises(NothingWritten):
        await store.write(commit, claim=claim)
    await lost.land()
    await store.claim(NAME)
    assert [await values(store, each) for each in Table] == [[], [], []]


async def test_a_head_without_an_answer_is_an_unknown_outcome(store):
    claim = await store.claim(NAME)
    Lost(store, puts_to("heads"), happens=False)
    with pytest.raises(StoreError) as caught:
        await store.write(M, claim=claim)
    assert not isinstance(caught.value, NothingWritten)


def find_none_free(store, wanted) -> None:
    """Fail the next call that ``wanted`` accepts as if no connection were free."""
    ask = store._pool.call_counting

    async def busy(name: str, *args: object):
        if wanted(name, args):
            store._pool.call_counting = ask
            raise NoConnectionFree("no connection to HBase became free in 20 s")
        return await ask(name, *args)

    store._pool.call_counting = busy


@pytest.mark.parametrize("table", ["messages", "heads"])
async def test_a_commit_for_which_no_connection_became_free_did_not_happen(store, table):
    claim = await store.claim(NAME)
    find_none_free(store, puts_to(table))
    with pytest.raises(NothingWritten, match="no connection to HBase became free"):
        await store.write(M, claim=claim)
    await store.claim(NAME)
    assert await values(store) == []


async def test_a_commit_whose_first_part_happened_is_unknown_if_no_connection_is_free_for_the_next(store):
    claim = await store.claim(NAME)
    moves = 0

    def moves_again(name: str, args: tuple[object, ...]) -> bool:
        nonlocal moves
        moves += puts_to("heads")(name, args)
        return moves == 2

    find_none_free(store, moves_again)
    rollback = RollBack(M[0].prefix, M[0].prefix + b"\xff", 7)
    with pytest.raises(StoreError, match="no connection to HBase became free") as caught:
        await store.write([*M, rollback, put_one(METADATA, KEY, b"behind")], claim=claim)
    assert not isinstance(caught.value, NothingWritten)
    await store.claim(NAME)
    assert await values(store) == [b"m"]


async def test_a_commit_is_unknown_if_no_connection_is_free_to_check_its_outcome(store, others):
    claim = await store.claim(NAME)
    asked_twice(store, others[0], lands=True)
    twice = store._pool.call_counting

    async def then_busy(name: str, *args: object):
        answer = await twice(name, *args)
        if puts_to("heads")(name, args):
            find_none_free(store, lambda asked, _: asked == "getRow")
        return answer

    store._pool.call_counting = then_busy
    with pytest.raises(StoreError, match="no connection to HBase became free") as caught:
        await store.write(M, claim=claim)
    assert not isinstance(caught.value, NothingWritten)
    assert await values(others[0]) == [b"m"]


async def test_a_write_to_a_row_that_no_head_covers_has_an_unknown_outcome(store):
    claim = await store.claim(NAME)
    Lost(store, puts_to("messages"), happens=False)
    with pytest.raises(StoreError) as caught:
        await store.write([*M, put_one(METADATA, FREE_KEY, b"said")], claim=claim)
    assert not isinstance(caught.value, NothingWritten)
    assert await store.get(METADATA, FREE_KEY) == b"said"


async def test_a_failed_rollback_leaves_rows_put_before_it_and_none_after_it(store):
    await store.write([put_one(METADATA, POINTER_KEY, b"there")], claim=await store.claim(NAME))
    claim = await store.claim(NAME)
    store._remover._each = _fails
    commit = [*M, Delete(METADATA, [POINTER_KEY]), RollBack(M[0].prefix, M[0].prefix + b"\xff", 7)]
    with pytest.raises(StoreError) as caught:
        await store.write([*commit, put_one(METADATA, KEY, b"behind")], claim=claim)
    assert not isinstance(caught.value, NothingWritten)
    assert await values(store) == [b"m"]
    assert await values(store, METADATA) == []


@pytest.mark.parametrize(
    "behind", [[Delete(MESSAGE, [M[0].prefix + M[0].suffixes[0]])], [RollBack(M[0].prefix, M[0].prefix + b"\xff", 7)]]
)
async def test_later_commits_are_not_acknowledged_if_another_owner_took_over_before_they_ended(store, others, behind):
    """The other owner read the state before the commit, so the request must be repeated to that owner."""
    claim = await store.claim(NAME)
    await store.write(M, claim=claim)
    each = store._remover._each

    async def meets_another(*args: object) -> None:
        await others[0].claim(NAME)
        await each(*args)

    store._remover._each = meets_another
    with pytest.raises(Deposed) as caught:
        await store.write(behind, claim=claim)
    assert caught.value.happened is None


async def test_puts_and_removals_of_metadata_happen_at_one_moment_in_any_order(store, others):
    claim = await store.claim(NAME)
    await store.write([put_one(METADATA, POINTER_KEY, b"there"), *M], claim=claim)
    Lost(store, puts_to("heads"), happens=False)
    key = M[0].prefix + M[0].suffixes[0]
    commit = [Delete(METADATA, [POINTER_KEY]), Delete(MESSAGE, [key]), put_one(METADATA, KEY, b"new")]
    with pytest.raises(StoreError):
        await store.write(commit, claim=claim)
    claim = await others[0].claim(NAME)
    assert [await values(others[0], each) for each in (METADATA, MESSAGE)] == [[b"there"], [b"m"]]
    await others[0].write(commit, claim=claim)
    assert [await values(others[0], each) for each in (METADATA, MESSAGE)] == [[b"new"], []]


async def test_a_row_over_the_bound_is_refused_before_anything_is_put(store):
    claim = await store.claim(NAME)
    large = bytes(store.traits.max_row_bytes + 1)
    with pytest.raises(NothingWritten, match="max_cell_bytes"):
        await store.write([*M, put_one(METADATA, metadata_key(NAME), large)], claim=claim)
    claim = await store.claim(NAME)
    most = bytes(store.traits.max_row_bytes)
    await store.write([put_one(METADATA, KEY, most), rows(MESSAGE, most, 1)], claim=claim)
    assert await values(store) == [most]
    assert await store.get(METADATA, KEY) == most


async def _fails(*_: object) -> None:
    raise StoreError("no gateway answers")


async def test_an_owner_that_looks_while_the_answer_to_its_commit_is_on_its_way_is_still_the_owner(store):
    claim = await store.claim(NAME)
    ask, wanted = store._pool.call_counting, puts_to("heads")
    landed, released = trio.Event(), trio.Event()

    async def slow(name: str, *args: object):
        answer = await ask(name, *args)
        if wanted(name, args):
            landed.set()
            await released.wait()
        return answer

    store._pool.call_counting = slow
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(store.write, M, claim=claim))
        await landed.wait()
        await store.check(claim)
        released.set()
    await store.write([rows(MESSAGE, b"n", 2)], claim=claim)
