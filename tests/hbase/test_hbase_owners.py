"""Two instances on one HBase: late puts of a replaced owner are never visible, and never acknowledged."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.keys import generation_prefix, metadata_key, payload_prefix, pointer_key
from plainsong.protocol.names import TopicName
from storage.base import Claim, Deposed, NothingWritten, Store, StoreError, read_rows
from storage.hbase.cells import SERVICE_PREFIX
from tests.hbase.held_calls import Held, Lost, puts_to
from tests.storage.contract import LAST, everything

NAME = TopicName("ns", "topic")
KEY = metadata_key(NAME)
POINTER_KEY = pointer_key(NAME, 1, 7)
MESSAGE, METADATA, PAYLOAD = Table.MESSAGE, Table.METADATA, Table.PAYLOAD


def rows(table: Table, value: bytes, *positions: int) -> Put:
    """Return a row at each position of the topic, all in one row of HBase."""
    prefix = generation_prefix(NAME, 1) if table is MESSAGE else payload_prefix(NAME, 1, 7)
    suffixes = [(100 + position).to_bytes(8, "big") + b"\x00\x00" for position in positions]
    return Put(table, prefix, suffixes, [value] * len(suffixes))


async def values(store: Store, table: Table = MESSAGE) -> list[bytes]:
    return [value for _, value in await everything(store, table)]


async def is_deposed(write: partial[object]) -> None:
    with pytest.raises(Deposed):
        await write()


async def replaced(store, other, table, held, commit, retry):
    """Let ``other`` replace ``store`` while its puts to ``table`` are held; return the values that both then see."""
    claim = await store.claim(NAME)
    holding = Held(store, puts_to(held))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(is_deposed, partial(store.write, commit, claim=claim))
        await holding.arrived()
        new = await other.claim(NAME)
        assert await values(other, table) == []
        await other.write(retry, claim=new)
        holding.release()
    seen = await values(other, table)
    await store.claim(NAME)
    assert await values(store, table) == seen
    return seen


async def test_a_put_that_lands_after_the_takeover_is_never_visible(store, others):
    commit, retry = [rows(MESSAGE, b"late", 2)], [rows(MESSAGE, b"again", 1, 3)]
    assert await replaced(store, others[0], MESSAGE, "messages", commit, retry) == [b"again", b"again"]


async def test_an_unacknowledged_put_that_landed_before_the_takeover_is_never_visible(store, others):
    commit, retry = [rows(MESSAGE, b"late", 2)], [rows(MESSAGE, b"again", 1, 3)]
    assert await replaced(store, others[0], MESSAGE, "heads", commit, retry) == [b"again", b"again"]


@pytest.mark.parametrize("held", ["messages", "heads"])
async def test_a_key_that_a_replaced_owner_took_is_free_for_the_next(store, others, held):
    commit, retry = [rows(MESSAGE, b"late", 2)], [rows(MESSAGE, b"again", 2)]
    assert await replaced(store, others[0], MESSAGE, held, commit, retry) == [b"again"]


@pytest.mark.parametrize("held", ["payloads", "heads"])
async def test_stored_messages_of_a_replaced_owner_are_never_among_those_stored_again(store, others, held):
    commit = [rows(PAYLOAD, b"late", 2), put_one(METADATA, POINTER_KEY, b"late")]
    retry = [rows(PAYLOAD, b"again", 1, 3), put_one(METADATA, POINTER_KEY, b"again")]
    assert await replaced(store, others[0], PAYLOAD, held, commit, retry) == [b"again", b"again"]
    assert await others[0].get(METADATA, POINTER_KEY) == b"again"


@pytest.mark.parametrize("held", ["metadata", "heads"])
async def test_metadata_of_a_replaced_owner_never_counts_even_if_the_next_owner_has_written_none(store, others, held):
    commit, retry = [put_one(METADATA, POINTER_KEY, b"late")], [rows(MESSAGE, b"m", 1)]
    assert await replaced(store, others[0], METADATA, held, commit, retry) == []


@pytest.mark.parametrize("held", ["metadata", "heads"])
async def test_metadata_of_a_replaced_owner_does_not_change_acknowledged_rows(store, others, held):
    await store.write([put_one(METADATA, POINTER_KEY, b"before")], claim=await store.claim(NAME))
    claim = await store.claim(NAME)
    holding = Held(store, puts_to(held))
    async with trio.open_nursery() as nursery:
        write = partial(store.write, [put_one(METADATA, POINTER_KEY, b"late")], claim=claim)
        nursery.start_soon(is_deposed, write)
        await holding.arrived()
        claim = await others[0].claim(NAME)
        assert await others[0].get(METADATA, POINTER_KEY) == b"before"
        holding.release()
    for each in (store, others[0], others[1]):
        assert await each.get(METADATA, POINTER_KEY) == b"before"
    await others[0].write([put_one(METADATA, POINTER_KEY, b"after")], claim=claim)
    for each in (store, others[0], others[1]):
        assert await each.get(METADATA, POINTER_KEY) == b"after"


async def test_an_owner_that_meets_rows_of_a_later_owner_reports_that_it_was_replaced(store, others):
    claim = await store.claim(NAME)
    later = await others[0].claim(NAME)
    await others[0].write([put_one(METADATA, KEY, b"later")], claim=later)
    assert await store.get(METADATA, KEY) == b"later"
    with pytest.raises(Deposed):
        await store.write([put_one(METADATA, KEY, b"earlier")], claim=claim)
    assert await others[0].get(METADATA, KEY) == b"later"


async def test_an_owner_with_a_new_epoch_does_not_overwrite_the_cell_of_a_later_owner(store, others):
    """The put finds the later owner's cell where it expects none, so it fails and the cell stays."""
    claim = await store.claim(NAME)
    later = await others[0].claim(NAME)
    await others[0].write([put_one(METADATA, KEY, b"later")], claim=later)
    with pytest.raises(Deposed):
        await store.write([put_one(METADATA, KEY, b"earlier")], claim=claim)
    await others[0].write([put_one(METADATA, POINTER_KEY, b"further")], claim=later)
    assert [await others[1].get(METADATA, key) for key in (KEY, POINTER_KEY)] == [b"later", b"further"]


