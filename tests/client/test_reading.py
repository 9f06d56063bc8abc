"""A reader's next request, waits and saves, with scripted answers in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate

import pytest

from plainsong._sync.tracks import REFRESH_S
from plainsong.calls import Answer, Failure, Send
from plainsong.errors import ConnectFailed, DeadlineExceeded
from plainsong.positions import ServerPosition, read_plan
from plainsong.protocol.codec import FramesOptions
from plainsong.protocol.errors import PlainsongError, TopicNotFound
from plainsong.protocol.ids import pack_id
from plainsong.protocol.page import Page, item
from tests.client.simulation import LOST, NO_DAEMON, Simulation, kind, problem, said
from tests.codecs import AVRO_2, encode_frames

pytestmark = pytest.mark.usefixtures("both_clients")


class FakeDaemon:
    """Topics as lists of payloads; message n of a topic was published at millisecond n + 1."""

    def __init__(self, **topics: list[bytes]) -> None:
        self.topics = topics
        self.readers: dict[str, str] = {}
        self.next: list[Answer | Failure] = []
        self.waits = 0
        self.on_wait: Callable[[], object] = lambda: None

    def __call__(self, send: Send) -> Answer | Failure:
        if self.next:
            return self.next.pop(0)
        path, _, verb = send.request.path.partition("?")[0].rpartition("/")
        if verb == "topics":
            return said(sorted(self.topics))
        if path.endswith("default"):
            return self.poll_many(json.loads(send.request.body))
        topic = path.split("/")[5]
        if topic not in self.topics:
            return problem(404, "topic_not_found")
        if verb == "poll":
            return self.poll(topic, send)
        if verb == "stats":
            last = len(self.topics[topic])
            return said({"newestId": pack_id(last, 0).hex() if last else None})
        return self.reader(topic, send)

    def poll(self, topic: str, send: Send) -> Answer:
        request = AVRO_2.decode_poll(send.request.body)
        if request.wait_ms:
            self.waits += 1
            self.on_wait()
        found = self.after(topic, request.since)
        limit = self.fitting(found, request.limit or 100, request.max_bytes)
        page = Page([item(*each) for each in found[:limit]], min(limit, len(found)))
        headers = {"content-type": FramesOptions(attributes=True).content_type}
        headers["plainsong-end"] = "more" if len(found) > limit else "end"
        if self.topics[topic]:
            headers["plainsong-last-id"] = (found[:limit] or [(pack_id(len(self.topics[topic]), 0), b"")])[-1][0].hex()
        return Answer(200, headers, encode_frames(page, FramesOptions(attributes=True)))

    def after(self, topic: str, since: bytes) -> list[tuple[bytes, bytes]]:
        every = [(pack_id(n + 1, 0), payload) for n, payload in enumerate(self.topics[topic])]
        return [each for each in every if each[0] >= since]

    def fitting(self, found: list[tuple[bytes, bytes]], limit: int, max_bytes: int | None) -> int:
        """Return the number of messages on a page, at least one."""
        ends = accumulate(len(payload) for _, payload in found[:limit])
        return max(1, sum(1 for end in ends if max_bytes is None or end <= max_bytes))

    def poll_many(self, asked: dict) -> Answer:
        self.waits += 1
        self.on_wait()
        told = {}
        for topic, wanted in asked["topics"].items():
            if topic not in self.topics:
                told[topic] = {"error": json.loads(problem(404, "topic_not_found").body)}
                continue
            start = bytes.fromhex(wanted.get("startFrom") or "00" * 20)
            every = [each for each in self.after(topic, start) if each[0] > start]
            found = every[: self.fitting(every, 10_000, asked.get("maxBytes"))]
            told[topic] = {
                "messages": [{"id": at.hex(), "payload": payload.decode()} for at, payload in found],
                "lastId": found[-1][0].hex() if found else wanted.get("startFrom"),
                "end": "end" if len(found) == len(every) else "more",
            }
        return said({"topics": told})

    def reader(self, topic: str, send: Send) -> Answer:
        if send.request.method == "GET":
            at = self.readers.get(topic)
            return said({"position": at}) if at else problem(404, "not_found")
        body = json.loads(send.request.body)
        if "expected" in body and body["expected"] != self.readers.get(topic):
            return problem(409, "position_changed")
        self.readers[topic] = body["position"]
        return said({})


def reading(simulation, topics, start="oldest", position=None, **options: object):
    defaults = {"until": None, "follow": False, "limit": None, "serializer": None}
    more = {"page_messages": 2, "save_every": 1000, "save_interval_s": 5.0}
    return kind().Reading(simulation.channel(), read_plan(topics, start, **{**defaults, **more, **options}), position)


def payloads(page) -> list[bytes]:
    return [message.payload for message in page]


def test_topics_take_turns_page_by_page():
    daemon = FakeDaemon(a=[b"a1", b"a2", b"a3"], b=[b"b1"], c=[b"c1", b"c2", b"c3"])
    simulation = Simulation(daemon)
    reader = reading(simulation, ["a", "b", "c"])
    pages = []
    while (page := simulation.run(reader.next_page)) is not None:
        pages.append(payloads(page))
    assert pages == [[b"a1", b"a2"], [b"b1"], [b"c1", b"c2"], [b"a3"], [b"c3"]]


def test_a_follower_waits_forever_for_a_daemon_that_is_unavailable():
    daemon = FakeDaemon(a=[b"1"])
    simulation = Simulation(daemon)
    reader = reading(simulation, "a", follow=True)
    daemon.next = [NO_DAEMON] * 2000
    assert payloads(simulation.run(reader.next_page)) == [b"1"]
    assert simulation.now_s > 2 * 3600


def test_a_reader_that_does_not_follow_has_a_deadline():
    simulation = Simulation(lambda _: NO_DAEMON)
    with pytest.raises(DeadlineExceeded):
        simulation.run(reading(simulation, "a").next_page)
    assert simulation.now_s <= 60


def test_an_empty_wait_is_repeated():
    daemon = FakeDaemon(a=[])
    simulation = Simulation(daemon)
    reader = reading(simulation, "a", follow=True)
    daemon.on_wait = lambda: daemon.waits == 5 and daemon.topics["a"].append(b"at last")
    assert payloads(simulation.run(reader.next_page)) == [b"at last"]
    assert daemon.waits == 5


def test_a_pattern_includes_later_topics_from_their_beginning_and_drops_deleted_ones():
    daemon = FakeDaemon(a1=[b"old"])
    simulation = Simulation(daemon, took_s=REFRESH_S)
    reader = reading(simulation, "a*", "newest", follow=True)

    def change() -> None:
        if daemon.waits == 2:
            daemon.topics["a2"] = [b"new topic"]
        if daemon.waits == 6:
            del daemon.topics["a1"]
        if daemon.waits == 8:
            daemon.topics["a2"].append(b"later")

    daemon.on_wait = change
    assert payloads(simulation.run(reader.next_page)) == [b"new topic"]
    assert payloads(simulation.run(reader.next_page)) == [b"later"]


def test_a_deleted_topic_that_was_named_ends_the_loop():
    daemon = FakeDaemon(a=[b"1"], b=[])
    simulation = Simulation(daemon)
    reader = reading(simulation, ["a", "b"], follow=True)
    simulation.run(reader.next_page)
    daemon.on_wait = lambda: daemon.topics.pop("b", None)
    with pytest.raises(TopicNotFound):
        simulation.run(reader.next_page)


def test_a_reader_waits_for_a_topic_that_is_being_reloaded():
    daemon = FakeDaemon(a=[], b=[])
    simulation = Simulation(daemon)
    reader = reading(simulation, ["a", "b"], follow=True)
    ask = daemon.poll_many

    def recovering(asked: dict) -> Answer:
        answer = ask(asked)
        if daemon.waits < 3:
            told = json.loads(answer.body)
            told["topics"]["b"] = {"error": json.loads(problem(503, "recovering").body)}
            return said(told)
        return answer

    daemon.poll_many = recovering
    daemon.on_wait = lambda: daemon.waits == 4 and daemon.topics["b"].append(b"1")
    assert payloads(simulation.run(reader.next_page)) == [b"1"]
    assert simulation.pauses


def test_a_saved_position_whose_answer_is_lost_is_not_mistaken_for_another_reader():
    daemon = FakeDaemon(a=[b"1", b"2"])
    simulation = Simulation(daemon)
    reader = reading(simulation, "a", position=ServerPosition("me"))
    [reader.at_hand, _] = simulation.run(reader.next_page)
    reader.done_with_message_at_hand(0)

    def lose_the_answer(send: Send) -> Answer | Failure:
        simulation._answer = daemon
        daemon(send)
        return LOST

    simulation._answer = lose_the_answer
    simulation.run(reader.save)
    assert daemon.readers["a"] == pack_id(1, 0).hex()


def test_leaving_does_not_wait_forever_for_the_save():
    daemon = FakeDaemon(a=[b"1"])
    simulation = Simulation(daemon)
    reader = reading(simulation, "a", follow=True, position=ServerPosition("me"))
    [reader.at_hand] = simulation.run(reader.next_page)
    reader.done_with_message_at_hand(0)
    simulation._answer = lambda _: NO_DAEMON
    with pytest.raises(PlainsongError) as caught:
        simulation.run(reader.save)
    assert isinstance(caught.value, DeadlineExceeded)
    assert isinstance(caught.value.__cause__, ConnectFailed)
    simulation._answer = daemon
    simulation.run(reader.save)
    assert daemon.readers["a"] == pack_id(1, 0).hex(), "what was not saved is not forgotten"


def test_a_save_is_due_after_a_number_of_messages_or_seconds():
    daemon = FakeDaemon(a=[b"%d" % n for n in range(20)])
    simulation = Simulation(daemon)
    reader = reading(
        simulation, "a", position=ServerPosition("me"), save_every=3, save_interval_s=5.0, page_messages=20
    )
    page = simulation.run(reader.next_page)
    due = []
    for n, (message, now_s) in enumerate(zip(page, [0, 0, 0, 1, 1, 5, 5, 5.5], strict=False)):
        reader.at_hand = message
        if reader.done_with_message_at_hand(now_s):
            simulation.now_s = now_s
            simulation.run(reader.save)
            due.append(n)
    assert due == [2, 5]


def test_a_start_by_time_is_saved_as_the_id_before_it():
    daemon = FakeDaemon(a=[b"1", b"2", b"3"])
    simulation = Simulation(daemon)
    reader = reading(simulation, "a", 2, position=ServerPosition("me"))
    page = simulation.run(reader.next_page)
    assert payloads(page) == [b"2", b"3"]
    kept = bytes.fromhex(daemon.readers["a"])
    assert kept < pack_id(2, 0)
    again = reading(simulation, "a", "newest", position=ServerPosition("me"))
    assert payloads(simulation.run(again.next_page)) == [b"2", b"3"]
