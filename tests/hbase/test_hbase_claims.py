"""Claiming and opening topics takes few calls, and gives unique epochs, which are reserved in blocks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import trio

from actors.loading import load_topic
from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.keys import (
    HIGH_WATER,
    POINTER,
    READER,
    generation_prefix,
    metadata_key,
    pointer_key,
    system_key,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.state import TopicLimits
from storage.base import Deposed, StoreError
from storage.hbase.layout import ALL_KINDS, KINDS_COLUMN, hashed
from storage.hbase.owners import BLOCK
from tests.hbase.held_calls import Held, Lost

NAME = TopicName("ns", "topic")
SERVICE = TopicName("", "namespaces")
PREFIX = metadata_key(NAME)
METADATA, MESSAGE = Table.METADATA, Table.MESSAGE
READER_KEY = system_key(READER, NAME, 1, b"billing")


@contextmanager
def calls_of(store):
    """Record the names of the store's calls to HBase for which it waits."""
    made = []
    open_connection, pool = store._pool.connected, store._pool

    @contextmanager
    def counted(gateway):
        call = gateway.call

        async def named(name, *args):
            made.append(name)
            return await call(name, *args)

        gateway.call = named
        yield gateway
        del gateway.call

    class Connection:
        def __init__(self):
            self._inner = open_connection()

        async def __aenter__(self):
            self._counted = counted(await self._inner.__aenter__())
            return self._counted.__enter__()

        async def __aexit__(self, *error):
            self._counted.__exit__(None, None, None)
            return await self._inner.__aexit__(*error)

    pool.connected = Connection
    yield made
    del pool.connected


async def opened(store):
    """Load the topic as its next owner would."""
    claim = await store.claim(NAME)
    return await load_topic(NAME, store, TopicLimits(), lacks=claim.lacks)


async def topic_of_one_message(store):
    claim = await store.claim(NAME)
    row = Put(
        MESSAGE, generation_prefix(NAME, 1), [(100).to_bytes(8, "big") + b"\x00\x00"], [encode_row(MessageRow(b"m"))]
    )
    metadata = Metadata(1, TopicProperties(), created_ms=1, updated_ms=1)
    await store.write([put_one(METADATA, PREFIX, metadata.encode()), row], claim=claim)
    return claim


async def test_opening_a_topic_that_another_instance_owned_takes_five_calls_and_the_first_one_for_a_block_of_epochs(
    store, others
):
    await topic_of_one_message(store)
    opening = ["getRow", "checkAndPut", "getRow", "scannerOpenWithScan", "scannerGetList"]
    with calls_of(others[0]) as calls:
        state = await opened(others[0])
    assert calls == ["getRow", "atomicIncrement", *opening[1:]]
    assert state.usage.messages == 1
    with calls_of(others[0]) as calls:
        await opened(others[0])
    assert calls == opening


async def test_the_next_owner_searches_the_kinds_its_predecessor_wrote_and_nothing_else(store, others):
    claim = await topic_of_one_message(store)
    assert claim.lacks == ALL_KINDS
    await store.write(
        [put_one(METADATA, READER_KEY, b"x"), put_one(METADATA, pointer_key(NAME, 1, 7), b"x")], claim=claim
    )
    next_claim = await others[0].claim(NAME)
    assert next_claim.lacks == ALL_KINDS - {READER, POINTER}
    await others[0].write([Delete(METADATA, [READER_KEY])], claim=next_claim)
    assert (await others[1].claim(NAME)).lacks == ALL_KINDS - {READER, POINTER}


async def test_a_kind_is_announced_before_a_row_of_it_can_count(store, others):
    """Even if the record of the kind is lost or late, no owner sees the row without the kind."""
    claim = await topic_of_one_message(store)
    word = Lost(store, _says_a_kind, happens=False)
    with pytest.raises(StoreError):
        await store.write([put_one(METADATA, READER_KEY, b"x")], claim=claim)
    claim = await others[0].claim(NAME)
    assert READER in claim.lacks
    assert await others[0].get(METADATA, READER_KEY) is None
    await word.land()
    assert READER not in (await others[0].claim(NAME)).lacks


async def test_a_claim_that_meets_a_commit_knows_its_kinds_or_replaces_its_owner(store, others):
    claim = await topic_of_one_message(store)
    swap = Held(others[0], lambda name, args: name == "checkAndPut")
    claims = []

    async def takes_over():
        claims.append(await others[0].claim(NAME))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(takes_over)
        await swap.arrived()
        await store.write([put_one(METADATA, READER_KEY, b"x")], claim=claim)
        swap.release()
    assert READER not in claims[0].lacks
    assert await others[0].get(METADATA, READER_KEY) == b"x"


async def test_all_kinds_are_searched_for_a_topic_whose_head_names_none(store, others):
    claim = await topic_of_one_message(store)
    await store._pool.call("deleteAll", b"contract_messages", hashed(PREFIX), KINDS_COLUMN, {})
    claim = await others[0].claim(NAME)
    assert claim.lacks == frozenset()
    await others[0].write([put_one(METADATA, system_key(HIGH_WATER, NAME, 1), b"x")], claim=claim)
    assert (await store.claim(NAME)).lacks == frozenset()


async def test_a_block_of_epochs_serves_its_number_of_claims_and_none_once_others_have_overtaken_it(store, others):
    with calls_of(store) as calls:
        epochs = [(await store.claim(TopicName("ns", f"topic-{number}"))).epoch for number in range(BLOCK)]
    assert calls.count("atomicIncrement") == 1
    assert epochs == list(range(epochs[0], epochs[0] + BLOCK))
    first = (await others[0].claim(NAME)).epoch
    later = (await others[1].claim(NAME)).epoch
    again = (await others[0].claim(NAME)).epoch
    assert first == epochs[-1] + 1
    assert later == first + BLOCK
    assert again == later + BLOCK
    assert (await others[0].claim(TopicName("ns", "other"))).epoch == again + 1


async def test_services_claim_in_the_order_of_time_whatever_block_of_epochs_they_have(store, others):
    """Rows without a head are ordered by epochs alone."""
    row = b"\x00nns:"
    await store.claim(NAME)
    await others[0].claim(NAME)
    await others[0].write([put_one(METADATA, row, b"1")], claim=await others[0].claim(SERVICE))
    claim = await store.claim(SERVICE)
    await store.write([put_one(METADATA, row, b"2")], claim=claim)
    assert await others[0].get(METADATA, row) == b"2"
    await others[0].claim(TopicName("", "copying"))
    newer = await others[0].claim(SERVICE)
    await others[0].write([put_one(METADATA, row, b"3")], claim=newer)
    with pytest.raises(Deposed):
        await store.write([put_one(METADATA, row, b"4")], claim=claim)


def _says_a_kind(name, args):
    return name == "mutateRow" and args[2][0].column.startswith(KINDS_COLUMN + READER)
