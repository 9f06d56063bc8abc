"""Every wait of the daemon, with every event that can end it, and what the reader then receives.

The waits are taken from the routes, and the asks from the topic's rules: a new one without a row here fails the test.
"""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from test_committed_polls import begin, decide, under

import actors.observe
import broker.api.messages.events as events
from actors.observe import watch_jumps
from broker.api.routes import ROUTES
from broker.http.handlers import answer_of
from broker.http.messages import EVENT_STREAM, Request
from plainsong.protocol import requests
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic import asks
from plainsong.protocol.topic.core import RULES
from tests.patience import PATIENCE_S
from tests.waiting import until

NAME = TopicName("ns", "t")
#: Longer than the tests' patience: a lost wake-up fails the test, instead of passing when the wait times out.
WAIT_MS = 3_600_000
#: The results of a wait.
NEWS, GONE, NOTHING = "messages", "topic_not_found", "nothing"


# --- the waits -------------------------------------------------------------------------------------


def outcome(answer: httpx.Response, messages: object) -> str:
    if answer.status_code == 404:
        return answer.json()["code"]
    assert answer.status_code == 200, answer.text
    return NEWS if messages else NOTHING


async def poll(daemon, since):
    body = {"isolation": "committed", "waitMs": WAIT_MS, **since}
    answer = await daemon.ask("POST", f"{TOPICS}/t/poll", body)
    return outcome(answer, answer.json())


async def poll_many(daemon, since):
    body = {"isolation": "committed", "waitMs": WAIT_MS, "topics": {"t": since, "quiet": {}}}
    answer = await daemon.ask("POST", "/v1/namespaces/ns/poll", body)
    one = answer.json()["topics"]["t"]
    return one["error"]["code"] if "error" in one else outcome(answer, one["messages"])


async def offsets(daemon, since):
    body = {"isolation": "committed", "waitMs": WAIT_MS}
    if since:
        body["start"] = f"{int(since['startFrom'], 16) + 1:040x}"
    answer = await daemon.ask("POST", f"{TOPICS}/t/offsets", body)
    return outcome(answer, answer.json().get("count"))


async def follow(daemon, since):
    """Return the first event that is not about a blocked stream."""
    (handler,) = [each.handler for each in daemon.service.endpoints if each.route.name == "follow"]
    headers = {"last-event-id": since["startFrom"]} if since else {}
    query = "isolation=committed" if since else "isolation=committed&from=0"
    path = {"namespace": "ns", "topic": "t"}
    answer = await answer_of(handler, Request(path, query, headers))
    chunks = aiter(answer.body)
    try:
        async for chunk in chunks:
            kind = chunk.partition(b"event: ")[2].partition(b"\n")[0]
            data = chunk.rpartition(b"data: ")[2]
            if kind in (b"message", b"set-aside"):
                return NEWS
            if kind == b"error":
                return json.loads(data)["code"]
            if kind == b"end":
                return NOTHING
    finally:
        await answer.body.aclose()
    raise AssertionError("the stream has ended without an end")


WAITS = {"poll": poll, "poll_many": poll_many, "offsets": offsets, "follow": follow}
#: These do not wait for a message: ``get_events`` checks once a second, ``stream`` answers its publishes.
OTHER_WAITS = {"get_events", "stream"}


def test_every_wait_has_a_row():
    waits = {
        route.name for route in ROUTES if route.may_wait or EVENT_STREAM in route.answer_types or route.name == "stream"
    }
    assert waits == WAITS.keys() | OTHER_WAITS


# --- the events that end them ----------------------------------------------------------------------


async def commit(daemon, begun):
    await decide(daemon, begun, "commit")


async def abort(daemon, begun):
    await decide(daemon, begun, "abort")


async def invalidate(daemon, begun):
    await decide(daemon, begun, "invalidate")


async def roll_back(daemon, begun):
    await daemon.call("POST", f"{TOPICS}/t/rollback", json={"transactionWritePointer": begun["writePointer"]})


