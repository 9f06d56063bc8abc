"""Quotas: buckets filled by the clock, refusals with the time to retry, and independence of names."""

from __future__ import annotations

import gzip
import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from wsproto.events import AcceptConnection

from broker.http.gate import CUT, PEER
from broker.security.grants import parse_grants
from broker.security.identity import Identity
from broker.security.peer import ConnectionSlot, Peer
from broker.security.quotas import MAX_BUCKETS, Quotas
from plainsong.protocol.errors import QuotaExceeded
from tests.broker.stream_talk import knock, request
from tests.patience import PATIENCE_S
from tests.security.named import GRANTS, named

T = "/v1/namespaces/ns/topics"


class Clock:
    s = 100.0

    def __call__(self):
        return self.s


def quotas(text, clock=None, **more):
    made = Quotas(clock or Clock(), **more)
    made.replace(parse_grants(f"format = 1\n{text}".encode()))
    return made


BYTES = '[[quota]]\nto = ["*"]\npublish_bytes_per_s = 1000\n'
A, B = Identity("a"), Identity("b")


def publish(made, who, size, topic="t"):
    made.enter(who, "publish", "ns", topic, size)


def test_a_bucket_holds_two_seconds_worth_and_fills_by_the_clock():
    clock = Clock()
    made = quotas(BYTES, clock)
    publish(made, A, 2000)
    with pytest.raises(QuotaExceeded) as caught:
        publish(made, A, 1)
    error = caught.value
    assert (error.code, error.outcome, error.retry_after_s) == ("quota_exceeded", "not-applied", 1)
    assert error.policy == '"publish_bytes_per_s";q=1000;w=1;qu="content-bytes"'
    assert error.state == '"publish_bytes_per_s";r=0;t=1'
    clock.s += 1
    publish(made, A, 1000)


def test_a_request_larger_than_the_bucket_is_accepted_when_it_is_full_and_owes_the_rest():
    clock = Clock()
    made = quotas(BYTES, clock)
    publish(made, A, 5000)
    clock.s += 2.5
    with pytest.raises(QuotaExceeded) as caught:
        publish(made, A, 5000)
    assert caught.value.retry_after_s == 3
    clock.s += 2.5
    publish(made, A, 5000)


def test_each_name_has_its_own_bucket_and_a_topic_one_for_all():
    made = quotas(BYTES)
    publish(made, A, 2000)
    publish(made, B, 2000)
    shared = quotas('[[quota]]\non = ["ns:t*"]\npublish_bytes_per_s = 1000\n')
    publish(shared, A, 2000)
    publish(shared, B, 2000, "t2")
    publish(shared, B, 2000, "other")
    with pytest.raises(QuotaExceeded):
        publish(shared, B, 1)


def test_a_refused_request_takes_nothing_from_any_bucket():
    made = quotas('[[quota]]\nto = ["*"]\nrequests_per_s = 10\npublish_bytes_per_s = 1\n')
    publish(made, A, 2)
    for _ in range(50):
        with pytest.raises(QuotaExceeded):
            publish(made, A, 2)
    for _ in range(19):
        made.enter(A, "get_topic", "ns", "t", 0)


def test_the_difference_from_the_real_cost_is_owed():
    clock = Clock()
    made = quotas('[[quota]]\nto = ["*"]\npublish_messages_per_s = 10\npoll_bytes_per_s = 100\n', clock)
    publish(made, A, 1)
    made.owe(A, "ns", "t", "publish_messages_per_s", 50)
    with pytest.raises(QuotaExceeded):
        publish(made, A, 1)
    made.enter(A, "poll", "ns", "t", 0)
    made.owe(A, "ns", "t", "poll_bytes_per_s", 1_000)
    with pytest.raises(QuotaExceeded) as caught:
        made.enter(A, "poll", "ns", "t", 0)
    assert caught.value.retry_after_s == 8
    made.enter(B, "poll", "ns", "t", 0)


def test_several_processes_share_a_limit():
    made = quotas(BYTES, share=0.25)
    publish(made, A, 500)
    with pytest.raises(QuotaExceeded):
        publish(made, A, 1)