async def test_three_owners_in_a_row_leave_their_acknowledged_rows_and_none_of_their_late_ones(store, others):
    holdings = []
    async with trio.open_nursery() as nursery:
        for number, each in enumerate((store, *others[:2])):
            claim = await each.claim(NAME)
            await each.write([rows(MESSAGE, b"%d" % number, 10 * number)], claim=claim)
            holdings.append(Held(each, puts_to("messages" if number % 2 else "heads")))
            late = [rows(MESSAGE, b"late %d" % number, 10 * number + 1, 10 * number + 25)]
            nursery.start_soon(is_deposed, partial(each.write, late, claim=claim))
            await holdings[-1].arrived()
        claim = await others[2].claim(NAME)
        for holding in holdings:
            holding.release()
    await others[2].write([rows(MESSAGE, b"3", 30)], claim=claim)
    assert await values(others[2]) == [b"0", b"1", b"2", b"3"]
    assert await values(others[3]) == [b"0", b"1", b"2", b"3"]
    await store.claim(NAME)
    assert await values(store) == [b"0", b"1", b"2", b"3"]


async def test_an_instance_that_claims_again_after_a_failed_write_becomes_a_new_owner(store):
    claim = await store.claim(NAME)
    lost = Lost(store, puts_to("messages"), happens=False)
    with pytest.raises(StoreError):
        await store.write([rows(MESSAGE, b"lost", 2)], claim=claim)
    with pytest.raises(NothingWritten):
        await store.write([rows(MESSAGE, b"refused", 3)], claim=claim)
    again = await store.claim(NAME)
    assert again.epoch > claim.epoch
    await lost.land()
    await store.write([rows(MESSAGE, b"again", 1)], claim=again)
    assert await values(store) == [b"again"]


