"""A topic whose messages live for a second or two: its writers and readers, and anomalies that must never occur.

The judge tests the promise, not the code: a message is shown until the topic's time is later than its publish time plus
its TTL. The topic's time is never behind the time of a page that a reader got, nor behind every wall clock, nor ahead
of the highest time that any wall clock has shown. A message that was gone for a second never reappears.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

from plainsong.protocol.requests import PublishRequest
from tests.cluster.course import at_last
from tests.cluster.history.records import Poll
from tests.cluster.readers import read_page
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import RECEIPT
from tests.codecs import JSON
from tests.daemon.talk import topic_path

if TYPE_CHECKING:
    from tests.cluster.harness import Instance
    from tests.simulation.world import SimulatedStage

TOPIC = "brief"
#: The topic's TTLs, initial and later; and a message's own TTL, which is not longer.
TTLS_S, OWN_S = (1, 2, 4), 1
#: A reader may see a message expire at a time this far ahead of the time that the next owner loads.
LAG_MS = 1_000

Kind = Literal[
    "undead",  # shown after its expiry
    "gone early",  # not shown before its expiry
    "came back",  # shown after a reader had seen it gone
    "brief disorder",  # a page out of order, a duplicate payload or id, or a message never sent
    "brief and refused",  # shown although its publish was refused
]


class Anomaly(NamedTuple):
    """One violation."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Sent:
    """One message of one publish."""

    payload: bytes
    own_s: int | None
    """The message's own TTL."""
    refused: bool = False
    told_s: float = inf
    """Time of the acknowledgement."""


@dataclass(frozen=True, slots=True)
class Look:
    """A page, and bounds of the topic's time while it was read."""

    poll: Poll
    least_ms: int
    most_ms: int
    ttl_s: tuple[int, int]
    """The shortest TTL that the topic may have had until then, and the longest that it may have had then."""


@dataclass(slots=True)
class Notes:
    """Everything recorded about the topic."""

    sent: dict[bytes, Sent] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    floors: list[tuple[float, int]] = field(default_factory=list)
    """Acknowledgements of a new TTL, each with the publish time up to which messages had expired by then."""


def judged(notes: Notes) -> list[Anomaly]:
    """Return all violations."""
    ids = dict[bytes, bytes]()
    for look in notes.looks:
        ids.update((payload, message_id) for message_id, payload in look.poll.messages)
    return [*_of_pages(notes), *_of_times(notes, ids), *_of_returns(notes, ids), *_of_floors(notes)]


def _of_pages(notes: Notes) -> Iterator[Anomaly]:
    places, payloads = dict[bytes, bytes](), dict[bytes, bytes]()
    for look in notes.looks:
        shown = [message_id for message_id, _ in look.poll.messages]
        if shown != sorted(set(shown)):
            yield Anomaly("brief disorder", f"{look.poll.name}: ids do not ascend")
        for message_id, payload in look.poll.messages:
            sent = notes.sent.get(payload)
            if sent is None:
                yield Anomaly("brief disorder", f"{look.poll.name} was shown {payload!r}, which no client sent")
            elif sent.refused:
                yield Anomaly("brief and refused", f"{look.poll.name} was shown {payload!r}, which was refused")
            if places.setdefault(payload, message_id) != message_id:
                yield Anomaly("brief disorder", f"{payload!r} is present twice")
            if payloads.setdefault(message_id, payload) != payload:
                yield Anomaly("brief disorder", f"{message_id.hex()} is the id of two messages")


def _of_times(notes: Notes, ids: dict[bytes, bytes]) -> Iterator[Anomaly]:
    for look in notes.looks:
        poll = look.poll
        shown = {payload for _, payload in poll.messages}
        latest_ms = max([look.least_ms, *(_published_ms(message_id) for message_id, _ in poll.messages)])
        for payload, sent in notes.sent.items():
            place = ids.get(payload)
            if place is None:
                continue
            shortest_s, longest_s = (min(each, sent.own_s or each) for each in look.ttl_s)
            if payload in shown:
                if latest_ms > _published_ms(place) + longest_s * 1000:
                    late_ms = latest_ms - _published_ms(place) - longest_s * 1000
                    yield Anomaly(
                        "undead", f"{poll.name} at {poll.began_s:.3f} s was shown {payload!r}, {late_ms} ms late"
                    )
            elif (
                sent.told_s < poll.began_s
                and _covers(poll, place)
                and look.most_ms <= _published_ms(place) + shortest_s * 1000
            ):
                yield Anomaly("gone early", f"{poll.name} at {poll.began_s:.3f} s was not shown {payload!r}")


def _of_returns(notes: Notes, ids: dict[bytes, bytes]) -> Iterator[Anomaly]:
    looks = sorted(notes.looks, key=lambda each: each.poll.began_s)
    for payload, place in ids.items():
        there_s = min([notes.sent[payload].told_s] if payload in notes.sent else [inf])
        missed_s, by = inf, ""
        for look in looks:
            poll = look.poll
            if (place, payload) in poll.messages:
                there_s = min(there_s, poll.ended_s)
                if poll.began_s > missed_s:
                    yield Anomaly(
                        "came back", f"{poll.name} at {poll.began_s:.3f} s was shown {payload!r}, {by} was not"
                    )
                    break
            elif (
                there_s < poll.began_s
                and _covers(poll, place)
                and poll.ended_s < missed_s
                and look.least_ms > _published_ms(place) + look.ttl_s[1] * 1000 + LAG_MS
            ):
                missed_s, by = poll.ended_s, f"and {poll.name} at {poll.ended_s:.3f} s"