def test_parked_polls_are_counted_until_they_end():
    made = quotas('[[quota]]\nto = ["a"]\nparked_polls = 2\n')
    first, second = made.park(A, "ns", "t"), made.park(A, "ns", "t")
    with pytest.raises(QuotaExceeded):
        made.park(A, "ns", "t")
    made.park(B, "ns", "t")
    first()
    made.park(A, "ns", "t")()
    second()
    assert not made._counts


def test_a_name_without_a_quota_is_not_limited():
    made = quotas('[[quota]]\nto = ["a"]\nrequests_per_s = 1\n')
    assert made.concern(A)
    assert not made.concern(B)
    assert not quotas("").concern(A)


def test_a_stream_is_slowed_down_instead_of_refused():
    made = quotas(BYTES)
    assert made.pause_s(A, "ns", "t", 2000, 1) == 0
    assert made.pause_s(A, "ns", "t", 3000, 1) == 3.0
    assert made.pause_s(B, "ns", "t", 1, 1) == 0


@pytest.mark.parametrize("limit", ["requests_per_s", "publish_requests_per_s", "publish_messages_per_s"])
def test_a_stream_pays_for_each_request_however_many_come_at_once(limit):
    made = quotas(f'[[quota]]\nto = ["*"]\n{limit} = 10\n')
    assert made.pause_s(A, "ns", "t", 1, 20) == 0
    assert made.pause_s(A, "ns", "t", 1, 100) == 10.0


def frozen(daemon):
    """Stop the clock of the quotas, so that no bucket is filled, however long the requests take."""
    daemon.daemon.service.security.guard.quotas._now_s = Clock()


async def test_a_stream_of_events_that_pays_for_its_data_still_ends_with_its_token(tmp_path):
    async with named(tmp_path, listener="hot") as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        await daemon.ask("operator", "POST", f"{T}/a/publish", json={"messages": ["x" * 1000] * 20})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\npoll_bytes_per_s = 1\n')
        await daemon.reload()
        headers = daemon.files.header("reader")
        request = daemon.daemon.http.build_request("GET", f"{T}/a/events?from=0", headers=headers)
        stream = await daemon.daemon.http.send(request, stream=True)
        said = ""
        with trio.fail_after(PATIENCE_S):
            async for piece in stream.aiter_text():
                said += piece
                if "error" not in said:  # the bytes sent so far cost half a minute
                    daemon.files.change("reader", revoked_ms=1)
                    await daemon.reload()
        assert 'event: error\ndata: {"type": "/errors/unauthenticated"' in said
        await stream.aclose()


@pytest.mark.parametrize("listener", ["hot", "application"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_compressed_publish_is_charged_by_its_decompressed_size(tmp_path, listener, chunked):
    async with named(tmp_path, listener=listener) as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["writer"]\npublish_bytes_per_s = 1000\n')
        await daemon.reload()
        frozen(daemon)
        packed = gzip.compress(json.dumps({"messages": ["x" * 100_000]}).encode())
        assert len(packed) < 1000

        async def pieces():
            yield packed

        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        body = {"content": pieces() if chunked else packed, "headers": headers}
        assert (await daemon.ask("writer", "POST", f"{T}/a/publish", **body)).status_code == 200
        answer = await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["y"]})
        assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
        assert int(answer.headers["retry-after"]) >= 98


def test_cached_names_are_bounded():
    made = quotas(BYTES)
    for number in range(MAX_BUCKETS + 100):
        publish(made, Identity(f"n{number}"), 1)
    assert made.buckets <= MAX_BUCKETS


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), max_size=40))
def test_no_name_gets_more_than_the_rate_and_one_burst_and_one_request(course):
    clock = Clock()
    made, begun_s, taken, largest = quotas(BYTES, clock), clock.s, 0, 0
    for pause_s, size in course:
        clock.s += pause_s
        try:
            publish(made, A, size)
        except QuotaExceeded:
            continue
        taken, largest = taken + size, max(largest, size)
    assert taken <= 2000 + 1000 * (clock.s - begun_s) + max(0, largest - 0) + 1e-6


