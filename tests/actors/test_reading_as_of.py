"""Pages as of a moment: where reading stops, what is cached, and a topic's guarantees for a moment that was read."""

from __future__ import annotations

import pytest
from actors_in_process import NAME, START_MS, actors
from transactional_topic import Topic, inline, plain, stored
from transactions_of_instances import OTHER, cluster_of

import plainsong.protocol.topic.reading as reading
from actors.reading import read_page
from plainsong.protocol.errors import AsOfTooOld, InvalidParameter, TransactionsUnavailable
from plainsong.protocol.ids import FIRST_BOUND, after, pack_id
from plainsong.protocol.keys import HIGH_WATER, system_key
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, Look, Publish
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.topic.state import Now, TopicState
from plainsong.protocol.transactions.view import Moment

PER_MS = 1_000_000


def moment(at_ms=START_MS, undecided=(), first=START_MS * PER_MS, last=(START_MS + 10_000) * PER_MS):
    return Moment(at_ms, frozenset(undecided), (), first, last)


def payloads(page):
    return [payload for _, payload in page.messages()]


# --- the walk ---------------------------------------------------------------------------------------


def test_reading_stops_at_a_row_whose_pointer_was_issued_after_the_moment():
    early, late = (START_MS - 5) * PER_MS, (START_MS + 5) * PER_MS
    topic = Topic([plain(0), inline(3, early), plain(4), inline(7, late), *(plain(10 + ms) for ms in range(50))])
    paging = Paging(topic.span(), 100, 10**6, moment().view())
    fed = 0
    for scan in paging.scans():
        for row in topic.tables[scan.table].walk(scan.start, scan.stop, reverse=False):
            fed += 1
            if not scan.feed([row]):
                break
    assert payloads(paging.page()) == [b"plain", b"inline"]
    assert paging.page().end == "end"
    assert fed == 4


def test_stored_messages_before_a_row_after_the_moment_are_read_although_they_are_in_the_same_list():
    early, late = (START_MS - 5) * PER_MS, (START_MS + 5) * PER_MS
    topic = Topic([plain(0), stored(3, early, 4), inline(7, late), plain(9)])
    page = topic.from_store(topic.span(), view=moment().view(), chunk=100)
    assert payloads(page) == [b"plain", b"s0", b"s1", b"s2", b"s3"]
    assert page.end == "end"


def test_a_page_reads_a_bounded_number_of_rows_after_the_moment_and_reports_that_there_may_be_more(monkeypatch):
    monkeypatch.setattr(Paging, "_most_later_rows", 10)
    early = (START_MS - 5) * PER_MS
    topic = Topic([plain(0), *(plain(1 + ms) for ms in range(25)), inline(40, early)])
    since, pages = FIRST_BOUND, []
    while True:
        page = topic.from_store(topic.span(since), view=moment().view(), chunk=5)
        pages.append((payloads(page), page.end))
        if page.end == "end":
            break
        assert page.last_id is not None
        assert after(page.last_id) > since
        since = after(page.last_id)
    assert [payload for found, _ in pages for payload in found] == [b"plain", b"inline"]
    assert [end for _, end in pages] == ["more", "more", "end"]


def test_the_bound_of_rows_after_the_moment_is_per_page():
    assert Paging._most_later_rows == reading.MAX_ROWS_BEHIND_MOMENT


async def test_kept_pages_of_current_reads_do_not_serve_a_moment():
    async with actors() as harness:
        await harness.create()
        for number in range(40):
            harness.clock.ms += 10
            await harness.publish(f"{number}")
        harness.directory.cache(NAME).start_over()
        for _ in range(3):
            await harness.page(limit=10)
        span = await harness.directory.ask(NAME, Look(FIRST_BOUND))
        for _ in range(3):
            view = moment(START_MS + 45).view()
            page = await read_page(
                harness.store, harness.directory.cache(NAME), span, limit=10, max_bytes=10**6, view=view
            )
            assert payloads(page) == [b"0", b"1", b"2", b"3"]
        assert (await harness.page(limit=10)).count == 10


# --- promises of the topic ----------------------------------------------------------------------------


def ask(core, ask_, now_ms):
    now = Now(now_ms, 0.0)
    step = core.step([("caller", ask_)], now)
    [(_, answer)] = core.settled(step, now)
    return answer, step


def look(core, at_ms, now_ms):
    return ask(core, Look(FIRST_BOUND, as_of_ms=at_ms), now_ms)


def a_topic():
    core = TopicCore(TopicState(NAME))
    ask(core, Create(TopicProperties()), START_MS)
    return core


def mark_in(step):
    return [put for put in step.operations if put.prefix == system_key(HIGH_WATER, NAME, 1)]


def test_nothing_is_published_at_or_before_a_moment_that_a_reader_was_shown():
    core = a_topic()
    look(core, START_MS + 5, START_MS + 5)
    receipt, _ = ask(core, Publish(PublishRequest([b"x"]), 1), START_MS + 5)
    assert receipt.first_id == pack_id(START_MS + 6, 0)


