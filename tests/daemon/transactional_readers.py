"""Readers of every kind that record what they see: uncommitted, committed, with snapshots, of several topics."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import trio

from plainsong.protocol.codec import codec_for
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.requests import PollRequest
from tests.daemon.ring import Place, now_ms, since_of
from tests.daemon.talk import ENCODINGS, JSON_HEADERS, ConnectionLost, NotConnected, Talk, topic_path
from tests.daemon.transactional_history import Log, Page
from tests.daemon.transactional_writers import NotDone, Plot, begin, decide, said

#: Pause between two polls of a reader without long polls.
PAUSE_S = 0.03
_views = count(1)


@dataclass(frozen=True, slots=True)
class Habit:
    """A reader's parameters: ``committed`` or not, or with its own snapshot."""

    committed: bool
    limit: int | None = None
    encoding: str = "frames"
    wait_ms: int = 0
    inclusive: bool = False
    """True if each poll starts at the last message of the poll before, and must return it again."""
    snapshot: bytes | None = None
    view: int | None = None
    begun_s: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        kind = "snapshot" if self.snapshot else "committed" if self.committed else "uncommitted"
        return f"{kind} reader by {self.limit or 'all'}, {self.encoding}"


HABITS = (
    Habit(committed=True, limit=1, encoding="json"),
    Habit(committed=True, limit=7, wait_ms=100, inclusive=True),
    Habit(committed=True, wait_ms=5_000, encoding="avro2"),
    Habit(committed=False, limit=7, encoding="avro2"),
    Habit(committed=False, wait_ms=5_000),
)


async def read_page(talk: Talk, topic: str, habit: Habit, position: bytes | None, plot: Plot) -> bytes | None:
    """Read one page into the plot; return the position to continue from. Raises NotDone, ConnectionLost."""
    inclusive = habit.inclusive or position is None
    isolation = None if habit.snapshot or not habit.committed else "committed"
    request = PollRequest(position, inclusive, habit.limit, habit.snapshot)
    query = "&".join([f"isolation={isolation}"] * bool(isolation) + [f"wait_ms={habit.wait_ms}"] * bool(habit.wait_ms))
    headers = ENCODINGS[habit.encoding]
    body = codec_for(headers["Content-Type"]).encode_poll(request)
    asked_s, asked_ms = time.monotonic(), now_ms()
    answer = await talk.ask("POST", topic_path(topic, f"/poll?{query}"), body, headers)
    if answer.status != 200:
        raise NotDone(answer)
    answered_s, messages = time.monotonic(), tuple(answer.messages())
    last_id, held_by = answer.headers.get("plainsong-last-id"), answer.headers.get("plainsong-held-by")
    through = None if last_id is None else bytes.fromhex(last_id)
    page = Page(
        habit.name,
        topic,
        messages,
        habit.committed,
        habit.begun_s or (asked_s, answered_s),
        asked_s,
        answered_s,
        asked_ms,
        since_of(position, inclusive=inclusive),
        through,
        answer.headers["plainsong-end"],
        None if held_by is None else int(held_by),
        habit.view,
    )
    plot.pages.append(page)
    if through is not None and not habit.inclusive:
        return through
    return messages[-1][0] if messages else position


async def reader(place: Place, topic: str, habit: Habit, plot: Plot, pause_s: float = PAUSE_S) -> None:
    """Read until ``place.over``, with pauses; after the daemon was killed, continue at the same position."""
    position: bytes | None = None
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    position = await read_page(talk, topic, habit, position, plot)
                    place.count(polled=1)
                    # An inclusive poll never waits, since the last message is there.
                    if not habit.wait_ms or habit.inclusive or plot.pages[-1].end == "held":
                        await trio.sleep(pause_s)
        except (ConnectionLost, NotConnected, NotDone):
            await trio.sleep(0.01)


async def snapshot_reader(place: Place, topics: Sequence[str], plot: Plot, rng: Random, pause_s: float = 0.05) -> None:
    """Repeatedly read all topics inside a transaction, each time from the end of an earlier read."""
    froms: dict[str, bytes | None] = dict.fromkeys(topics)
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    await _read_inside(talk, topics, froms, plot, rng)
                    place.count(polled=1)
                    await trio.sleep(pause_s)
        except (ConnectionLost, NotConnected, NotDone):
            await trio.sleep(0.01)


