"""A chained topic: a client that publishes plain and stored messages and saves heads, and the final verification.

The verifier is the client's (`plainsong/chains.py`). In addition, every head that a client ever saw must be an entry of
the final chain, and acknowledged messages must be among the verified ones.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from plainsong.chains import ChainHead, Verifying
from plainsong.protocol.requests import PublishRequest
from tests.cluster.course import at_last
from tests.cluster.history.records import Anomaly
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import RECEIPT, TX
from tests.codecs import JSON
from tests.daemon.talk import topic_path

if TYPE_CHECKING:
    from tests.cluster.harness import Instance
    from tests.simulation.world import SimulatedStage

TOPIC = "ledger"
PAUSE_S = 0.1


@dataclass(slots=True)
class Notes:
    """The client's heads and acknowledgements, and violations."""

    heads: list[ChainHead] = field(default_factory=list)
    acknowledged: int = 0
    """Number of messages."""
    wrong: list[str] = field(default_factory=list)


def judged(notes: Notes) -> list[Anomaly]:
    """Return all violations."""
    return [Anomaly("chain", each) for each in notes.wrong]


class Keeper:
    """Publishes to the topic and saves its heads, one request at a time."""

    def __init__(self, stage: SimulatedStage, voice: Voice) -> None:
        self.stage, self.voice, self.notes = stage, voice, stage.ledger
        self._count = 0

    async def make(self) -> None:
        """Create the topic."""
        path = topic_path(TOPIC, "?ifNotExists=true")
        await at_last(self.stage, partial(self.voice.tell, "PUT", path, {"chain": "sha256"}))

    async def act(self) -> None:
        """Send one request of some kind. Raises NotSent, Doubt, Refused."""
        chance = self.voice.rng.random()
        if chance < 0.5:
            await self.publish()
        elif chance < 0.7:
            await self._transact()
        elif chance < 0.8:
            await self._publish_stored(producer=f"keeper.{self._count}", sequence_ids=[0])
        else:
            self.notes.heads.append(ChainHead.of(await self.voice.tell("GET", topic_path(TOPIC, "/chain"))))

    async def publish(self, pointer: int | None = None) -> None:
        """Publish some messages, a few of which live for a second. Raises NotSent, Doubt, Refused."""
        rng = self.voice.rng
        messages = [self._message() for _ in range(rng.choice((1, 1, 3)))]
        ttl_s = rng.choice((None, None, 1))
        request = PublishRequest(messages, pointer, ttl_s=ttl_s, atomic=rng.random() < 0.3)
        await self.voice.ask("POST", topic_path(TOPIC, "/publish"), JSON.encode_publish(request), RECEIPT)
        if ttl_s is None:
            self.notes.acknowledged += len(messages)

    async def _transact(self) -> None:
        pointer = (await self.voice.tell("POST", TX))["id"]
        if self.voice.rng.random() < 0.5:
            await self._publish_stored(write_pointer=pointer)
        else:
            await self.publish(pointer)
        verb = self.voice.rng.choice(("commit", "abort", "abort"))
        await self.voice.tell("POST", f"{TX}/{pointer}/{verb}")

    async def _publish_stored(self, **whose: Any) -> None:
        """Store messages under two segments, of which one wins. Raises NotSent, Doubt, Refused."""
        rng = self.voice.rng
        stored = {"won": 0, "lost": 0}
        for segment in ("won", "lost", "won"):
            messages = [self._message() for _ in range(rng.choice((1, 3)))]
            stored[segment] += len(messages)
            request = PublishRequest(messages, segment=segment, **{**whose, "sequence_ids": None})
            await self.voice.ask("POST", topic_path(TOPIC, "/store"), JSON.encode_publish(request), RECEIPT)
        request = PublishRequest([], segments=["won"], **whose)
        await self.voice.ask("POST", topic_path(TOPIC, "/publish"), JSON.encode_publish(request), RECEIPT)
        self.notes.acknowledged += stored["won"]

    def _message(self) -> bytes:
        self._count += 1
        return b"ledger.%d" % self._count

    async def verify(self, at: Instance) -> None:
        """Verify the whole chain as a client does. Raises NotSent, Doubt, Refused."""
        notes = self.notes
        head = ChainHead.of(await self.voice.tell("GET", topic_path(TOPIC, "/chain"), at=at))
        verifying = Verifying(head, notes.heads[-1] if notes.heads else None)
        links: dict[str, str] = {}
        while (page := verifying.page()) is not None:
            after, messages = page
            query = f"?messages={str(messages).lower()}&limit=7" + ("" if after is None else f"&after={after}")
            found: dict[str, Any] = await self.voice.tell("GET", topic_path(TOPIC, "/chain/entries" + query), at=at)
            links.update((each["id"], each["base64"]) for each in found["entries"])
            verifying.take(found)
        report = verifying.report()
        notes.wrong += [f"{each.kind} at {each.id}, read at {at.name}: {each.detail}" for each in report.faults]
        if report.messages < notes.acknowledged and not report.expired:
            notes.wrong.append(f"{notes.acknowledged} messages were acknowledged, and {report.messages} verified")
        notes.wrong += [f"the head of entry {each.count} is no entry" for each in notes.heads if each.id not in links]


async def keep(stage: SimulatedStage, seed: int) -> None:
    """Run until the end."""
    async with stage.voice(Random(f"ledger {seed}").randrange(1 << 30)) as voice:
        keeper = Keeper(stage, voice)
        await keeper.make()
        while not stage.over:
            with suppress(NotSent, Doubt, Refused):
                await keeper.act()
            await stage.rest(PAUSE_S)


async def verify(stage: SimulatedStage, seed: int) -> None:
    """Publish once more when all faults are over, and verify at every instance."""
    async with stage.voice(Random(f"ledger's end {seed}").randrange(1 << 30)) as voice:
        keeper = Keeper(stage, voice)
        keeper._count = 1_000_000
        await keeper.make()
        await at_last(stage, keeper.publish)
        for instance in stage.cluster.instances:
            await at_last(stage, partial(keeper.verify, instance))
