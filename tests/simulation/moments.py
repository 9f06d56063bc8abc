"""Readers as of a moment: their pages, and the violations that must never occur.

The judge tests the promise, not the code. A read as of a moment shows, in the topic's order, messages without a pointer
that were published by then, and messages of transactions that were committed by then (``decidedMs``). It shows the same
messages whenever, wherever and however often it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import inf
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

import trio

from plainsong.protocol.codec import JSON
from plainsong.protocol.requests import PollRequest
from tests.cluster.course import at_last
from tests.cluster.readers import FRAMES
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import TX
from tests.daemon.talk import topic_path

if TYPE_CHECKING:
    from tests.cluster.harness import Instance
    from tests.cluster.history.records import History, Transaction
    from tests.simulation.world import SimulatedStage

Kind = Literal[
    "shown early",  # as of a moment before its time
    "not shown",  # as of a moment at or after its time
    "never committed",  # shown, although it was never committed
    "moment changed",  # two readers as of one moment saw different messages
    "moment split",  # a part of a transaction was shown
    "moment disorder",  # a page out of order; a commit shown without one that was answered before it began
]


class Anomaly(NamedTuple):
    """One violation."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """The messages of one topic as of one moment, from its beginning."""

    at_ms: int
    topic: str
    instance: str
    messages: tuple[tuple[bytes, bytes], ...]
    is_whole: bool
    """True if the topic was read to its end."""

    @property
    def name(self) -> str:
        """The reader's name in reports."""
        return f"a reader of {self.topic} at {self.instance} as of {self.at_ms}"


@dataclass(slots=True)
class Notes:
    """Everything recorded during a history."""

    looks: list[Look] = field(default_factory=list)
    decided_ms: dict[int, int] = field(default_factory=dict)
    """By transaction, as the service reports them at the end."""


def judged(notes: Notes, history: History) -> list[Anomaly]:
    """Return all violations."""
    owners = {pointer: each for each in history.transactions for pointer in each.pointers}
    found = list[Anomaly]()
    for look in notes.looks:
        found += _of_look(look, notes, history, owners)
    by_moment: dict[int, list[Look]] = {}
    for look in notes.looks:
        by_moment.setdefault(look.at_ms, []).append(look)
    for looks in by_moment.values():
        found += _of_moment(looks, history)
    return found


def _of_look(look: Look, notes: Notes, history: History, owners: Mapping[int, Transaction]) -> Iterator[Anomaly]:
    ids = [message_id for message_id, _ in look.messages]
    if ids != sorted(set(ids)):
        yield Anomaly("moment disorder", f"{look.name}: ids do not ascend")
    shown = dict(look.messages)
    log = history.logs.get(look.topic, ())
    for message_id, payload, pointer in log:
        owner = owners.get(abs(pointer))
        is_shown = shown.get(message_id) == payload
        if not pointer:
            time_ms: float = _published_ms(message_id)
        elif pointer < 0 or owner is None or owner.state != "committed":
            time_ms = inf
        else:
            time_ms = notes.decided_ms.get(owner.id, inf)
        if is_shown and time_ms > look.at_ms:
            kind: Kind = "never committed" if time_ms == inf else "shown early"
            yield Anomaly(kind, f"{look.name} was shown {payload!r}, whose time is {time_ms}")
        if not is_shown and time_ms <= look.at_ms and (look.is_whole or (ids and message_id < ids[-1])):
            yield Anomaly("not shown", f"{look.name} was not shown {payload!r}, whose time is {time_ms}")
    there = {message_id for message_id, _, _ in log}
    for message_id in shown.keys() - there:
        yield Anomaly("never committed", f"{look.name} was shown {shown[message_id]!r}, which is not there")


def _of_moment(looks: list[Look], history: History) -> Iterator[Anomaly]:
    """Judge all reads as of one moment, without using the service's times."""
    by_topic: dict[str, Look] = {}
    for look in looks:
        other = by_topic.setdefault(look.topic, look)
        both = min(len(look.messages), len(other.messages))
        if look.messages[:both] != other.messages[:both] or (
            look.is_whole and other.is_whole and look.messages != other.messages
        ):
            yield Anomaly("moment changed", f"{look.name} and {other.name} were shown different things")
        if look.is_whole:
            by_topic[look.topic] = look
    whole = {topic: {each for _, each in look.messages} for topic, look in by_topic.items() if look.is_whole}
    shown: dict[Transaction, set[bool]] = {}
    for write in history.writes:
        if write.transaction is not None and write.topic in whole and write.outcome == "acknowledged":
            for payload in write.payloads:
                shown.setdefault(write.transaction, set()).add(payload in whole[write.topic])
    for transaction, seen in shown.items():
        if len(seen) > 1:
            yield Anomaly("moment split", f"a part of transaction {transaction.id} was shown as of {looks[0].at_ms}")
    for one, other in combinations(shown, 2):
        for first, second in ((one, other), (other, one)):
            if first.committed_s < second.asked_s and shown[second] == {True} and shown[first] == {False}:
                yield Anomaly(
                    "moment disorder",
                    f"as of {looks[0].at_ms} {second.id} was shown without {first.id}, which came first",
                )