async def _read_inside(
    talk: Talk, topics: Sequence[str], froms: dict[str, bytes | None], plot: Plot, rng: Random
) -> None:
    asked_s = time.monotonic()
    transaction, begun = await begin(talk, plot, "reader", 1)
    snapshot = b64decode(begun["snapshot"])
    habit = Habit(
        True,
        rng.choice((7, 50, None)),
        rng.choice(("json", "avro2", "frames")),
        snapshot=snapshot,
        view=next(_views),
        begun_s=(asked_s, time.monotonic()),
    )
    ends = {}
    for topic in rng.sample(list(topics), len(topics)):
        ends[topic] = await read_to_the_end(talk, topic, habit, plot, froms[topic])
    if rng.random() < 0.5:
        froms.update(ends)  # like a client that commits its position with its effects
    if rng.random() < 0.8:
        await decide(talk, transaction, rng.choice(("commit", "abort")))


async def many_reader(
    place: Place, topics: Sequence[str], plot: Plot, limit: int | None, pause_s: float = 0.02
) -> None:
    """Repeatedly read all topics with one committed poll."""
    froms: dict[str, bytes | None] = dict.fromkeys(topics)
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    await _read_many(talk, froms, plot, limit)
                    place.count(polled=1)
                    await trio.sleep(pause_s)
        except (ConnectionLost, NotConnected, NotDone):
            await trio.sleep(0.01)


async def _read_many(talk: Talk, froms: dict[str, bytes | None], plot: Plot, limit: int | None) -> None:
    wanted: dict[str, Any] = {
        topic: {"startFrom": position and position.hex(), "inclusive": position is None}
        for topic, position in froms.items()
    }
    body = json.dumps({"topics": wanted, "isolation": "committed", "limit": limit, "waitMs": 200}).encode()
    asked_s, asked_ms = time.monotonic(), now_ms()
    answered = said(await talk.ask("POST", "/v1/namespaces/ring/poll", body, JSON_HEADERS))
    answered_s, view = time.monotonic(), next(_views)
    for topic, one in answered["topics"].items():
        if "error" in one:
            continue
        messages = tuple((bytes.fromhex(each["id"]), each["payload"].encode()) for each in one["messages"])
        through = None if one["lastId"] is None else bytes.fromhex(one["lastId"])
        since = since_of(froms[topic], inclusive=froms[topic] is None)
        held_by = int(one["heldBy"]) if one["end"] == "held" else None
        told = (asked_s, answered_s, asked_ms, since, through, one["end"], held_by, view)
        plot.pages.append(Page("reader of many", topic, messages, True, (asked_s, answered_s), *told))
        froms[topic] = through or froms[topic]


async def read_to_the_end(
    talk: Talk, topic: str, habit: Habit, plot: Plot, position: bytes | None = None
) -> bytes | None:
    """Read pages into the plot up to the last one; return the last position."""
    while True:
        position = await read_page(talk, topic, habit, position, plot)
        if plot.pages[-1].end != "more":
            return position


async def log_of(talk: Talk, topic: str) -> Log:
    """Return all rows of a topic, with write pointers."""
    rows: list[tuple[bytes, bytes, int]] = []
    position: bytes | None = None
    headers = {**JSON_HEADERS, "Accept": FRAMES_TYPE + "; fields=pointer"}
    while True:
        request = PollRequest(position, position is None, 997)
        body = codec_for("application/json").encode_poll(request)
        answer = await talk.ask("POST", topic_path(topic, "/poll"), body, headers)
        assert answer.status == 200, answer
        rows += [
            (frame.message_id, frame.payload, frame.pointer) for frame in decode_frames(answer.body, pointers=True)
        ]
        if answer.headers["plainsong-end"] != "more":
            return Log(topic, rows)
        position = bytes.fromhex(answer.headers["plainsong-last-id"])
