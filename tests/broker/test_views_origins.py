"""GET messages shows the producer, sequence id, attributes and batch of each message."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from broker_in_process import START_MS, TOPICS

from broker.api.messages import origins
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import generation_prefix, payload_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest
from plainsong.protocol.rows import MessageRow, Stored, encode_row
from storage.base import StoreError, Unreadable
from tests.codecs import AVRO, AVRO_2

LOOK = f"{TOPICS}/t/messages"
NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 1)


async def topic_of(daemon, rows):
    """Create a topic with rows ``(ms, sequence, row)``, and one plain message that makes all of them readable."""
    await daemon.create()
    puts = [
        put_one(Table.MESSAGE, PREFIX + pack_position(START_MS + ms, sequence), encode_row(row))
        for ms, sequence, row in rows
    ]
    await daemon.publish("last", ms=START_MS + 60_000)
    daemon.store.inner.apply(puts)
    cached = daemon.service.directory.budget
    cached.max_bytes = 0  # the cache does not contain rows that were put directly
    cached.changed(0)


#: Rows that may be removed one by one contain their index in the request; version 0.1 wrote it to every row.
FORMS = pytest.mark.parametrize("indexed", [False, True], ids=["rows without an index", "rows with an index"])


def followers(ms, indexes, first, *, indexed, pointer=None, payload=b"m"):
    """Return a request's rows after the first one."""
    rows = ((at, MessageRow(payload, pointer, extras={"i": at} if indexed else {})) for at in indexes)
    return [(ms, first + at, row) for at, row in rows]


def request_of(ms, count, producer, ids, *, first=0, pointer=None, indexed=False, **more):
    """Return the rows of one request, as a topic writes them."""
    stamp = {} if producer is None else {"d": [producer, 3, len(ids) if isinstance(ids, list) else count, ids]}
    rows = [(ms, first, MessageRow(b"m0", pointer, extras=stamp | more))]
    return rows + followers(ms, range(1, count), first, indexed=indexed, pointer=pointer)


async def look(daemon, **parameters):
    answer = await daemon.call("GET", LOOK, params=parameters)
    return [(each["producer"], each["sequenceId"], each["batch"]) for each in answer.json()]


NOTHING = (None, None, None)


@FORMS
async def test_each_message_of_a_request_is_shown_with_its_producer_and_its_own_sequence_id(daemon, indexed):
    rows = request_of(1, 3, "p", 7, indexed=indexed)
    await topic_of(daemon, rows + request_of(1, 3, "q", [5, 9, 900], first=3, indexed=indexed))
    shown = [("p", 7, None), ("p", 8, None), ("p", 9, None), ("q", 5, None), ("q", 9, None), ("q", 900, None)]
    assert await look(daemon) == [*shown, NOTHING]


@FORMS
async def test_a_message_of_a_batch_shows_its_place_in_it_with_a_producer_or_without(daemon, indexed):
    rows = request_of(1, 2, None, None, b=2, indexed=indexed)
    await topic_of(daemon, rows + request_of(2, 2, "p", 0, b=2, indexed=indexed))
    first, second = {"index": 0, "count": 2}, {"index": 1, "count": 2}
    assert await look(daemon) == [
        (None, None, first),
        (None, None, second),
        ("p", 0, first),
        ("p", 1, second),
        NOTHING,
    ]


@FORMS
@pytest.mark.parametrize("start", range(1, 5))
async def test_a_page_that_begins_inside_a_request_finds_its_first_row_with_one_read(daemon, start, indexed):
    await topic_of(daemon, request_of(1, 5, "p", 100, b=5, indexed=indexed))
    calls = Counter(daemon.store.calls)
    shown = await look(daemon, **{"from": pack_id(START_MS + 1, start).hex(), "limit": 5 - start})
    assert shown == [("p", 100 + at, {"index": at, "count": 5}) for at in range(start, 5)]
    more = daemon.store.calls - calls
    assert (more["get"], more["scan"]) == ((1, 1) if indexed else (0, 2))


