"""Findings that need an operator's attention, and the stream of changes to them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from event_source import event_source, take
from test_committed_polls import begin, decide, under

import broker.api.operations.overview as overview
from broker.attention import certificate_findings, stale_files
from broker.catalogue import Catalogue
from broker.finding import Finding
from broker.metrics import SlowCommit
from plainsong.protocol.errors import Recovering
from plainsong.protocol.ids import pack_id
from plainsong.protocol.names import TopicName
from tests.broker.cluster.in_process import cluster
from tests.patience import PATIENCE_S
from tests.waiting import until

ATTENTION = "/v1/attention"
EVENTS = "/v1/events"
MINUTE_MS = 60_000


@pytest.fixture(autouse=True)
def _nothing_is_slow(monkeypatch):
    """Raise the limits, so that a commit or an instance delayed by a stalled machine is not listed."""
    monkeypatch.setattr("broker.metrics.SLOW_COMMIT_S", 600.0)
    monkeypatch.setattr("broker.attention.ASK_TIMEOUT_S", PATIENCE_S)


async def needs(daemon):
    found = (await daemon.call("GET", ATTENTION)).json()
    return [(each["kind"], each["severity"], each["subject"]) for each in found]


async def test_a_healthy_daemon_needs_no_attention(daemon):
    await daemon.create()
    await daemon.publish("a")
    assert await needs(daemon) == []
    await daemon.call("GET", ATTENTION + "?limit=1", status=400, code="invalid_parameter")


async def test_the_client_whose_transaction_holds_readers_is_named(daemon):
    await daemon.create()
    begun = await begin(daemon, timeoutSeconds=3600, clientId="billing-7")
    await under(daemon, begun, "undecided")
    daemon.clock.ms += MINUTE_MS
    (found,) = (await daemon.call("GET", ATTENTION)).json()
    assert found["text"].startswith(f"Transaction {begun['id']} of billing-7 is undecided and hides 1 message")


async def test_a_transaction_that_holds_readers_is_named_after_a_minute_and_critical_after_ten(daemon):
    await daemon.create()
    begun = await begin(daemon, timeoutSeconds=3600)
    await under(daemon, begun, "undecided")
    await daemon.publish("behind")
    assert await needs(daemon) == []
    daemon.clock.ms += MINUTE_MS
    (found,) = (await daemon.call("GET", ATTENTION)).json()
    assert found == {
        "kind": "held-reader",
        "severity": "warning",
        "subject": "ns:t",
        "text": f"Transaction {begun['id']} is undecided and hides 2 messages from committed readers",
        "sinceMs": START_MS,
        "link": "/console/topics/ns/t",
    }
    daemon.clock.ms += 10 * MINUTE_MS
    assert await needs(daemon) == [
        ("held-reader", "critical", "ns:t"),
        ("old-transaction", "warning", str(begun["id"])),
    ]
    await decide(daemon, begun, "commit")
    assert await needs(daemon) == []


async def test_a_reader_whose_messages_expired_unread_is_named(daemon):
    await daemon.create(ttl=60)
    _, last = await daemon.publish("a", "b")
    for reader, position in (("late", pack_id(0, 0).hex()), ("done", last)):
        await daemon.call("PUT", f"{TOPICS}/t/readers/{reader}", json={"position": position})
    assert await needs(daemon) == []
    daemon.clock.ms += 2 * MINUTE_MS
    await daemon.publish("c")
    assert await needs(daemon) == [("expired-unread", "warning", "ns:t/late")]


async def test_a_filling_disk_is_a_warning_first_and_critical_when_publishes_are_refused(daemon):
    attention, space = daemon.service.attention, daemon.service.space
    space.free_bytes = 2 * attention._min_free_bytes - 1
    assert await needs(daemon) == [("disk", "warning", "")]
    space.low = True
    assert await needs(daemon) == [("low-space", "critical", "")]


async def test_a_slow_commit_is_shown_for_a_while(daemon, monkeypatch):
    monkeypatch.setattr("broker.metrics.SLOW_COMMIT_S", 1.0)
    metrics = daemon.service.metrics
    metrics.committed(1, 1, 0.5)
    assert await needs(daemon) == []
    metrics.committed(1, 1, 2.5)
    assert await needs(daemon) == [("slow-sync", "warning", "")]
    metrics.slow_commit = SlowCommit(2.5, metrics.slow_commit.at_s - 301)
    assert await needs(daemon) == []


async def test_a_topic_that_cannot_be_loaded_is_critical(daemon):
    await daemon.create()
    entry = next(iter(daemon.service.directory))
    entry.mailbox.closed_for = lambda: Recovering("the disk does not answer")
    assert await needs(daemon) == [("damaged", "critical", "ns:t")]
    entry.mailbox.closed_for = None


async def test_subsystems_add_findings_and_the_worst_comes_first(daemon):
    found = [Finding("certificate", "warning", f"{at:03}", "ends soon", 200 - at) for at in range(150)]
    found.append(Finding("audit", "critical", "", "lost", START_MS))
    daemon.service.attention.sources.append(lambda: found)
    seen = await needs(daemon)
    assert len(seen) == 100
    assert seen[0] == ("audit", "critical", "")
    assert seen[1] == ("certificate", "warning", "149"), "the longest first"


async def test_any_instance_reports_the_findings_of_all():
    async with cluster("a", "b", transactions__service="embedded") as nodes:
        nodes["b"].service.attention.sources.append(lambda: [Finding("disk", "warning", "b", "nearly full")])
        for node in nodes.values():
            assert await needs(node) == [("disk", "warning", "b")]
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        assert await needs(nodes["a"]) == [("instance", "critical", "b")]


# --- events ----------------------------------------------------------------------------------------


@pytest.fixture
async def served(monkeypatch):
    monkeypatch.setattr(overview, "STEP_S", 0.02)
    async with in_process(listener="hot") as running:
        await running.create()
        yield running


def following(daemon, query="", **headers):
    return event_source(daemon.http.base_url, EVENTS + query, **headers)


async def test_a_stream_begins_with_the_full_state_of_each_kind(served):
    await served.publish("a")
    async with following(served, "?topics=ns:t,ns:none") as source:
        found = {event.kind: event.value for event in await take(source, 4)}
        assert source.retry_ms == 2000
    assert list(found) == ["topics", "transactions", "attention", "cluster"]
    (row,) = (await served.call("GET", "/v1/topics")).json()["topics"]
    assert [each | {"publishPerSecond": 0} for each in found["topics"]] == [row | {"publishPerSecond": 0}]
    assert found["transactions"] == {"open": [], "total": 0}
    assert found["attention"] == []
    assert found["cluster"] == (await served.call("GET", "/v1/cluster")).json()


async def test_only_changes_are_sent_again(served):
    async with following(served, "?topics=ns:t&kinds=transactions,attention") as source:
        await take(source, 2)
        begun = await begin(served)
        (event,) = await take(source, 1)
        assert (event.kind, event.value["total"], event.value["open"][0]["id"]) == ("transactions", 1, str(begun["id"]))
        served.service.attention.sources.append(lambda: [Finding("disk", "warning", "", "nearly full")])
        (event,) = await take(source, 1)
        assert (event.kind, event.value[0]["kind"]) == ("attention", "disk")


async def test_a_new_message_is_a_change_and_a_growing_age_is_not(served):
    async with following(served, "?topics=ns:t&kinds=topics") as source:
        assert (await take(source, 1))[0].value[0]["messages"] == 0
        await served.publish("a")
        (event,) = await take(source, 1)
        assert event.value[0]["messages"] == 1


async def test_a_client_that_reconnects_gets_only_the_changes_since(served):
    query = "?topics=ns:t&kinds=transactions,attention,topics"
    async with following(served, query) as source:
        first, second, third = await take(source, 3)
        assert first.last_event_id != second.last_event_id != third.last_event_id
    await begin(served)
    await served.publish("meanwhile")
    async with following(served, query, **{"Last-Event-ID": third.last_event_id}) as source:
        assert sorted(event.kind for event in await take(source, 2)) == ["topics", "transactions"]
        served.service.attention.sources.append(lambda: [Finding("disk", "warning", "", "nearly full")])
        assert [event.kind for event in await take(source, 1)] == ["attention"]
        last = source.last_event_id
    # A client that missed two events with the same time also gets the first of them again.
    async with following(served, "?kinds=transactions,attention", **{"Last-Event-ID": first.last_event_id}) as source:
        assert [event.kind for event in await take(source, 2)] == ["transactions", "attention"]
    served.service.attention.sources.pop()
    async with following(served, "?kinds=transactions,attention", **{"Last-Event-ID": last}) as source:
        (event,) = await take(source, 1)
        assert (event.kind, event.value) == ("attention", [])


@pytest.mark.parametrize("last_id", ["x", "attention", "=,=", "attention=", "0" * 40, "attention=0,attention=1," * 100])
async def test_an_unknown_last_event_id_gets_everything(served, last_id):
    async with following(served, "?kinds=transactions,attention", **{"Last-Event-ID": last_id}) as source:
        assert [event.kind for event in await take(source, 2)] == ["transactions", "attention"]


async def test_a_silent_stream_pings_and_ends_when_its_daemon_stops(served, monkeypatch):
    monkeypatch.setattr(overview, "PING_S", 0.01)
    async with following(served, "?kinds=attention") as source:
        await take(source, 1)
        async with trio.open_nursery() as nursery:
            ended = []

            async def read():
                ended.extend([event.kind async for event in source])

            nursery.start_soon(read)
            await until(lambda: source.comments >= 2)
            served.service.stopping.set()
        assert ended == ["end"]


@pytest.mark.parametrize(("named", "looks"), [(1, 8), (overview.FEW_TOPICS, 8), (overview.FEW_TOPICS + 1, 2)])
async def test_few_topics_are_checked_four_times_a_second_and_everything_else_once(named, looks, autojump_clock):
    count = Counter()

    async def look(kind, request, topics):
        count[kind] += 1

    stream = SimpleNamespace(stopping=trio.Event(), _look=look)
    topics = [TopicName("ns", f"t{number}") for number in range(named)]
    changes = overview.Overview._changes(stream, None, ["attention", "topics"], topics, {})
    with trio.move_on_after(1.99):
        async for _ in changes:
            pass
    assert count == {"attention": 2, "topics": looks}


async def test_topics_of_other_instances_are_included(monkeypatch):
    monkeypatch.setattr(overview, "STEP_S", 0.02)
    async with cluster("a", "b", transactions__service="embedded") as nodes:
        nodes.move("ns:t", "b")
        await nodes["a"].create()
        for node in nodes.values():
            query = "?topics=ns:t&kinds=topics,transactions"
            async with event_source(f"http://{node.address}", EVENTS + query) as source:
                found = {event.kind: event.value for event in await take(source, 2)}
                assert found["topics"][0]["owner"] == nodes["b"].address
                assert found["transactions"]["total"] == 0


@pytest.mark.parametrize(
    "query", ["kinds=topic", "topics=t", "topics=ns:t%2F", "kind=topics", "topics=" + ",".join(["ns:t"] * 201)]
)
async def test_invalid_subscriptions_are_refused(served, query):
    answer = await served.call("GET", f"{EVENTS}?{query}", status=400)
    assert answer.json()["code"] in ("invalid_parameter", "invalid_name")


@pytest.mark.parametrize(
    ("days", "needed"),
    [
        (15, []),
        (13, [("certificate", "warning", "The certificate expires in 13.0 days")]),
        (-1, [("certificate", "critical", "The certificate has expired")]),
    ],
)
def test_a_certificate_that_expires_within_two_weeks_is_named(days: int, needed: list[tuple[str, str, str]]):
    served = SimpleNamespace(now=SimpleNamespace(not_after_s=1000.0 + days * 86_400), stale=None)
    found = certificate_findings(served, lambda: 1000.0)  # type: ignore[arg-type]
    assert [(each.kind, each.severity, each.text) for each in found] == needed


def test_security_files_that_failed_to_reload_are_named():
    assert stale_files(lambda: None) == []
    (found,) = stale_files(lambda: {"grants": "stale", "why": "grants: line 3 is no grant"})
    assert (found.kind, found.severity, found.subject) == ("reload", "warning", "security")
    assert "line 3" in found.text


async def test_a_stream_about_one_open_topic_checks_no_other(served, monkeypatch):
    for name in ("a", "b", "c"):
        await served.create(name)
    asked = []

    def figures(self, name, core, now_ms):
        asked.append(name.topic)
        return _open(self, name, core, now_ms)

    async def read(self):
        raise AssertionError("no row of another topic is needed")

    _open = Catalogue._open
    monkeypatch.setattr(Catalogue, "_open", figures)
    monkeypatch.setattr(Catalogue, "_read_rows", read)
    async with following(served, "?kinds=topics&topics=ns:b") as source:
        [found] = await take(source, 1)
    assert [each["name"] for each in found.value] == ["b"]
    assert set(asked) == {"b"}
