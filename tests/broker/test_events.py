"""A topic's messages as server-sent events: start, keep-alives, end and resumption of a stream."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import aclosing, asynccontextmanager

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from event_source import EventSource, event_source, take
from test_committed_polls import begin, decide, take_away, under

import broker.api.messages.events as events
from plainsong.protocol.names import TopicName
from tests.handling import subject_of
from tests.patience import PATIENCE_S
from tests.waiting import until

EVENTS = f"{TOPICS}/t/events"
NAME = TopicName("ns", "t")


@pytest.fixture(params=["hot", "application"])
async def daemon(request):
    async with in_process(listener=request.param) as running:
        await running.create()
        yield running


@asynccontextmanager
async def following(daemon, query="", **headers):
    async with event_source(daemon.http.base_url, EVENTS + query, **headers) as source:
        yield source


def parked(daemon):
    core = daemon.service.directory.entry(NAME).actor.core
    return 0 if core is None else len(core.parking)


def payloads(found):
    return [event.value["payload"] for event in found]


def streams(daemon):
    (line,) = [
        line for line in daemon.service.metrics.render()[0].decode().splitlines() if "plainsong_event_streams " in line
    ][-1:]
    return float(line.split()[-1])


# --- events ----------------------------------------------------------------------------------------


async def test_a_stream_begins_now_and_each_message_arrives_as_it_is_published(daemon):
    await daemon.publish("before")
    async with following(daemon) as source:
        await until(lambda: parked(daemon))
        first, _ = await daemon.publish("one", {"payload": "two\nlines", "attributes": {"a": "ä"}})
        found = await take(source, 2)
        assert [event.kind for event in found] == ["message", "message"]
        assert found[0].value == {"id": first, "publishTimeMs": START_MS, "payload": "one", "attributes": {}}
        assert (found[1].value["payload"], found[1].value["attributes"]) == ("two\nlines", {"a": "ä"})
        assert [event.last_event_id for event in found] == [event.value["id"] for event in found]
        await daemon.publish("three")
        assert payloads(await take(source, 1)) == ["three"]


async def test_a_stream_begins_at_the_requested_position(daemon):
    _, last = await daemon.publish("a", "b", ms=START_MS)
    await daemon.publish("c", ms=START_MS + 10)
    for query, expected in (("0", "abc"), (last, "bc"), (str(START_MS + 1), "c")):
        async with following(daemon, f"?from={query}") as source:
            assert "".join(payloads(await take(source, len(expected)))) == expected


async def test_a_client_that_reconnects_continues_after_its_last_event(daemon):
    async with following(daemon, "?from=0") as source:
        await daemon.publish("a", "b", "c")
        await take(source, 2)
        last = source.last_event_id
    async with following(daemon, "?from=0", **{"Last-Event-ID": last}) as source:
        assert payloads(await take(source, 1)) == ["c"]


async def test_a_client_that_was_cut_off_before_the_first_event_misses_none(daemon):
    await daemon.publish("before")
    async with following(daemon) as source:
        await until(lambda: parked(daemon))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, source, 1)  # only the event that carries the starting position
            await until(lambda: source.last_event_id)
            nursery.cancel_scope.cancel()
        last = source.last_event_id
        assert len(last) == 40
        assert source.retry_ms == 2000
    await daemon.publish("meanwhile")
    async with following(daemon, **{"Last-Event-ID": last}) as source:
        assert payloads(await take(source, 1)) == ["meanwhile"]


async def test_binary_payloads_are_base64_and_all_are_on_request(daemon):
    await daemon.publish({"base64": "AP8="}, "text", "")
    async with following(daemon, "?from=0") as source:
        assert payloads(await take(source, 3)) == [{"base64": "AP8="}, "text", ""]
    async with following(daemon, "?from=0&payload=base64") as source:
        assert payloads(await take(source, 3)) == [{"base64": "AP8="}, {"base64": "dGV4dA=="}, {"base64": ""}]


async def test_a_stream_with_a_limit_ends_after_that_many_messages(daemon):
    await daemon.publish(*"abcdef")
    async with following(daemon, "?from=0&limit=3") as source:
        found = [event async for event in source]
    assert payloads(found[:3]) == ["a", "b", "c"]
    assert [event.kind for event in found[3:]] == ["end"]
    assert found[3].value == {"lastId": found[2].value["id"]}


async def test_a_topic_of_many_pages_is_streamed_whole_and_in_order(daemon, monkeypatch):
    monkeypatch.setattr(events, "PAGE_MESSAGES", 7)
    expected = [str(number) for number in range(100)]
    await daemon.publish(*expected[:60])
    async with following(daemon, "?from=0&limit=100") as source:
        await daemon.publish(*expected[60:])
        assert payloads([event async for event in source][:-1]) == expected


# --- isolation -------------------------------------------------------------------------------------


async def test_a_committed_stream_reports_at_once_what_holds_it_and_continues_after_the_decision(daemon):
    async with following(daemon, "?isolation=committed") as source:
        await until(lambda: parked(daemon))
        begun = await begin(daemon)
        await under(daemon, begun, "one")
        await daemon.publish("behind")
        (held,) = await take(source, 1)
        said = {"heldBy": str(begun["id"]), "heldSince": START_MS, "hiddenMessages": held.value["hiddenMessages"]}
        assert (held.kind, held.value) == ("held", said)
        assert held.value["hiddenMessages"] in ("1", "2")
        await under(daemon, begun, "two")
        await decide(daemon, begun, "commit")
        assert payloads(await take(source, 3)) == ["one", "behind", "two"]


async def test_each_transaction_that_holds_a_stream_is_reported_once(daemon):
    first, second = await begin(daemon), await begin(daemon)
    await daemon.publish("plain")
    await under(daemon, first, "one")
    await under(daemon, second, "two")
    async with following(daemon, "?isolation=committed&from=0") as source:
        found = await take(source, 2)
        assert [event.kind for event in found] == ["message", "held"]
        assert found[1].value["heldBy"] == str(first["id"])
        await decide(daemon, first, "abort")
        (held,) = await take(source, 1)
        assert (held.kind, held.value["heldBy"]) == ("held", str(second["id"]))
        await decide(daemon, second, "commit")
        assert payloads(await take(source, 1)) == ["two"]


async def test_while_the_transaction_service_is_unavailable_a_committed_stream_serves_decided_messages(
    daemon, monkeypatch
):
    await daemon.publish("plain")
    begun = await begin(daemon)
    await under(daemon, begun, "undecided")
    take_away(daemon, monkeypatch)
    async with following(daemon, "?isolation=committed&from=0") as source:
        found = [event async for event in source]
    assert [event.kind for event in found] == ["message", "error"]
    assert found[1].value["code"] == "transactions_unavailable"


# --- keep-alives and the end -----------------------------------------------------------------------


async def test_an_idle_stream_sends_keep_alives(daemon, monkeypatch):
    monkeypatch.setattr(events, "PING_S", 0.02)
    async with following(daemon) as source:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, source, 1)
            await until(lambda: source.comments >= 3)
            await daemon.publish("at last")
        assert parked(daemon) in (0, 1)


async def test_a_stream_counts_as_a_parked_poll_and_their_number_is_bounded():
    async with in_process(listener="hot", topic__max_parked_polls=2) as daemon:
        await daemon.create()
        async with following(daemon), following(daemon) as second:
            await until(lambda: parked(daemon) == 2)
            assert streams(daemon) == 2
            await daemon.call("GET", EVENTS, status=503, code="overloaded")
            await daemon.call("POST", f"{TOPICS}/t/poll", json={"waitMs": 1000}, status=503, code="overloaded")
            await daemon.publish("one")
            assert payloads(await take(second, 1)) == ["one"]
        await until(lambda: parked(daemon) == 0)
        await until(lambda: streams(daemon) == 0)


async def test_the_number_of_open_streams_is_bounded_and_none_is_counted_twice(daemon, monkeypatch):
    (polling,) = [subject_of(each) for each in daemon.service.endpoints if each.route.name == "follow"]
    polling.streams.max_streams = 1
    async with following(daemon):
        await daemon.call("GET", EVENTS, status=503, code="overloaded")
    await until(lambda: streams(daemon) == 0)
    async with following(daemon):
        assert streams(daemon) == 1


async def test_a_stopping_daemon_ends_its_streams_with_the_position_to_continue_from(daemon):
    _, last = await daemon.publish("a")
    async with following(daemon, "?from=0") as source:
        await take(source, 1)
        await until(lambda: parked(daemon))
        daemon.service.stop()
        (end,) = [event async for event in source]
        assert (end.kind, end.value["lastId"] >= last) == ("end", True)


async def test_a_held_stream_ends_when_the_daemon_stops(daemon):
    begun = await begin(daemon)
    await under(daemon, begun, "undecided")
    async with following(daemon, "?from=0&isolation=committed") as source:
        await take(source, 1)
        await until(lambda: daemon.service.pointers.waiters)
        daemon.service.stop()
        assert [event.kind async for event in source] == ["end"]


async def test_a_topic_that_is_deleted_ends_its_streams_with_the_problem(daemon):
    async with following(daemon) as source:
        await until(lambda: parked(daemon))
        await daemon.call("DELETE", f"{TOPICS}/t")
        found = [event async for event in source]
    assert [(event.kind, event.value["code"]) for event in found] == [("error", "topic_not_found")]


async def test_a_client_that_leaves_ends_its_stream(daemon):
    async with following(daemon):
        await until(lambda: parked(daemon))
    await until(lambda: not parked(daemon))
    await until(lambda: not daemon.service.answers.reserved_bytes)


async def test_a_head_request_opens_no_stream(daemon):
    answer = await daemon.call("HEAD", EVENTS)
    assert answer.headers["content-type"] == "text/event-stream"
    await until(lambda: streams(daemon) == 0)


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "headers", "status", "code"),
    [
        ("?from=x", {}, 400, "invalid_message_id"),
        ("?limit=0", {}, 400, "invalid_parameter"),
        ("?isolation=some", {}, 400, "invalid_parameter"),
        ("?payload=hex", {}, 400, "invalid_parameter"),
        ("?form=0", {}, 400, "invalid_parameter"),
        ("", {"Last-Event-ID": "x"}, 400, "invalid_message_id"),
        ("", {"Sec-Fetch-Site": "cross-site"}, 403, "forbidden"),
    ],
)
async def test_invalid_streams_are_refused_before_anything_is_sent(daemon, query, headers, status, code):
    await daemon.call("GET", EVENTS + query, status=status, code=code, headers=headers)
    await until(lambda: streams(daemon) == 0)


async def test_a_missing_topic_and_a_disabled_service_are_refused(daemon):
    await daemon.call("GET", f"{TOPICS}/none/events", status=404, code="topic_not_found")
    async with in_process(listener="hot", transactions__service="off") as without:
        await without.create()
        refused = {"status": 503, "code": "transactions_unavailable"}
        await without.call("GET", f"{EVENTS}?isolation=committed", **refused)


# --- other readers ---------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_prints_each_message_as_it_arrives(daemon):
    await daemon.publish("one")
    url = f"{daemon.http.base_url}".rstrip("/") + EVENTS + "?from=0"
    curl = await trio.lowlevel.open_process(["curl", "-sN", url], stdout=subprocess.PIPE)
    try:
        seen = b""
        with trio.fail_after(PATIENCE_S):
            while b"one" not in seen:
                seen += await curl.stdout.receive_some()
            await daemon.publish("two")
            while b"two" not in seen:
                seen += await curl.stdout.receive_some()
        lines = seen.decode().splitlines()
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert [each["payload"] for each in data] == ["one", "two"]
    finally:
        curl.kill()
        await curl.wait()


def test_the_event_reader_of_these_tests_follows_the_examples_of_the_standard():
    """The examples of WHATWG HTML, section 9.2.6."""

    async def pieces(text):
        for at in range(0, len(text), 3):
            yield text[at : at + 3].encode()

    async def read(text):
        async with aclosing(pieces(text)) as chunks:
            return [tuple(event) async for event in EventSource(chunks)]

    first = ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
    assert trio.run(read, first) == [
        ("message", "first event", "1"),
        ("message", "second event", ""),
        ("message", " third event", ""),
    ]
    assert trio.run(read, "data: YHOO\ndata: +2\ndata: 10\n\n") == [("message", "YHOO\n+2\n10", "")]
    assert trio.run(read, "event: add\ndata: 1\n\nevent: add\n\ndata: 2") == [("add", "1", "")]