async def shorten_ttl(daemon, begun):
    del begun
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 2})


async def set_aside(daemon, begun):
    del begun
    (first, *_) = (await daemon.call("GET", f"{TOPICS}/t/messages")).json()
    await daemon.call("POST", f"{TOPICS}/t/set-aside", json={"from": first["id"], "to": first["id"]})


async def delete(daemon, begun):
    del begun
    await daemon.call("DELETE", f"{TOPICS}/t")


async def jump(daemon, begun):
    """Set the clock ahead, past the expiry of the message that blocks the readers."""
    del begun
    daemon.clock.ms += 2_998_500


async def stop(daemon, begun):
    del begun
    daemon.service.stop()


async def publish(daemon, begun):
    del begun
    await daemon.publish("more")


#: The result for a reader that is blocked by an undecided message with another message after it, and for a reader at
#: the topic's end.
ENDS = {
    commit: (NEWS, None),
    abort: (NEWS, None),
    invalidate: (NEWS, None),
    roll_back: (NEWS, None),
    shorten_ttl: (NEWS, None),
    set_aside: (NEWS, None),
    jump: (NEWS, None),
    delete: (GONE, GONE),
    stop: (NOTHING, NOTHING),
    publish: (None, NEWS),
}
#: The asks that ``ENDS`` sends.
ENDING = {
    asks.RollBackPointer,
    asks.SetProperties,
    asks.NoteSetAside,
    asks.Cleaned,
    asks.Remove,
    asks.Publish,
    asks.PublishEach,
    asks.PublishUnder,
    asks.PublishStaged,
}
#: In a topic with waiting readers these add no readable message, and remove no message that blocks a reader.
NEVER_ENDING = {
    asks.CheckPublish,
    asks.ClosePointers,
    asks.Create,
    asks.Describe,
    asks.DescribeChain,
    asks.GetProducer,
    asks.ListPointers,
    asks.ListProducers,
    asks.ListReaders,
    asks.OpenProducer,
    asks.PlanCleaning,
    asks.RemoveProducer,
    asks.RemoveReader,
    asks.SetReader,
    asks.Stats,
    asks.StoreStaged,
    asks.StoreUnder,
    asks.Undelete,
}


def test_every_ask_of_a_topic_ends_waits_or_is_known_not_to():
    assert set(RULES) == ENDING | NEVER_ENDING
    assert not ENDING & NEVER_ENDING


@pytest.fixture
def no_second_look(monkeypatch):
    """Disable what would hide a lost wake-up: event streams check again every 15 s, and waits end after 60 s."""
    monkeypatch.setattr(events, "PING_S", 100 * PATIENCE_S)
    monkeypatch.setattr(requests, "MAX_WAIT_MS", WAIT_MS)


def waited_for(**options):
    return in_process(poll__max_wait_ms=WAIT_MS, **options)


async def held_topic(daemon):
    """Create an empty topic, and one whose first message, but not the second, blocks committed readers."""
    await daemon.create(ttl=3_000)
    await daemon.create("quiet")
    begun = await begin(daemon, timeoutSeconds=3_600)
    await under(daemon, begun, "undecided")
    return begun


async def publish_after(daemon, after_ms):
    daemon.clock.ms += after_ms
    await daemon.publish("after")


class Waiter:
    """A waiting reader, and how its wait ends."""

    def __init__(self, daemon, wait, since):
        self._daemon, self._wait, self._since = daemon, wait, since
        self._done = trio.Event()
        self.ended_s = 0.0

    async def run(self):
        self._found = await self._wait(self._daemon, self._since)
        self.ended_s = trio.current_time()
        self._done.set()

    async def found(self):
        with trio.fail_after(PATIENCE_S):
            await self._done.wait()
        return self._found


