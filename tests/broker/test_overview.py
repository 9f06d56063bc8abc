"""The overview of topics: figures of open and closed ones, sort orders, pages; and the last hour of one topic."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import trio
from broker_in_process import START_MS, TOPICS
from test_committed_polls import begin, under

from broker import catalogue
from broker.api.operations import overview
from broker.catalogue import Catalogue
from broker.metrics import MINUTES, WINDOW_S, Minute, Rate, Rates
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import HIGH_WATER, metadata_key, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata
from tests.broker.cluster.in_process import cluster
from tests.patience import PATIENCE_S

ALL = "/v1/topics"
MINUTE_MS = 60_000


async def listed(daemon, query="", **more):
    return (await daemon.call("GET", ALL + query, **more)).json()


async def rows(daemon, query=""):
    return {f"{each['namespace']}:{each['name']}": each for each in (await listed(daemon, query))["topics"]}


async def names(daemon, query=""):
    return [each["name"] for each in (await listed(daemon, query))["topics"]]


async def close_topics(daemon):
    """Close every open topic, as if it had been idle."""
    directory = daemon.service.directory
    for entry in directory:
        directory._close_entry(entry)
    with trio.fail_after(PATIENCE_S):
        while directory.closing:
            await trio.lowlevel.checkpoint()
    assert len(directory) == 0


@pytest.mark.parametrize("open_", [True, False])
async def test_a_row_shows_the_content_of_a_topic_whether_it_is_open_or_not(daemon, open_):
    await daemon.create(ttl=600)
    await daemon.publish("abc", "defg")
    begun = await begin(daemon)
    await under(daemon, begun, "undecided")
    await daemon.publish("behind")
    daemon.clock.ms += 5_000
    stats = (await daemon.call("GET", f"{TOPICS}/t/stats")).json()
    if not open_:
        await close_topics(daemon)
    (row,) = (await listed(daemon))["topics"]
    rates = {name: row.pop(name) for name in ("publishPerSecond", "pollPerSecond")}
    # A minute may have ended in between, after which the rate decays.
    published = pytest.approx(stats["publishPerSecond"], rel=0.2) if open_ else 0
    assert rates == {"publishPerSecond": published, "pollPerSecond": 0}
    assert row == {
        "namespace": "ns",
        "name": "t",
        "messages": 4,
        "bytes": stats["bytes"],
        "estimated": False,
        "oldestAgeMs": 5_000,
        "openTransactions": 1,
        "hiddenMessages": 2,
        "parkedPolls": 0,
        "ttl": 600,
        "owner": None,
    }
    assert len(daemon.service.directory) == open_, "no topic was opened for it"


@pytest.mark.parametrize("open_", [True, False])
async def test_expired_messages_are_not_counted(daemon, open_):
    await daemon.create(ttl=600)
    await daemon.publish("old", ms=START_MS)
    await daemon.publish("new", "newer", ms=START_MS + 500_000)
    if not open_:
        await close_topics(daemon)
    daemon.clock.ms = START_MS + 700_000
    (row,) = (await listed(daemon))["topics"]
    assert (row["messages"], row["oldestAgeMs"], row["estimated"]) == (2, 200_000, False)
    if open_:  # rows of closed topics are read at most once a second
        daemon.clock.ms = START_MS + 2_000_000
        (row,) = (await listed(daemon))["topics"]
        assert (row["messages"], row["oldestAgeMs"]) == (0, None)


async def test_just_created_topics_are_listed_and_just_deleted_ones_are_not(daemon):
    assert (await listed(daemon)) == {"topics": [], "total": 0, "next": None}
    await daemon.create("a")
    await daemon.create("b")
    assert await names(daemon) == ["a", "b"]
    await daemon.call("DELETE", f"{TOPICS}/a")
    assert await names(daemon) == ["b"]


async def test_an_unreadable_store_is_reported_and_the_list_returns_with_it(daemon):
    await daemon.create("a")
    daemon.store.fail_next("scan")
    await daemon.call("GET", ALL, status=503, code="storage_failed")
    assert await names(daemon) == ["a"]


async def many(daemon):
    """Create topics in two namespaces, with 0 to 5 messages."""
    for namespace, topic, count in (("ns", "b", 3), ("ns", "a", 3), ("ns", "c", 1), ("x", "Orders", 5), ("x", "e", 0)):
        await daemon.call("PUT", f"/v1/namespaces/{namespace}/topics/{topic}")
        if count:
            body = {"messages": ["m"] * count}
            await daemon.call("POST", f"/v1/namespaces/{namespace}/topics/{topic}/publish", json=body)
            daemon.clock.ms += 1000


async def test_rows_are_sorted_by_any_column_and_equal_ones_by_name(daemon):
    await many(daemon)
    assert await names(daemon) == ["a", "b", "c", "Orders", "e"]
    assert await names(daemon, "?order=desc") == ["e", "Orders", "c", "b", "a"]
    assert await names(daemon, "?sort=messages") == ["e", "c", "a", "b", "Orders"]
    assert await names(daemon, "?sort=messages&order=desc") == ["Orders", "a", "b", "c", "e"]
    assert await names(daemon, "?sort=bytes&order=desc&limit=1") == ["Orders"]
    assert await names(daemon, "?sort=oldestAgeMs&order=desc") == ["b", "a", "c", "Orders", "e"]
    for column in ("publishPerSecond", "pollPerSecond", "hiddenMessages"):
        assert len(await names(daemon, f"?sort={column}")) == 5


async def test_rows_are_filtered_by_namespace_and_by_a_part_of_the_name(daemon):
    await many(daemon)
    assert await names(daemon, "?namespace=x") == ["Orders", "e"]
    assert await names(daemon, "?q=ORD") == ["Orders"]
    assert await names(daemon, "?q=x:") == ["Orders", "e"]
    assert (await listed(daemon, "?q=s:&limit=1"))["total"] == 3


@pytest.mark.parametrize("sort", ["name", "messages", "oldestAgeMs", "publishPerSecond"])
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_the_pages_of_a_list_have_every_topic_once_and_in_order(daemon, sort, order):
    await many(daemon)
    whole = await names(daemon, f"?sort={sort}&order={order}")
    seen, after = [], ""
    while after is not None:
        found = await listed(daemon, f"?sort={sort}&order={order}&limit=2{after and '&after=' + after}")
        assert found["total"] == 5
        seen += [each["name"] for each in found["topics"]]
        after = found["next"]
    assert seen == whole


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "sort=ttl", "order=up", "after=x", "after=x~ns:a", "namespace=a-b", "nq=1"]
)
async def test_invalid_lists_are_refused(daemon, query):
    answer = await daemon.call("GET", f"{ALL}?{query}", status=400)
    assert answer.json()["code"] in ("invalid_parameter", "invalid_name")


async def test_ten_thousand_closed_topics_are_listed_in_a_fifth_of_a_second_of_processor_time(daemon):
    operations = []
    for number in range(10_000):
        name = TopicName("ns", f"topic-{number:05}")
        metadata = Metadata(1, TopicProperties(ttl_s=3600 + number), START_MS, START_MS)
        buckets = [[START_MS + at, START_MS + at, number, 100 * number, 0] for at in range(5)]
        mark = HighWater(START_MS, START_MS + 9, 1, buckets, 5 * number)
        operations.append(put_one(Table.METADATA, metadata_key(name), metadata.encode()))
        operations.append(put_one(Table.METADATA, system_key(HIGH_WATER, name, 1), mark.encode()))
    claim = await daemon.store.claim(TopicName("ns", "t"))
    await daemon.store.write(operations, claim=claim)
    await listed(daemon)  # caches the decoded rows
    spent_s = []
    for _ in range(5):
        begun_s = time.process_time()
        found = await listed(daemon, "?sort=messages&order=desc&limit=500")
        spent_s.append(time.process_time() - begun_s)
        assert (found["total"], found["topics"][0]["name"]) == (10_000, "topic-09999")
    assert min(spent_s) < 0.2, spent_s
    assert len(daemon.service.directory) == 0


# --- history ---------------------------------------------------------------------------------------


async def test_the_history_of_a_topic_has_sixty_minutes_up_to_now(daemon):
    await daemon.create()
    await daemon.publish("abc", "de")
    await daemon.poll()
    found = (await daemon.call("GET", f"{TOPICS}/t/history")).json()
    assert found["stepMs"] == MINUTE_MS
    assert START_MS - 60 * MINUTE_MS < found["fromMs"] <= START_MS - 59 * MINUTE_MS
    # The minute may have ended between the two requests.
    assert [sum(found[name]) for name in ("published", "polled", "bytes")] == [2, 2, 5]
    assert [len(found[name]) for name in ("published", "polled", "bytes")] == [60] * 3
    await daemon.call("GET", f"{TOPICS}/none/history", status=404, code="topic_not_found")
    await daemon.call("GET", f"{TOPICS}/t/history?minutes=5", status=400, code="invalid_parameter")


async def test_the_history_of_a_closed_topic_is_shown_without_opening_it(daemon):
    await daemon.create()
    await daemon.publish("abc", "de")
    await close_topics(daemon)
    found = (await daemon.call("GET", f"{TOPICS}/t/history")).json()
    assert sum(found["published"]) == 2
    assert len(daemon.service.directory) == 0
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.call("GET", f"{TOPICS}/t/history", status=404, code="topic_not_found")


def test_a_history_advances_minute_by_minute_and_drops_entries_after_an_hour():
    rate, name = Rate(), TopicName("n", "t")
    rate.add(name, 5, 10 * WINDOW_S, 50)
    rate.add(name, 1, 11 * WINDOW_S, 10)
    rate.add(name, 1, 13.5 * WINDOW_S, 7)
    now = rate.history(name, 13.9 * WINDOW_S)
    assert now[-4:] == [Minute(5, 50), Minute(1, 10), Minute(), Minute(1, 7)]
    assert len(now) == MINUTES
    later = rate.history(name, (10 + MINUTES - 1) * WINDOW_S)
    assert (later[0], later[1], len(later)) == (Minute(5, 50), Minute(1, 10), MINUTES)
    assert rate.history(name, (10 + MINUTES) * WINDOW_S)[0] == Minute(1, 10)
    assert rate.history(name, 1000 * WINDOW_S) == [Minute()] * MINUTES
    assert Rates().polling.history(name, 0.0) == [Minute()] * MINUTES


# --- several instances -----------------------------------------------------------------------------


async def test_figures_of_topics_at_other_instances_are_requested():
    async with cluster("a", "b") as nodes:
        for name, owner in (("ns:t", "b"), ("ns:u", "a")):
            nodes.move(name, owner)
        for topic, count in (("t", 3), ("u", 2)):
            await nodes["a"].create(topic)
            await nodes["a"].publish(topic, *["x"] * count)
        for node in nodes.values():
            found = (await node.call("GET", ALL)).json()["topics"]
            known = {each["name"]: (each["messages"], each["publishPerSecond"] > 0, each["owner"]) for each in found}
            assert known == {"t": (3, True, nodes["b"].address), "u": (2, True, nodes["a"].address)}


class TurnCounter:
    """Counts how many topics one task handles in one iteration of the event loop."""

    def __init__(self, nursery):
        self.turn, self.looks = 0, []
        nursery.start_soon(self._count)

    async def _count(self):
        while True:
            self.turn += 1
            await trio.lowlevel.checkpoint()

    def counted(self, function):
        def call(*arguments, **more):
            self.looks.append(self.turn)
            return function(*arguments, **more)

        return call

    @property
    def most(self):
        return max(Counter(self.looks).values())


async def test_a_list_of_many_topics_is_made_in_pieces_and_other_requests_run_between_two(daemon, monkeypatch, nursery):
    monkeypatch.setattr(catalogue, "MANY", 2)
    for number in range(40):
        await daemon.create(f"t{number:02}")
    await close_topics(daemon)
    for number in range(20):
        await daemon.publish("m", topic=f"t{number:02}")
    found = {}
    for what in ("open", "stored", "sorted"):
        found[what] = TurnCounter(nursery)
    monkeypatch.setattr(Catalogue, "_open", found["open"].counted(Catalogue._open))
    monkeypatch.setattr(catalogue, "_counted", found["stored"].counted(catalogue._counted))
    monkeypatch.setitem(overview._KEYS, "messages", found["sorted"].counted(overview._KEYS["messages"]))
    assert len((await listed(daemon, "?sort=messages&limit=30"))["topics"]) == 30
    assert len(found["open"].looks) == 20
    assert len(found["stored"].looks) == 20 + 40  # the rows too
    assert len(found["sorted"].looks) == 40
    assert max(each.most for each in found.values()) <= 3 * 2  # whatever the order of the tasks
    nursery.cancel_scope.cancel()


async def test_many_topics_are_read_less_often():
    known = Catalogue(None, None, None, None, None, None, None, None)
    assert known.fresh_s == 1.0
    known._stored = dict.fromkeys(range(10_000))
    assert known.fresh_s == 3.0
    known._stored = dict.fromkeys(range(1_000_000))
    assert known.fresh_s == 10.0


async def test_a_thread_that_reads_the_rows_of_many_topics_pauses_even_if_their_decoded_form_is_cached(
    daemon, monkeypatch
):
    for number in range(10):
        await daemon.create(f"t{number}")
    await close_topics(daemon)
    naps, passed = [], itertools.count()
    monkeypatch.setattr(catalogue, "nap", naps.append)
    monkeypatch.setattr(
        catalogue, "thread_time", lambda: next(passed) * catalogue.WORK_S / 2
    )  # half of the limit for each row
    monkeypatch.setattr(catalogue, "FRESH_S", 0.0)
    monkeypatch.setattr(catalogue, "FRESH_S_EACH", 0.0)
    assert len((await listed(daemon))["topics"]) == 10
    first = len(naps)
    assert first >= 10 // 2 + 10 // 2 - 2  # for the rows of the topics and of their high-water marks
    await listed(daemon)
    assert len(naps) == 2 * first