def _of_floors(notes: Notes) -> Iterator[Anomaly]:
    """Messages that had expired when the TTL was changed stay expired, even if it became longer."""
    for look in notes.looks:
        floor_ms = max((floor_ms for at_s, floor_ms in notes.floors if at_s < look.poll.began_s), default=0)
        for message_id, payload in look.poll.messages:
            if _published_ms(message_id) < floor_ms:
                told = f"{look.poll.name} at {look.poll.began_s:.3f} s was shown {payload!r}"
                yield Anomaly("came back", f"{told}, which had expired when the time to live was changed")


def _covers(poll: Poll, place: bytes) -> bool:
    """True if the page includes that position."""
    return poll.since <= place and (poll.end == "end" or place <= poll.last)


def _published_ms(message_id: bytes) -> int:
    return int.from_bytes(message_id[:8], "big")


# --- writers and readers ---------------------------------------------------------------------------


class Watcher:
    """Publishes to the topic and reads it, one request at a time."""

    def __init__(self, stage: SimulatedStage, voice: Voice) -> None:
        self.stage, self.voice, self.notes = stage, voice, stage.brief
        first_s = voice.rng.choice(TTLS_S)
        self._first_s, self._shortest_s, self._acknowledged_s = first_s, first_s, first_s
        #: TTLs requested without an answer, which may take effect at any time.
        self._doubted_s: set[int] = set()
        self._count = 0
        #: Probability that a request is a publish. In a topic with few publishes, readers advance its time.
        self._publishes = voice.rng.choice((0.45, 0.15))

    async def make(self) -> None:
        """Create the topic."""
        await at_last(
            self.stage, partial(self.voice.tell, "PUT", topic_path(TOPIC, "?ifNotExists=true"), {"ttl": self._first_s})
        )

    @property
    def _longest_s(self) -> int:
        return max(self._doubted_s | {self._acknowledged_s})

    async def act(self) -> None:
        """Send one request of a random kind. Raises NotSent, Doubt, Refused."""
        chance = self.voice.rng.random()
        if chance < self._publishes:
            await self.publish()
        elif chance < 0.95:
            await self.look()
        else:
            await self.live_as_long_as(self.voice.rng.choice(TTLS_S))

    async def publish(self) -> None:
        own_s = self.voice.rng.choice((None, OWN_S))
        sent = [self._message(own_s) for _ in range(self.voice.rng.choice((1, 1, 3)))]
        request = PublishRequest([each.payload for each in sent], ttl_s=own_s, atomic=self.voice.rng.random() < 0.3)
        try:
            await self.voice.ask("POST", topic_path(TOPIC, "/publish"), JSON.encode_publish(request), RECEIPT)
        except (NotSent, Refused):
            for each in sent:
                each.refused = True
            raise
        for each in sent:
            each.told_s = self.stage.world.now_s()

    def _message(self, own_s: int | None) -> Sent:
        self._count += 1
        sent = Sent(b"brief.%d" % self._count, own_s)
        self.notes.sent[sent.payload] = sent
        return sent

    async def look(self, at: Instance | None = None) -> None:
        """Read all messages from the beginning. Raises NotSent, Doubt, Refused."""
        world, position = self.stage.world, None
        committed = self.voice.rng.random() < 0.3
        limit = self.voice.rng.choice((2, None, None))
        while True:
            since, longest_s = world.watch(), self._longest_s
            poll = await read_page(self.voice, TOPIC, position, committed=committed, limit=limit, at=at, noted=False)
            least_ms, most_ms = world.between(since)
            self.notes.looks.append(Look(poll, least_ms, most_ms, (self._shortest_s, longest_s)))
            if poll.end != "more":
                return
            position = poll.through

    async def live_as_long_as(self, ttl_s: int) -> None:
        """Change the topic's TTL. Raises NotSent, Doubt, Refused."""
        world, before_s = self.stage.world, self._longest_s
        least_ms, _ = world.between(world.watch())
        self._shortest_s = min(self._shortest_s, ttl_s)  # possibly only for a moment, but expired messages stay expired
        try:
            await self.voice.tell("PUT", topic_path(TOPIC, "/properties"), {"ttl": ttl_s})
        except Doubt:
            self._doubted_s.add(ttl_s)
            raise
        self.notes.floors.append((world.now_s(), least_ms - before_s * 1000))
        self._acknowledged_s = ttl_s


async def watch(stage: SimulatedStage, seed: int, pause_s: float) -> None:
    """Run until the end; then publish once more, and read at every instance until the message has expired."""
    async with stage.voice(seed) as voice:
        watcher = Watcher(stage, voice)
        await watcher.make()
        while not stage.over:
            with suppress(NotSent, Doubt, Refused):
                await watcher.act()
            await stage.rest(pause_s)
        await at_last(stage, watcher.publish)
        for _ in range(4):
            for instance in stage.cluster.instances:
                await at_last(stage, partial(watcher.look, instance))
            chance = voice.rng.random()
            if chance < 0.3:
                await at_last(stage, partial(watcher.live_as_long_as, voice.rng.choice(TTLS_S)))
            elif chance < 0.45:
                await _led_astray(watcher)
            await stage.world.sleep(voice.rng.choice((0.4, 0.9, 1.7)))


async def _led_astray(watcher: Watcher) -> None:
    """Set all clocks ahead until all instances restart: messages that were seen to expire in this time stay expired."""
    stage, by_s = watcher.stage, watcher.voice.rng.choice((3, 7))
    stage.world.jump_all(by_s)
    for instance in stage.cluster.instances:
        await at_last(stage, partial(watcher.look, instance))
    stage.world.end_all()
    stage.world.jump_all(-by_s)