@pytest.mark.parametrize("end", [end for end, (held, _) in ENDS.items() if held], ids=lambda end: end.__name__)
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_the_end_of_a_hold_ends_the_wait(wait, end, no_second_look, nursery, monkeypatch):
    monkeypatch.setattr(actors.observe, "CLOCK_CHECK_INTERVAL_S", 0.01)
    async with waited_for() as daemon, trio.open_nursery() as waiting:
        nursery.start_soon(watch_jumps, daemon.clock, daemon.service.pointers.wake_all)
        begun = await held_topic(daemon)
        await publish_after(daemon, 2_001)
        reader = Waiter(daemon, wait, {})
        waiting.start_soon(reader.run)
        await until(lambda: daemon.service.pointers.waiting(NAME))
        await end(daemon, begun)
        assert await reader.found() == ENDS[end][0]
        assert not daemon.service.pointers.waiters
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("end", [end for end, (_, free) in ENDS.items() if free], ids=lambda end: end.__name__)
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_a_change_of_a_topic_ends_the_wait_at_its_end(wait, end, no_second_look):
    async with waited_for() as daemon, trio.open_nursery() as waiting:
        await daemon.create()
        await daemon.create("quiet")
        _, last = await daemon.publish("read")
        reader = Waiter(daemon, wait, {"startFrom": last, "inclusive": False})
        waiting.start_soon(reader.run)
        await until(lambda: (entry := daemon.service.directory.entry(NAME)).actor.core and entry.actor.core.parking)
        await end(daemon, None)
        assert await reader.found() == ENDS[end][1]


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_recreating_a_topic_ends_the_wait_for_its_predecessor(wait, no_second_look):
    async with waited_for() as daemon, trio.open_nursery() as waiting:
        begun = await held_topic(daemon)
        reader = Waiter(daemon, wait, {})
        waiting.start_soon(reader.run)
        await until(lambda: daemon.service.pointers.waiting(NAME))
        await delete(daemon, begun)
        await daemon.create()
        await publish(daemon, begun)
        assert await reader.found() in (GONE, NEWS)


class LoopClock:
    """A clock that follows the event loop's."""

    regressions = 0
    begun_s = None

    def now_ms(self):
        now_s = trio.current_time()
        self.begun_s = now_s if self.begun_s is None else self.begun_s
        return START_MS + round((now_s - self.begun_s) * 1000)


@pytest.mark.parametrize(
    ("more", "ttl_ms"),
    [({}, 3_000_000), ({"ttlSeconds": 7}, 7_000), ({"messageTtlsSeconds": [7]}, 7_000)],
    ids=["of the topic", "of the request", "of the message"],
)
@pytest.mark.parametrize("verb", ["publish", "store"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_an_expiring_message_releases_the_polls_it_held(wait, verb, more, ttl_ms, no_second_look, autojump_clock):
    clock = LoopClock()
    async with waited_for(clock=clock) as daemon, trio.open_nursery() as waiting:
        await daemon.create(ttl=3_000)
        await daemon.create("quiet")
        begun = await begin(daemon, type="long")
        body = {"transactionWritePointer": begun["writePointer"], "messages": ["undecided"], **more}
        await daemon.call("POST", f"{TOPICS}/t/{verb}", json=body)
        if verb == "store":
            await under(daemon, begun)
        published_ms = clock.now_ms()
        await trio.sleep(ttl_ms / 1000 - 5)
        await daemon.publish("after")
        reader = Waiter(daemon, wait, {})
        waiting.start_soon(reader.run)
        assert await reader.found() == NEWS
        assert clock.now_ms() - published_ms == pytest.approx(ttl_ms, abs=2)


async def test_readers_that_wait_keep_their_topic_open(no_second_look, autojump_clock):
    async with waited_for(topic__idle_s=1) as daemon, trio.open_nursery() as waiting:
        begun = await held_topic(daemon)
        reader = Waiter(daemon, poll, {})
        waiting.start_soon(reader.run)
        await until(lambda: daemon.service.pointers.waiting(NAME))
        assert not daemon.service.directory.entry(NAME).actor.is_idle
        await decide(daemon, begun, "commit")
        assert await reader.found() == NEWS