def _published_ms(message_id: bytes) -> int:
    return int.from_bytes(message_id[:8], "big")


# --- readers ---------------------------------------------------------------------------------------


class Traveller:
    """Chooses moments, and reads topics as of them."""

    def __init__(self, stage: SimulatedStage, voice: Voice) -> None:
        self.stage, self.voice, self.rng = stage, voice, voice.rng

    async def act(self) -> None:
        """Read some topics as of one moment. Raises NotSent, Doubt, Refused."""
        at_ms = await self._moment()
        for topic in self.rng.sample(self.stage.topics, self.rng.randrange(1, len(self.stage.topics) + 1)):
            with suppress(NotSent, Doubt, Refused):
                await self.look(topic, at_ms)

    async def _moment(self) -> int:
        """Return a moment read before, the time of a commit, a message or a clock, or just before such a time."""
        chance = self.rng.random()
        history, notes = self.stage.history, self.stage.moments
        committed = [each for each in history.transactions if each.committed_s < inf]
        seen = [poll for poll in history.polls[-20:] if poll.messages]
        if chance < 0.2 and notes.looks:
            return self.rng.choice(notes.looks).at_ms
        if chance < 0.5 and committed:
            told = await self.voice.tell("GET", f"{TX}/{self.rng.choice(committed[-5:]).id}")
            at_ms = int(told["decidedMs"] or 0)
        elif chance < 0.7 and seen:
            at_ms = _published_ms(self.rng.choice(seen).messages[-1][0])
        else:
            at_ms = self.rng.choice(self.stage.world.instances).clock.peek_ms()
        return max(0, at_ms - self.rng.choice((0, 0, 1)))

    async def look(self, topic: str, at_ms: int, at: Instance | None = None) -> None:
        """Read a topic from its beginning. Raises NotSent, Doubt, Refused; the pages read until then are recorded."""
        position = None
        messages: list[tuple[bytes, bytes]] = []
        is_whole, where = False, ""
        try:
            while not is_whole:
                instance = at or self.voice.somebody()
                where = instance.name
                # The limit is drawn for each page: reading a whole topic in pages of two would cost more than the rest
                # of a history.
                request = PollRequest(position, position is None, self.rng.choice((2, 5, None)))
                path = topic_path(topic, f"/poll?as_of_ms={at_ms}")
                answer = await self.voice.ask("POST", path, JSON.encode_poll(request), FRAMES, at=instance)
                messages += answer.messages()
                is_whole = answer.headers["plainsong-end"] == "end"
                assert is_whole or answer.headers["plainsong-end"] == "more", "nothing holds such a reader"
                last_id = answer.headers.get("plainsong-last-id")
                position = None if last_id is None else bytes.fromhex(last_id)
        finally:
            if messages or is_whole:
                self.stage.moments.looks.append(Look(at_ms, topic, where, tuple(messages), is_whole))


async def travel(stage: SimulatedStage, seed: int, pause_s: float) -> None:
    """Run until the end."""
    async with stage.traveller(seed) as voice:
        traveller = Traveller(stage, voice)
        while not stage.over:
            with suppress(NotSent, Doubt, Refused):
                await traveller.act()
            await stage.rest(pause_s)


async def return_to(stage: SimulatedStage, seed: int) -> None:
    """After all faults, read again as of some moments at every instance, and ask for decision times."""
    async with stage.voice(seed) as voice:
        traveller = Traveller(stage, voice)
        for transaction in stage.history.transactions:
            told = await at_last(stage, partial(voice.tell, "GET", f"{TX}/{transaction.id}"))
            if told["decidedMs"] is not None:
                stage.moments.decided_ms[transaction.id] = int(told["decidedMs"])
        # A moment that was answered once is answered forever, even by an owner whose clock is behind.
        known = sorted({(each.topic, each.at_ms) for each in stage.moments.looks})
        for topic, at_ms in Random(seed).sample(known, min(len(known), 12)):
            for instance in stage.cluster.instances:
                await at_last(stage, partial(traveller.look, topic, at_ms, instance))
        await trio.lowlevel.checkpoint()