JSON_BODY = {"messages": ["a", "b"]}
EVENT = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {}}
#: Requests that are answered without a task of their own, and some that need one.
REQUESTS = {
    "plain": {"json": JSON_BODY},
    "with a query": {"json": JSON_BODY, "params": {"ttl": "60"}},
    "an event": {"content": json.dumps(EVENT), "headers": {"Content-Type": "application/cloudevents+json"}},
    "large": {"json": {"messages": ["x" * 300_000]}},
    "in chunks": {"content": [b'{"messages":', b'["a", "b"]}'], "headers": {"Content-Type": "application/json"}},
}


async def pieces(parts):
    for part in parts:
        yield part


@asynccontextmanager
async def writer_of(daemon):
    """A client with its own connections, since a connection that has used another route leaves the hot path."""
    base_url, headers = daemon.daemon.http.base_url, daemon.files.header("writer")
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, trust_env=False, verify=False, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.mark.parametrize("what", REQUESTS)
@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_each_publish_is_charged_once_however_it_is_answered(tmp_path, listener, what):
    async with named(tmp_path, listener=listener) as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        quota = (
            '[[quota]]\nto = ["writer"]\nconnections = 2\npublish_requests_per_s = 3\npublish_messages_per_s = 1000\n'
        )
        daemon.files.grant(GRANTS + quota)
        await daemon.reload()
        limits = daemon.daemon.service.security.guard.quotas
        limits._now_s = Clock()
        statuses = []
        async with writer_of(daemon) as writer:
            for _ in range(8):
                more = dict(REQUESTS[what])
                if isinstance(more.get("content"), list):
                    more["content"] = pieces(more["content"])
                statuses.append((await writer.post(f"{T}/a/publish", **more)).status_code)
        assert statuses == [200] * 6 + [429] * 2
        metrics = (await daemon.ask("operator", "GET", "/metrics")).text
        assert 'plainsong_quota_refusals_total{quota="publish_requests_per_s"} 2.0' in metrics
        levels = {limit: bucket.level for (_, _, limit), bucket in limits._buckets.items()}
        messages = 2000 - 6 * (2 if what in ("plain", "with a query", "in chunks") else 1)
        assert levels == {"publish_requests_per_s": 0, "publish_messages_per_s": messages}


