"""A topic that is deleted, undeleted and recreated: its client, and a model of the messages that readers may see.

One client sends one request at a time. A refused request has not happened; one without an answer may happen at any
later time, or never. Each answer removes the *worlds* in which it is impossible; if none remains, the answer is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from plainsong.protocol.requests import PublishRequest
from tests.cluster.course import at_last
from tests.cluster.readers import read_page
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import RECEIPT, TX
from tests.codecs import JSON
from tests.daemon.talk import topic_path

if TYPE_CHECKING:
    from tests.cluster.harness import Instance
    from tests.simulation.world import SimulatedStage

TOPIC = "garden"
#: How long a deleted topic can be undeleted, as configured in the instances.
GRACE_S = 1
#: Requests, weighted by their frequency.
OF_A_LIVING_ONE = (
    *("publish", "publish", "publish", "read", "read", "read"),
    *("delete", "delete", "undelete", "create", "store"),
)
OF_NONE = ("publish", "read", "delete", "undelete", "undelete", "undelete", "create", "create")
#: If there are more worlds than this, checking stops.
MOST_WORLDS = 400


@dataclass(frozen=True, slots=True)
class World:
    """One possible state of the topic."""

    alive: bool = False
    made: bool = False
    """True if it has ever existed."""
    buried: bool = False
    """True if the deleted topic cannot be undeleted."""
    contents: tuple[bytes, ...] = ()
    pending: frozenset[tuple[str, tuple[bytes, ...]]] = frozenset()
    """Requests without an answer, which may still happen."""


def published(world: World, payloads: tuple[bytes, ...]) -> World | None:
    """Return the world after a request; None if it would be refused."""
    return replace(world, contents=world.contents + payloads) if world.alive else None


def removed(world: World, _: tuple[bytes, ...]) -> World | None:
    return replace(world, alive=False, buried=False) if world.alive else None


def restored(world: World, _: tuple[bytes, ...]) -> World | None:
    return replace(world, alive=True) if world.made and not world.alive and not world.buried else None


def created(world: World, _: tuple[bytes, ...]) -> World | None:
    return world if world.alive else World(alive=True, made=True, pending=world.pending)


VERBS: dict[str, Callable[[World, tuple[bytes, ...]], World | None]] = {
    "publish": published,
    "delete": removed,
    "undelete": restored,
    "create": created,
}


@dataclass(slots=True)
class Model:
    """All worlds that agree with the answers so far."""

    worlds: set[World] = field(default_factory=lambda: {World()})
    wrong: list[str] = field(default_factory=list)
    lost: bool = False
    """True if there are too many worlds, or none, so that nothing more is checked."""

    def begins(self) -> None:
        """Let time pass: requests without an answer may happen."""
        found = list(self.worlds)
        while found and len(self.worlds) <= MOST_WORLDS:
            world = found.pop()
            for each in world.pending:
                after = VERBS[each[0]](world, each[1])
                if after is not None:
                    after = replace(after, pending=after.pending - {each})
                    if after not in self.worlds:
                        self.worlds.add(after)
                        found.append(after)
        self.lost = self.lost or len(self.worlds) > MOST_WORLDS

    def happened(self, verb: str, payloads: tuple[bytes, ...] = ()) -> None:
        """Apply an acknowledged request."""
        self._now((VERBS[verb](world, payloads) for world in self.worlds), f"{verb} is acknowledged")

    def unknown(self, verb: str, payloads: tuple[bytes, ...] = ()) -> None:
        """Add a request without an answer to the pending ones."""
        self.worlds = {replace(world, pending=world.pending | {(verb, payloads)}) for world in self.worlds}
        self.begins()

    def said(self, fits: Callable[[World], bool], what: str) -> None:
        """Keep the worlds in which an answer is possible."""
        self._now((world if fits(world) else None for world in self.worlds), what)

    def buried(self) -> None:
        """Apply an answer which says that the topic cannot be undeleted."""
        self._now(
            (replace(world, buried=True) if world.made and not world.alive else None for world in self.worlds),
            "it cannot be brought back",
        )

    def may_come_back(self) -> None:
        """Allow an undelete again: by some instance's clock the grace period is not over, even if another refused."""
        self.worlds = {replace(world, buried=False) for world in self.worlds}

    def _now(self, worlds: Iterable[World | None], what: str) -> None:
        before, self.worlds = self.worlds, {world for world in worlds if world is not None}
        if not self.worlds and not self.lost:
            possible = sorted(f"{'alive' if each.alive else 'gone'} {list(each.contents)}" for each in before)
            self.wrong.append(f"{what}, and nothing explains it: it is one of {possible[:4]}")
            self.lost = True
        self.begins()