@FORMS
async def test_a_request_that_spans_two_milliseconds_is_found_too(daemon, indexed):
    rows = request_of(1, 2, "p", 7, first=65_534, indexed=indexed)
    rows += followers(2, (2, 3), -2, indexed=indexed)
    rows[0] = (*rows[0][:2], MessageRow(b"m0", extras={"d": ["p", 3, 4, 7]}))
    await topic_of(daemon, rows)
    assert await look(daemon, **{"from": START_MS + 2}) == [("p", 9, None), ("p", 10, None), NOTHING]


@FORMS
async def test_a_first_row_that_is_missing_or_of_another_request_says_nothing_about_the_others(daemon, indexed):
    rows = [*request_of(1, 1, "p", 7), *request_of(1, 3, "q", 1, first=1, indexed=indexed)[1:]]
    await topic_of(daemon, [*rows, (9, 0, MessageRow(b"m"))])
    assert await look(daemon) == [("p", 7, None), NOTHING, NOTHING, NOTHING, NOTHING]
    assert await look(daemon, **{"from": pack_id(START_MS + 1, 2).hex()}) == [NOTHING] * 4


async def test_a_look_back_ends_where_no_request_can_have_continued(daemon):
    rows = request_of(1, 3, "p", 7) + followers(2, (0, 1), 0, indexed=False)
    await topic_of(daemon, rows + followers(4, (0, 1), 0, indexed=False))
    # The stamp says that the request continues, but only a request in a full millisecond continues in the next one.
    daemon.store.inner.apply(
        [
            put_one(
                Table.MESSAGE,
                PREFIX + pack_position(START_MS + 1, 0),
                encode_row(MessageRow(b"m0", extras={"d": ["p", 3, 1 << 20, 7]})),
            )
        ]
    )
    assert await look(daemon, **{"from": START_MS + 2}) == [NOTHING] * 5


class Mixed:
    """A topic with requests of all kinds within one millisecond, as in a busy topic, and again in a later one."""

    def __init__(self, daemon):
        self._daemon, self._sent = daemon, 0

    async def fill(self, turns=((0, False), (0, True), (1, False), (1, True))):
        """Publish 32 messages in each turn: its millisecond, and whether some of them have a time to live of their own."""
        await self._daemon.create()
        for ms, own in turns:
            self._daemon.clock.ms = START_MS + ms
            await self.publish(3)
            await self.publish(4, producer="p", own=own)
            await self.publish(1, producer="p")
            await self.stage()
            await self.publish(3, atomic=True, own=own)
            await self.publish(2)
            await self.publish(5, producer="q", atomic=True, routingKey="k", own=own)
            await self.stage()
            await self.publish(12)

    async def publish(self, count, *, own=False, **more):
        messages = [{"payload": f"{self._sent}-{number}"} for number in range(count)]
        for number, each in enumerate(messages):
            if "producer" in more:
                each["sequenceId"] = 100 * self._sent + 7 * number
            if own and number % 2:
                each["ttlSeconds"] = 3600
        self._sent += 1
        await self._daemon.publish(*messages, **more)

    async def stage(self):
        of = {"producer": "job", "sequenceIds": [self._sent]}
        await self._daemon.call(
            "POST", f"{TOPICS}/t/store", json={"producer": "job", "segment": "s", "messages": [f"{self._sent}-0"]}
        )
        await self._daemon.call("POST", f"{TOPICS}/t/publish", json={**of, "messages": [], "segments": ["s"]})
        self._sent += 1

    def producer_of(self, payload):
        """Return the message's producer, known from how the topic was filled."""
        return (None, "p", "p", "job", None, None, "q", "job", None)[int(payload.partition("-")[0]) % 9]

    def sequence_id_of(self, payload):
        request, number = map(int, payload.split("-"))
        return 100 * request + 7 * number if self.producer_of(payload) in ("p", "q") else None