async def test_a_commit_whose_answer_was_lost_is_visible_to_the_next_owner_and_not_acknowledged(store, others):
    claim = await store.claim(NAME)
    Lost(store, puts_to("heads"))
    with pytest.raises(StoreError):
        await store.write([rows(MESSAGE, b"there", 1), put_one(METADATA, KEY, b"said")], claim=claim)
    claim = await others[0].claim(NAME)
    assert await values(others[0]) == [b"there"]
    assert await others[0].get(METADATA, KEY) == b"said"
    await others[0].write([rows(MESSAGE, b"next", 2)], claim=claim)
    assert await values(others[0]) == [b"there", b"next"]


async def test_a_row_that_counts_is_never_replaced(store, others):
    claim = await store.claim(NAME)
    await store.write([rows(MESSAGE, b"acknowledged", 1)], claim=claim)
    claim = await others[0].claim(NAME)
    with pytest.raises(StoreError, match="put earlier with other bytes"):
        await others[0].write([rows(MESSAGE, b"other", 1)], claim=claim)
    await others[0].claim(NAME)
    assert await values(others[0]) == [b"acknowledged"]


async def test_all_rows_of_a_commit_are_visible_or_none(store, others):
    claim = await store.claim(NAME)
    commit = [rows(MESSAGE, bytes(5 << 20), 1, 2), rows(PAYLOAD, b"p", 1), put_one(METADATA, POINTER_KEY, b"w")]
    holding = Held(store, puts_to("heads"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(store.write, commit, claim=claim))
        await holding.arrived()
        for each in (store, others[0]):
            assert [len(await values(each, table)) for table in Table] == [0, 0, 0]
        holding.release()
    for each in (store, others[0]):
        assert [len(await values(each, table)) for table in Table] == [1, 2, 1]


async def test_one_of_many_concurrent_claims_wins(store, others):
    everybody = [store, *others]
    claims: dict[Store, Claim] = {}

    async def claim(each: Store) -> None:
        while each not in claims:
            try:
                claims[each] = await each.claim(NAME)
            except StoreError:
                await trio.lowlevel.checkpoint()  # another one was faster: try again

    async with trio.open_nursery() as nursery:
        for each in everybody:
            nursery.start_soon(claim, each)
    told = []
    for number, each in enumerate(everybody):
        try:
            await each.write([rows(MESSAGE, b"%d" % number, number)], claim=claims[each])
            told.append(b"%d" % number)
        except Deposed:
            pass
    assert len({claim.epoch for claim in claims.values()}) == len(everybody)
    assert len(told) == 1
    assert await values(store) == told


async def test_late_removals_leave_rows_that_replaced_those_they_saw(store, others):
    """The next owner removes a replaced owner's row and reuses its key, while another removal of it is in flight."""
    claim = await store.claim(NAME)
    Lost(store, puts_to("heads"), happens=False)
    with pytest.raises(StoreError):
        await store.write([rows(MESSAGE, b"late", 1, 2)], claim=claim)
    claim = await others[0].claim(NAME)
    holding = Held(others[1], lambda name, _: name in ("deleteAllRowTs", "mutateRow"))
    keys = [key + b"" for put in [rows(MESSAGE, b"", 1, 2)] for key in (put.prefix + each for each in put.suffixes)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others[1].discard, MESSAGE, keys[:1])
        await holding.arrived()
        await others[0].write([rows(MESSAGE, b"new", 1, 2)], claim=claim)
        holding.release()
    assert await values(others[0]) == [b"new", b"new"]


async def test_rows_of_the_transaction_service_belong_to_its_owner(store, others):
    from storage.base import SERVICE_NAME

    key = b"\x00xt" + (5).to_bytes(8, "big")
    assert metadata_key(SERVICE_NAME) == SERVICE_PREFIX
    claim = await store.claim(SERVICE_NAME)
    holding = Held(store, puts_to("metadata"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(is_deposed, partial(store.write, [put_one(METADATA, key, b"late")], claim=claim))
        await holding.arrived()
        claim = await others[0].claim(SERVICE_NAME)
        holding.release()
    assert await read_rows(others[0], METADATA, b"", LAST, limit=9) == []
    await others[0].write([put_one(METADATA, key, b"new")], claim=claim)
    assert await store.get(METADATA, key) == b"new"