async def test_a_name_within_its_quota_is_answered_without_a_task_and_beyond_it_by_a_task(tmp_path, monkeypatch):
    async with named(tmp_path, listener="hot") as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["writer"]\nconnections = 2\npublish_requests_per_s = 3\n')
        await daemon.reload()
        guard = daemon.daemon.service.security.guard
        guard.quotas._now_s = Clock()
        by_task, entered = [], guard.enter

        def enter(*args):
            by_task.append(args)
            entered(*args)

        monkeypatch.setattr(guard, "enter", enter)
        async with writer_of(daemon) as writer:
            body = {"messages": ["m"]}
            statuses = [(await writer.post(f"{T}/a/publish", json=body)).status_code for _ in range(7)]
        assert statuses == [200] * 6 + [429]
        assert len(by_task) == 2  # the first, which counts the connection, and the last, which is refused


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_name_over_its_quota_is_refused_with_429_and_others_continue(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon:
        frozen(daemon)
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        quota = (
            '[[quota]]\nto = ["writer"]\npublish_requests_per_s = 1\n[[quota]]\nto = ["owner"]\nopen_transactions = 1\n'
        )
        daemon.files.grant(GRANTS + quota)
        await daemon.reload()
        found = [await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]}) for _ in range(6)]
        statuses = [each.status_code for each in found]
        assert statuses == [200, 200, 429, 429, 429, 429]
        over = found[2]
        assert over.json()["code"] == "quota_exceeded"
        assert over.headers["ratelimit-policy"] == '"publish_requests_per_s";q=1;w=1'
        assert over.headers["ratelimit"].startswith('"publish_requests_per_s";r=0;t=')
        assert int(over.headers["retry-after"]) >= 1
        for _ in range(6):
            assert (await daemon.ask("owner", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200
        assert (await daemon.ask("owner", "POST", "/v1/transactions")).status_code == 200
        assert (await daemon.ask("owner", "POST", "/v1/transactions")).status_code == 429
        assert (await daemon.ask("other", "POST", "/v1/transactions")).status_code == 200
        text = (await daemon.ask("operator", "GET", "/metrics")).text
        assert 'plainsong_quota_refusals_total{quota="publish_requests_per_s"}' in text


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_pages_are_cut_to_the_remaining_quota_and_have_at_least_one_message(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon:
        frozen(daemon)
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        await daemon.ask("operator", "POST", f"{T}/a/publish", json={"messages": ["x" * 1000] * 20})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\npoll_bytes_per_s = 3000\n')
        await daemon.reload()
        counts, position = [], None
        for _ in range(5):
            body = {"limit": 20} if position is None else {"limit": 20, "startFrom": position, "inclusive": False}
            answer = await daemon.ask("reader", "POST", f"{T}/a/poll", json=body)
            if answer.status_code == 429:
                break
            counts.append(len(answer.json()))
            assert answer.headers["plainsong-end"] == "more"
            position = answer.headers["plainsong-last-id"]
        # A bucket of 6000 bytes has room for five messages of this size as JSON; the next one goes into debt.
        assert counts == [5, 1]
        assert answer.headers["ratelimit-policy"] == '"poll_bytes_per_s";q=3000;w=1;qu="content-bytes"'
        assert answer.headers["ratelimit"].startswith('"poll_bytes_per_s";r=0;t=')
        other = await daemon.ask("owner", "POST", f"{T}/a/poll", json={"limit": 20})
        assert len(other.json()) == 20


async def test_a_stream_whose_requests_exceed_its_quota_is_read_more_slowly(tmp_path, monkeypatch):
    async with named(tmp_path, listener="hot") as daemon:
        await daemon.ask("operator", "PUT", f"{T}/t", json={})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["writer"]\nrequests_per_s = 5\n')
        await daemon.reload()
        frozen(daemon)
        pauses, pause_s = [], Quotas.pause_s

        def paid(self, *charged):
            pauses.append(pause_s(self, *charged))
            return 0.0

        monkeypatch.setattr(Quotas, "pause_s", paid)
        credential = [(b"authorization", daemon.files.header("writer")["Authorization"].encode())]
        async with knock(daemon.daemon, extra_headers=credential) as (stream, opened):
            assert isinstance(opened, AcceptConnection), opened
            for first in (0, 30):
                await stream.send(*(request(number, b"m") for number in range(first, first + 30)))
                assert len(await stream.answers(30)) == 30
            await stream.send(request(60, b"m"))
            await stream.answers(1)
        # All but the last are charged when it arrives; the bucket has ten.
        assert max(pauses) >= (60 - 10) / 5


async def test_the_entries_of_a_chain_are_charged_like_polls_since_they_come_with_messages(tmp_path):
    async with named(tmp_path) as daemon:
        frozen(daemon)
        await daemon.ask("operator", "PUT", f"{T}/a", json={"chain": "sha256"})
        for _ in range(10):
            await daemon.ask("operator", "POST", f"{T}/a/publish", json={"messages": ["x" * 1000]})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\npoll_bytes_per_s = 1500\n')
        await daemon.reload()
        first = (await daemon.ask("reader", "GET", f"{T}/a/chain/entries")).json()
        assert 1 <= len(first["messages"]) < 10
        assert first["next"] is not None
        answer = await daemon.ask("reader", "GET", f"{T}/a/chain/entries")
        assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")


async def test_an_avro_answer_that_is_never_cut_is_charged_in_full(tmp_path):
    async with named(tmp_path, poll__max_bytes=1024) as daemon:
        frozen(daemon)
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        await daemon.ask("operator", "POST", f"{T}/a/publish", json={"messages": ["x" * 1000] * 20})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\npoll_bytes_per_s = 1000\n')
        await daemon.reload()
        avro = {"headers": {"content-type": "avro/binary"}, "content": bytes.fromhex("04010202")}
        whole = await daemon.ask("reader", "POST", f"{T}/a/poll", **avro)
        assert (whole.status_code, whole.content.count(b"x")) == (200, 20_000)
        over = await daemon.ask("reader", "POST", f"{T}/a/poll", **avro)
        assert over.status_code == 429
        assert int(over.headers["retry-after"]) >= 17


async def test_a_poll_of_many_topics_is_cut_to_the_remaining_quota(tmp_path):
    async with named(tmp_path) as daemon:
        frozen(daemon)
        for topic in "ab":
            await daemon.ask("operator", "PUT", f"{T}/{topic}", json={})
            await daemon.ask("operator", "POST", f"{T}/{topic}/publish", json={"messages": ["x" * 1000] * 20})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\npoll_bytes_per_s = 3000\n')
        await daemon.reload()
        many = {"json": {"topics": {"a": {}, "b": {}}}}
        found = (await daemon.ask("reader", "POST", "/v1/namespaces/ns/poll", **many)).json()["topics"]
        assert 2 <= sum(len(each["messages"]) for each in found.values()) <= 6
        assert {each["end"] for each in found.values()} == {"more"}


async def test_only_polls_that_wait_and_streams_of_events_count_as_parked(tmp_path):
    async with named(tmp_path, listener="hot") as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["reader"]\nparked_polls = 1\n')
        await daemon.reload()
        request = daemon.daemon.http.build_request("GET", f"{T}/a/events", headers=daemon.files.header("reader"))
        stream = await daemon.daemon.http.send(request, stream=True)
        assert stream.status_code == 200
        waiting = await daemon.ask("reader", "POST", f"{T}/a/poll", json={"waitMs": 50})
        assert waiting.status_code == 429
        assert waiting.headers["ratelimit-policy"] == '"parked_polls";q=1'
        assert waiting.headers["ratelimit"] == '"parked_polls";r=0;t=1'
        assert (await daemon.ask("reader", "POST", f"{T}/a/poll", json={})).status_code == 200
        many = {"topics": {"a": {}}}
        assert (await daemon.ask("reader", "POST", "/v1/namespaces/ns/poll", json=many)).status_code == 200
        many["waitMs"] = 50
        assert (await daemon.ask("reader", "POST", "/v1/namespaces/ns/poll", json=many)).status_code == 429
        assert (await daemon.ask("owner", "POST", f"{T}/a/poll", json={"waitMs": 50})).status_code == 200
        await stream.aclose()
        with trio.fail_after(PATIENCE_S):
            while (await daemon.ask("reader", "POST", f"{T}/a/poll", json={"waitMs": 1})).status_code == 429:
                pass  # the daemon notices the end a moment later


async def test_anonymous_probes_are_never_over_a_quota_of_every_name(tmp_path):
    async with named(tmp_path) as daemon:
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["*"]\nrequests_per_s = 1\n')
        await daemon.reload()
        for _ in range(10):
            assert (await daemon.ask(None, "GET", "/livez")).status_code == 200


def connected(daemon):
    return httpx.AsyncClient(base_url=str(daemon.daemon.http.base_url), verify=False, timeout=PATIENCE_S)


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_name_has_as_many_connections_as_its_quota_and_a_name_without_one_any_number(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon, AsyncExitStack() as stack:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["owner", "other"]\nconnections = 2\n')
        await daemon.reload()

        async def asked(http, name):
            return await http.post(f"{T}/a/publish", json={"messages": ["m"]}, headers=daemon.files.header(name))

        clients = [await stack.enter_async_context(connected(daemon)) for _ in range(4)]
        for http in clients[:2]:
            for _ in range(3):
                assert (await asked(http, "owner")).status_code == 200
        for _ in range(3):
            over = await asked(clients[2], "owner")
            assert (over.status_code, over.json()["code"]) == (429, "quota_exceeded")
            assert over.headers["ratelimit-policy"] == '"connections";q=2'
            assert over.headers["ratelimit"] == '"connections";r=0;t=1'
            assert over.headers["retry-after"] == "1"
            assert over.headers["connection"] == "close"
        for name in ("other", "writer", "writer"):
            assert (await asked(clients[3], name)).status_code == 200
        assert (await asked(clients[3], "owner")).status_code == 429  # owner's third, also after other names
        await clients[0].aclose()
        with trio.fail_after(PATIENCE_S):
            while (await asked(clients[2], "owner")).status_code == 429:
                pass  # the daemon notices the end a moment later
        # A change of the file keeps the count of open connections.
        daemon.files.grant("# again\n" + GRANTS + '\n[[quota]]\nto = ["owner"]\nconnections = 2\n')
        await daemon.reload()
        late = await stack.enter_async_context(connected(daemon))
        assert (await asked(late, "owner")).status_code == 429


async def test_a_name_creates_as_many_topics_as_its_quota_whatever_others_create(tmp_path):
    more = '[[grant]]\nto = ["owner", "other"]\nverbs = ["admin"]\non = ["ns:*"]\n'
    async with named(tmp_path) as daemon:
        daemon.files.grant(GRANTS + more + '[[quota]]\nto = ["owner", "other"]\ntopics = 2\n')
        await daemon.reload()

        async def created(name, topic, query=""):
            return await daemon.ask(name, "PUT", f"{T}/{topic}{query}", json={})

        for topic in ("o1", "o2", "o3"):
            assert (await created("operator", topic)).status_code == 200
        assert (await created("owner", "a")).status_code == 200
        answers = [None] * 8

        async def create(number):
            answers[number] = await created("owner", f"at-once-{number}")

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(create, number)
        assert sorted(each.status_code for each in answers) == [200] + [429] * 7
        over = next(each for each in answers if each.status_code == 429)
        assert over.json()["code"] == "quota_exceeded"
        assert over.headers["ratelimit-policy"] == '"topics";q=2'
        assert over.headers["ratelimit"] == '"topics";r=0;t=1'
        # An existing topic may be created again; a new one is refused, also in a dry run.
        assert (await created("owner", "a", "?ifNotExists=true")).status_code == 200
        assert (await created("owner", "o1", "?ifNotExists=true")).status_code == 200
        assert (await created("owner", "c", "?ifNotExists=true")).status_code == 429
        assert (await created("owner", "c", "?dryRun=true")).status_code == 429
        assert (await created("other", "b")).status_code == 200
        # Deleting one makes room; restoring it is one too many again.
        assert (await daemon.ask("owner", "DELETE", f"{T}/a")).status_code == 200
        assert (await created("owner", "d")).status_code == 200
        assert (await daemon.ask("owner", "POST", f"{T}/a/undelete")).status_code == 429
        assert (await daemon.ask("operator", "POST", f"{T}/a/undelete")).status_code == 200


async def test_transactions_that_begin_at_once_are_no_more_than_the_quota(tmp_path):
    async with named(tmp_path) as daemon:
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["owner"]\nopen_transactions = 3\n')
        await daemon.reload()
        answers = []

        async def begin():
            answers.append(await daemon.ask("owner", "POST", "/v1/transactions"))

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(begin)
        assert sorted(each.status_code for each in answers) == [200] * 3 + [429] * 9
        over = next(each for each in answers if each.status_code == 429)
        assert over.headers["ratelimit-policy"] == '"open_transactions";q=3'


async def test_one_connection_too_many_over_http_2_is_answered_and_ends(tmp_path):
    async with named(tmp_path) as daemon:
        daemon.files.grant(GRANTS + '[[quota]]\nto = ["owner"]\nconnections = 1\n')
        await daemon.reload()

        async def asked(peer):
            """Return the status, and whether the connection was closed afterwards."""
            cut, sent = [], []
            headers = [(name.lower().encode(), value.encode()) for name, value in daemon.files.header("owner").items()]
            scope = {
                "type": "http",
                "http_version": "2",
                "method": "GET",
                "scheme": "https",
                "path": "/v1/whoami",
                "raw_path": b"/v1/whoami",
                "root_path": "",
                "query_string": b"",
                "headers": [(b"host", b"localhost"), *headers],
                "client": None,
                "server": None,
                "extensions": {PEER: peer, CUT: lambda: cut.append(len(sent))},
            }

            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message):
                sent.append(message)

            await daemon.daemon.asgi(scope, receive, send)
            return sent[0]["status"], cut == [len(sent)]

        first = Peer("10.0.0.1:1", tls=True, slot=ConnectionSlot())
        assert await asked(first) == (200, False)
        assert await asked(first) == (200, False)
        assert await asked(Peer("10.0.0.1:2", tls=True, slot=ConnectionSlot())) == (429, True)
        daemon.daemon.service.security.guard.quotas.disconnect(first.slot)
        assert await asked(Peer("10.0.0.1:3", tls=True, slot=ConnectionSlot())) == (200, False)