def test_an_owner_with_a_slow_clock_publishes_nothing_at_or_before_a_shown_moment():
    core = a_topic()
    _, step = look(core, START_MS + 5_000, START_MS + 5_000)
    [mark] = mark_in(step)
    state = TopicState(NAME)
    state.begin(core.state.metadata, HighWater.decode(mark.values[0]))
    state.loaded()
    receipt, _ = ask(TopicCore(state), Publish(PublishRequest([b"x"]), 1), START_MS)
    assert receipt.first_id == pack_id(START_MS + 5_001, 0)


def test_a_moment_is_written_once_and_not_at_all_if_messages_prove_it():
    core = a_topic()
    assert mark_in(look(core, START_MS + 5_000, START_MS + 5_000)[1])
    assert not mark_in(look(core, START_MS + 5_000, START_MS + 9_000)[1])
    assert not mark_in(look(core, START_MS + 1, START_MS + 9_000)[1])
    ask(core, Publish(PublishRequest([b"x"]), 1), START_MS + 9_000)
    assert not mark_in(look(core, START_MS + 8_999, START_MS + 9_000)[1])


def test_a_future_moment_is_refused_and_leaves_the_time_of_the_topic_unchanged():
    core = a_topic()
    error, step = look(core, START_MS + 1_001, START_MS + 1_000)
    assert isinstance(error, InvalidParameter)
    assert not step.operations
    assert core.state.time_ms == START_MS + 1_000


# --- several instances --------------------------------------------------------------------------------


class Moments:
    """The topics of a cluster as of a moment, as one instance reads them."""

    def __init__(self, cluster, name):
        self.cluster, self.instance = cluster, cluster[name]

    async def read(self, at_ms, *names):
        view = (await self.instance.transactions.as_of(at_ms)).view()
        found = []
        for name in names:
            span = await self.cluster.ask(self.instance.name, name, Look(FIRST_BOUND, as_of_ms=at_ms))
            page = await read_page(self.instance.harness.store, None, span, limit=100, max_bytes=1 << 20, view=view)
            found.append([payload.decode() for payload in payloads(page)])
        return found


def pass_ms(cluster, by_ms):
    cluster["a"].harness.clock.ms += by_ms
    return cluster["a"].harness.clock.ms


async def test_a_transaction_is_seen_as_of_a_moment_in_all_topics_of_all_instances_or_in_none():
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        pass_ms(cluster, 10)
        await cluster["a"].publish_under(pointer, "one")
        await cluster["b"].publish_under(pointer, "two", name=OTHER)
        before_ms = pass_ms(cluster, 10)
        await cluster.home().commit(pointer)
        # The clock is stopped: the decision was made before this moment, or in its millisecond.
        after_ms = pass_ms(cluster, 10)
        pass_ms(cluster, 10)
        for name in "ab":
            reader = Moments(cluster, name)
            assert await reader.read(before_ms - 1, NAME, OTHER) == [[], []]
            assert await reader.read(after_ms, NAME, OTHER) == [["one"], ["two"]]


async def test_a_view_as_of_a_moment_stays_the_same_when_the_service_moves():
    async with cluster_of("a", "b") as cluster:
        pointer = await cluster.begin()
        await cluster["a"].publish_under(pointer, "one")
        at_ms = pass_ms(cluster, 10)
        assert await Moments(cluster, "b").read(at_ms, NAME) == [[]]
        cluster.say("b")
        pass_ms(cluster, -5)
        await cluster["b"].transactions.fresh()
        await cluster.home().commit(pointer)
        later_ms = pass_ms(cluster, 100)
        for name in "ab":
            assert await Moments(cluster, name).read(at_ms, NAME) == [[]]
            assert await Moments(cluster, name).read(later_ms, NAME) == [["one"]]


async def test_errors_of_the_owner_are_passed_on_unchanged():
    async with cluster_of("a", "b", outcome_retention_ms=1_000) as cluster:
        pointer = await cluster.begin()
        await cluster.home().commit(pointer)
        pass_ms(cluster, 5_000)
        await cluster.begin()
        for name in "ab":
            with pytest.raises(AsOfTooOld):
                await cluster[name].transactions.as_of(START_MS - 1)
            with pytest.raises(InvalidParameter):
                await cluster[name].transactions.as_of(START_MS + 1_000_000)


async def test_an_owner_that_cannot_be_reached_is_unavailable(autojump_clock):
    async with cluster_of("a", "b") as cluster:
        cluster.lines.cut.add(("b", "a"))
        with pytest.raises(TransactionsUnavailable):
            await cluster["b"].transactions.as_of(START_MS)


def test_a_moment_crosses_a_link_unchanged():
    given = Moment(START_MS, frozenset({3, 1, 2}), (4, 5), 1, 9)
    assert Moment.unpack(given.packed()) == given