async def test_each_message_has_its_own_origin_whatever_precedes_it(daemon):
    mixed = Mixed(daemon)
    await mixed.fill()
    every = (await daemon.call("GET", LOOK, params={"limit": 1000})).json()
    assert len(every) == 4 * 32
    for each in every:
        payload = each["payload"]
        wanted = (mixed.producer_of(payload), mixed.sequence_id_of(payload))
        assert (each["producer"], each["sequenceId"]) == wanted, payload
        count = {4: 3, 6: 5}.get(int(payload.partition("-")[0]) % 9)
        batch = None if count is None else {"index": int(payload.partition("-")[2]), "count": count}
        assert each["batch"] == batch, payload


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_the_origin_of_a_message_does_not_depend_on_the_page(daemon, order):
    await Mixed(daemon).fill([(0, False), (1, True)])
    every = (await daemon.call("GET", LOOK, params={"limit": 1000})).json()
    for at, limit, text in product(range(len(every)), (1, 3, 100), ("", "-1", "-4", "-11")):
        bound = {"from": every[at]["id"]} if order == "asc" else {"to": every[at]["id"]}
        part = every[at:] if order == "asc" else every[:at][::-1]
        wanted = [each for each in part if text in each["payload"]][:limit]
        shown = await daemon.call("GET", LOOK, params={**bound, "order": order, "filter": text, "limit": limit})
        assert shown.json() == wanted, (at, limit, text)


async def test_a_message_that_is_found_by_its_text_has_its_origin_though_none_around_it_is_shown(daemon):
    await daemon.create()
    await daemon.publish(*(f"-{number}-" for number in range(40)), atomic=True)
    every = (await daemon.call("GET", LOOK)).json()
    for at in range(1, 40):
        shown = await daemon.call("GET", LOOK, params={"from": every[1]["id"], "filter": f"-{at}-", "limit": 1})
        assert [each["batch"] for each in shown.json()] == [{"index": at, "count": 40}], at


async def test_origins_that_take_too_long_to_find_are_left_out(daemon, monkeypatch):
    await topic_of(daemon, request_of(1, 30, "p", 100))
    start = {"from": pack_id(START_MS + 1, 20).hex(), "limit": 1}
    assert await look(daemon, **start) == [("p", 120, None)]
    monkeypatch.setattr(origins, "MOST_PASSED", 20)
    assert await look(daemon, **start) == [("p", 120, None)]
    monkeypatch.setattr(origins, "MOST_PASSED", 19)
    assert await look(daemon, **start) == [NOTHING]
    monkeypatch.setattr(origins, "MOST_PASSED", 1000)
    monkeypatch.setattr(origins, "MOST_PASSED_BYTES", 19)
    assert await look(daemon, **start) == [NOTHING]


@FORMS
async def test_messages_after_an_unreadable_row_are_shown(daemon, indexed):
    await topic_of(daemon, request_of(1, 3, "p", 7, indexed=indexed))
    start = {"from": pack_id(START_MS + 1, 1).hex(), "limit": 1}
    if indexed:
        daemon.store.fail_next("get")
    else:
        daemon.store.fail_next("scan", after=1)
    assert await look(daemon, **start) == [NOTHING]
    assert await look(daemon, **start) == [("p", 8, None)]


class Damaged:
    """A store of requests' first rows, some of them unreadable."""

    def __init__(self, rows, *, scans=None, gets=()):
        self.rows, self.scans, self.gets, self.asked = rows, scans, dict(gets), []

    async def scan(self, *_, **__):
        raise self.scans

    async def get(self, table, key):
        self.asked.append(key)
        if key in self.gets:
            raise self.gets[key]
        return self.rows.get(key)


def of_requests(*rows):
    """Return the origins of messages ``(ms, index)`` whose requests start at the beginning of their millisecond."""
    found = origins.Origins()
    for ms, index in rows:
        extras = {} if index is None else {"i": index}
        found.meet(pack_id(ms, index or 1), MessageRow(b"m", extras=extras), None)
    return found


FIRSTS = {pack_position(ms, 0): encode_row(MessageRow(b"m", extras={"d": ["p", 3, 4, 10 * ms]})) for ms in range(1, 4)}


async def test_a_look_back_that_fails_hides_no_origin_that_others_lead_to():
    store = Damaged(FIRSTS, scans=Unreadable("damaged"))
    assert await of_requests((1, None), (2, 2)).find(store, b"") == {pack_id(2, 2): ("p", 22, None)}


async def test_a_first_row_that_is_damaged_hides_no_origin_of_other_requests():
    store = Damaged(FIRSTS, gets={pack_position(1, 0): Unreadable("damaged")})
    found = await of_requests((1, 1), (1, 2), (2, 2)).find(store, b"")
    assert found == {pack_id(2, 2): ("p", 22, None)}
    assert store.asked == [pack_position(1, 0), pack_position(2, 0)]