class Gardener:
    """A client that sends one request at a time and tracks its possible effects."""

    def __init__(self, stage: SimulatedStage, voice: Voice) -> None:
        self.stage, self.voice = stage, voice
        self.model = stage.garden
        self._count = 0
        self._deleted_ms = (0, 0)
        #: Earliest time at which an unanswered deletion may have happened.
        self._doubted_ms = inf

    async def act(self) -> None:
        """Send one request of some kind."""
        model = self.model
        payloads: tuple[bytes, ...] = ()
        model.begins()
        alive = any(each.alive for each in model.worlds)
        verb = self.voice.rng.choice(OF_A_LIVING_ONE if alive else OF_NONE)
        if verb == "publish":
            payloads = tuple(self._payload() for _ in range(self.voice.rng.choice((1, 1, 3))))
        since = self.stage.world.watch()
        if verb == "undelete" and self.voice.rng.random() < 0.3:
            await self.stage.world.sleep(self.voice.rng.choice((0.5, 1.0, 1.5)) * GRACE_S)
        try:
            if verb == "read":
                await self.read()
            elif verb == "store":
                await self._store()
            else:
                await self._change(verb, payloads)
        except NotSent:
            pass
        except Doubt:
            if verb == "undelete" and self._may_be_within_grace(since):
                model.may_come_back()
            if verb not in ("read", "store"):
                model.unknown(verb, payloads)
            if verb == "delete":
                self._doubted_ms = min(self._doubted_ms, since[0])
        except Refused as refused:
            self._refused(refused.code)

    async def _change(self, verb: str, payloads: tuple[bytes, ...]) -> None:
        world = self.stage.world
        since = world.watch()
        if verb == "publish":
            request = PublishRequest(payloads, atomic=self.voice.rng.random() < 0.5)
            await self.voice.ask("POST", topic_path(TOPIC, "/publish"), JSON.encode_publish(request), RECEIPT)
        elif verb == "create":
            await self.voice.tell("PUT", topic_path(TOPIC, "?ifNotExists=true"), {})
        elif verb == "delete":
            await self.voice.tell("DELETE", topic_path(TOPIC))
            self._deleted_ms = world.between(since)
        else:
            await self.voice.tell("POST", topic_path(TOPIC, "/undelete"))
            if self._may_be_within_grace(since):
                self.model.may_come_back()
            else:
                self.model.wrong.append("it was brought back after its grace")
        self.model.begins()
        self.model.happened(verb, payloads)

    def _may_be_within_grace(self, since: tuple[int, int]) -> bool:
        """True if some wall clock since then is still within the deleted topic's grace period."""
        return self._doubted_ms < inf or self.stage.world.between(since)[0] <= self._deleted_ms[1] + GRACE_S * 1000

    def _refused(self, code: str) -> None:
        model = self.model
        model.begins()
        if code == "topic_not_found":
            model.said(lambda world: not world.alive, "it is not there")
        elif code == "topic_exists":
            model.said(lambda world: world.alive, "it exists")
        elif code == "partly_cleaned":
            if (
                self.stage.world.between(self.stage.world.watch())[1]
                < min(self._deleted_ms[0], self._doubted_ms) + GRACE_S * 1000
            ):
                model.wrong.append("it could not be brought back within its grace")
            model.buried()

    async def _store(self) -> None:
        """Store messages and never publish them: no reader may see them. Raises NotSent, Doubt, Refused."""
        begun = await self.voice.tell("POST", TX, {"timeoutSeconds": 30, "clientId": "gardener"})
        body = JSON.encode_publish(PublishRequest((b"seed",), begun["writePointer"]))
        await self.voice.ask("POST", topic_path(TOPIC, "/store"), body, RECEIPT)

    async def read(self, at: Instance | None = None) -> None:
        """Read all messages in one page. Raises NotSent, Doubt, Refused."""
        poll = await read_page(
            self.voice, TOPIC, None, committed=self.voice.rng.random() < 0.3, limit=None, at=at, noted=False
        )
        shown = tuple(payload for _, payload in poll.messages)
        ids = [message_id for message_id, _ in poll.messages]
        if ids != sorted(set(ids)):
            self.model.wrong.append(f"ids do not ascend: {ids}")
        self.model.begins()
        self.model.said(lambda world: world.alive and world.contents == shown, f"{poll.name} was shown {list(shown)}")

    def _payload(self) -> bytes:
        self._count += 1
        return b"garden.%d" % self._count


async def tend(stage: SimulatedStage, seed: int, pause_s: float) -> None:
    """Run until the end; then read at every instance."""
    async with stage.voice(seed) as voice:
        gardener = Gardener(stage, voice)
        while not stage.over:
            await gardener.act()
            await stage.rest(pause_s)
        for instance in stage.cluster.instances:
            stage.garden.begins()
            await at_last(stage, partial(_read_or_gone, gardener, instance))


async def _read_or_gone(gardener: Gardener, instance: Instance) -> None:
    try:
        await gardener.read(instance)
    except Refused as refused:
        if refused.code != "topic_not_found":
            raise
        gardener._refused(refused.code)
