"""Pages of topics written by producers: stamped, atomic and attributed requests among plain and transactional ones.

Everything is published by the topic itself; reads from the store, from the cache and message by message must equal the
list of sent messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count as count_up

import pytest
import trio
from actors_in_process import NAME, actors
from hypothesis import given
from hypothesis import strategies as st
from pointers_in_process import FIRST, publish, roll_back, store

from actors.reading import read_page, walk_rows
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.topic.asks import Look
from plainsong.protocol.topic.reading import Extent
from plainsong.protocol.transactions.view import View


@dataclass
class Sent:
    """A message of the list."""

    payload: bytes
    attributes: dict[str, str]
    pointer: int | None = None


strings = st.sampled_from([{}, {}, {"k": "v"}, {"traceparent": "00-1", "é": "ü" * 40}])
sizes = st.sampled_from([1, 1, 2, 3, 5, 130])
requests = st.tuples(
    st.sampled_from(["plain", "attributed", "stamped", "atomic", "again", "under", "stored"]),
    sizes,
    strings,
    st.booleans(),
)


class Sending:
    """Sends random requests and keeps the list."""

    def __init__(self, harness):
        self.harness = harness
        self.messages = []
        self.rolled_back = set()
        self._numbers = count_up()
        self._ids = count_up(10, 3)
        self._pointers = count_up(FIRST)
        self._last = None

    def _payloads(self, count):
        return [f"m{next(self._numbers)}" for _ in range(count)]

    def _say(self, payloads, attributes, pointer=None):
        self.messages += [
            Sent(payload.encode(), each, pointer) for payload, each in zip(payloads, attributes, strict=True)
        ]

    async def send(self, kind, count, shared, every):
        """Send one request; with ``every`` all its messages have the attributes, otherwise only the last."""
        payloads = self._payloads(count)
        attributes = [dict(shared) if every or index == count - 1 else {} for index in range(count)]
        more = {"attributes": attributes if any(attributes) else None}
        if kind == "again" and self._last is not None:
            payloads, more = self._last
            receipt = await self.harness.publish(*payloads, **more)
            assert receipt.duplicate
            return
        if kind in ("stamped", "atomic"):
            first = next(self._ids)
            ids = list(range(first, first + count)) if every else [first + 1000 * index for index in range(count)]
            self._ids = count_up(ids[-1] + 1, 3)
            more |= {"producer": "p", "sequence_ids": ids, "atomic": kind == "atomic"}
            self._last = (payloads, more)
        if kind in ("under", "stored"):
            await self._send_under(kind, payloads, attributes, more)
            return
        if kind == "plain":
            attributes, more = [{}] * count, {}
        await self.harness.publish(*payloads, **more)
        self._say(payloads, attributes)

    async def _send_under(self, kind, payloads, attributes, more):
        pointer = next(self._pointers)
        if kind == "stored":
            await store(self.harness, pointer, *payloads, **more)
            own = self._payloads(2)
            ids = [next(self._ids), next(self._ids)]
            await publish(self.harness, pointer, *own, producer="q", sequence_ids=ids)
            self._say(payloads + own, [*attributes, {}, {}], pointer)
        else:
            await publish(self.harness, pointer, *payloads, **more)
            self._say(payloads, attributes, pointer)
        if pointer % 3 == 0:
            await roll_back(self.harness, pointer)
            self.rolled_back.add(pointer)


async def check(harness, sending):
    """Read from every start, inclusive and exclusive, with limits that cut anywhere, and compare with the list."""
    messages = sending.messages
    whole = await harness.page(cached=False)
    ids = [each for each, _ in whole.messages()]
    assert ids == sorted(set(ids))
    assert [payload for _, payload in whole.messages()] == [each.payload for each in messages]
    assert whole.attributes == {index: each.attributes for index, each in enumerate(messages) if each.attributes}
    starts = {0, len(ids) // 3, len(ids) // 2, len(ids) - 1} if len(ids) > 12 else range(len(ids))
    for cached in (True, False):
        for start in starts:
            for limit in (1, 2, 7, 1000):
                page = await harness.page(ids[start], limit, cached=cached)
                wanted = messages[start : start + limit]
                assert list(page.messages()) == [*zip(ids[start:], [each.payload for each in wanted], strict=False)]
                assert page.attributes == {i: each.attributes for i, each in enumerate(wanted) if each.attributes}
                if page.count:
                    rest = await harness.page(after(page.last_id), limit, cached=cached)
                    assert next((each for each, _ in rest.messages()), None) == (ids[start + limit :] or [None])[0]
    extent = Extent(await harness.look(), None, None)
    await walk_rows(harness.store, extent)
    assert (extent.count, extent.bytes) == (whole.count, whole.payload_bytes)


async def committed(harness, view, *, cached):
    """Return the messages of a reader with a view, in pages of three."""

    got, since = [], FIRST_BOUND
    while True:
        span = await harness.ask(Look(since))
        cache = harness.directory.cache(NAME) if cached else None
        page = await read_page(harness.store, cache, span, limit=3, max_bytes=10**9, view=view)
        got += [(payload, page.attributes.get(index, {})) for index, (_, payload) in enumerate(page.messages())]
        if page.end == "end":
            return got
        since = after(page.last_id)


@given(st.lists(requests, min_size=1, max_size=8))
def test_messages_of_producers_are_read_as_sent_from_store_and_cache(drawn):
    async def course():
        async with actors(cache_bytes=1 << 24) as harness:
            await harness.create()
            sending = Sending(harness)
            for request in drawn:
                await sending.send(*request)
            if not sending.messages:
                return
            await check(harness, sending)
            seen = [
                (each.payload, each.attributes) for each in sending.messages if each.pointer not in sending.rolled_back
            ]
            view = View(FIRST + 1_000, frozenset(), frozenset())
            assert await committed(harness, view, cached=False) == seen
            assert await committed(harness, view, cached=True) == seen

    trio.run(course)


@pytest.mark.parametrize("cached", [True, False])
async def test_a_page_that_ends_inside_a_batch_is_resumed_inclusively_and_exclusively_with_exactly_the_rest(cached):
    """54: with any limit, a batch is either completely below the watermark or absent."""
    async with actors() as harness:
        await harness.create()
        await harness.publish("before")
        receipt = await harness.publish(*"abcdefgh", atomic=True, producer="p", sequence_ids=range(8))
        await harness.publish("after")
        everything = list((await harness.page(cached=cached)).messages())
        assert [payload for _, payload in everything] == [b"before", *[b"%c" % each for each in b"abcdefgh"], b"after"]
        assert (everything[1][0], everything[8][0]) == (receipt.first_id, receipt.last_id)
        for start in range(len(everything)):
            for limit in range(1, len(everything) + 1):
                inclusive = await harness.page(everything[start][0], limit, cached=cached)
                assert list(inclusive.messages()) == everything[start : start + limit]
                exclusive = await harness.page(after(everything[start][0]), limit, cached=cached)
                assert list(exclusive.messages()) == everything[start + 1 : start + 1 + limit]


async def test_a_batch_is_seen_by_a_poll_whole_or_not_at_all():
    """42: the span of a look ends before or after a batch, never inside."""
    async with actors() as harness:
        await harness.create()
        bounds = set()
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(lambda number=number: harness.publish(*[f"{number}"] * 50, atomic=True))
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
                    bounds.add(len(await harness.read()))
        assert {count % 50 for count in bounds} == {0}
        assert len(await harness.read()) == 1_000


async def test_transactional_readers_see_batches_up_to_the_first_undecided_message():
    """53: they have no pointer, and no transaction service is involved; an earlier open transaction holds readers."""
    async with actors() as harness:
        await harness.create()
        await harness.publish("a", "b", atomic=True)
        await publish(harness, FIRST, "open")
        await harness.publish("c", "d", atomic=True)
        view = View(FIRST + 1_000, frozenset([FIRST]), frozenset())
        page = await read_page(harness.store, None, await harness.look(), limit=100, max_bytes=10**9, view=view)
        assert [payload for _, payload in page.messages()] == [b"a", b"b"]
        assert (page.end, page.held.write_pointer, page.held.hidden_messages) == ("held", FIRST, 3)


async def test_attributes_are_removed_with_their_message():
    async with actors() as harness:
        await harness.create(ttl_s=10)
        await harness.publish("a", "b", attributes=[{"k": "v"}, {}], message_ttls_s=[1, None])
        harness.clock.ms += 500
        for cached in (True, False):
            assert (await harness.page(cached=cached)).attributes == {0: {"k": "v"}}
        harness.clock.ms += 600
        for cached in (True, False):
            page = await harness.page(cached=cached)
            assert ([payload for _, payload in page.messages()], page.attributes) == ([b"b"], {})