async def test_no_further_first_row_is_read_from_a_failing_store():
    store = Damaged(FIRSTS, gets={pack_position(2, 0): StoreError("away")})
    found = await of_requests((1, 1), (2, 2), (3, 3)).find(store, b"")
    assert found == {pack_id(1, 1): ("p", 11, None)}
    assert store.asked == [pack_position(1, 0), pack_position(2, 0)]


@pytest.mark.parametrize("extras", [{"d": ["p"]}, {"d": 7}, {"b": 0}, {"i": "x"}, {"b": "x", "d": ["p", 3, 1, 7]}])
@FORMS
async def test_a_stamp_that_cannot_be_read_hides_no_message(daemon, extras, indexed):
    await topic_of(daemon, [(1, 0, MessageRow(b"m", extras=extras)), *followers(1, (1,), 0, indexed=indexed)])
    assert await look(daemon) == [NOTHING] * 3
    assert await look(daemon, **{"from": pack_id(START_MS + 1, 1).hex()}) == [NOTHING] * 2


@FORMS
async def test_stored_messages_have_the_producer_of_their_publish_and_its_own_messages_have_its_ids(daemon, indexed):
    stored = [pack_position(START_MS - 100, at) for at in range(2)]
    extras = Stored(2, 2, stored[0], stored[1]).extras() | {"d": ["p", 3, 2, 7, 3]}
    rows = [(1, 0, MessageRow(None, 5, extras=extras))]
    rows += followers(1, (1, 2), 0, indexed=indexed, pointer=5)
    await topic_of(daemon, rows)
    value = encode_row(MessageRow(b"s", extras={"a": {"key": "text"}}))
    payloads = [put_one(Table.PAYLOAD, payload_prefix(NAME, 1, 5) + at, value) for at in stored]
    daemon.store.inner.apply(payloads)
    assert await look(daemon) == [("p", None, None), ("p", None, None), ("p", 7, None), ("p", 8, None), NOTHING]
    assert await look(daemon, **{"from": pack_id(START_MS + 1, 2).hex(), "limit": 1}) == [("p", 8, None)]
    shown = (await daemon.call("GET", LOOK)).json()
    assert [each["attributes"] for each in shown] == [{"key": "text"}] * 2 + [{}] * 3


async def test_attributes_are_returned_in_every_form_except_avro_version_1(daemon):
    strings = {"traceparent": "00-1", "é": "ü"}
    await topic_of(daemon, request_of(1, 2, "p", 7, a=strings))
    answers = {}
    for codec, accept in ((AVRO, "*/*"), (AVRO_2, "*/*"), (AVRO_2, FRAMES_TYPE), (AVRO_2, FRAMES_TYPE + "; version=2")):
        headers = {"Content-Type": codec.content_type, "Accept": accept}
        answer = await daemon.call(
            "POST", f"{TOPICS}/t/poll", content=codec.encode_poll(PollRequest()), headers=headers
        )
        answers[answer.headers["Content-Type"]] = answer.content
    assert [each.attributes for each in AVRO.decode_page(answers["avro/binary"])] == [{}, {}, {}]
    assert [each.attributes for each in AVRO_2.decode_page(answers["avro/binary; version=2"])] == [strings, {}, {}]
    assert [each.attributes for each in decode_frames(answers[FRAMES_TYPE])] == [{}, {}, {}]
    frames = decode_frames(answers[FRAMES_TYPE + "; version=2"], attributes=True)
    assert [each.attributes for each in frames] == [strings, {}, {}]
    shown = (await daemon.call("GET", LOOK)).json()
    assert [each["attributes"] for each in shown] == [strings, {}, {}]
    polled = (await daemon.call("POST", f"{TOPICS}/t/poll", json={})).json()
    assert [each.get("attributes") for each in polled] == [strings, None, None]
    asked = {"topics": {"t": {}}, "limit": 2}
    many = (await daemon.call("POST", "/v1/namespaces/ns/poll", json=asked)).json()["topics"]["t"]["messages"]
    assert [each.get("attributes") for each in many] == [strings, None]
