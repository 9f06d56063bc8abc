"""Jobs whose tasks stage messages, some of them twice; one publish turns the winning attempts into one batch.

The history records a batch as one write with one sequence id, which the clusters' checker judges: the whole batch must
be there once, and nothing from a losing attempt.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import trio

from plainsong.protocol.requests import PublishRequest
from tests.cluster.history.records import Write
from tests.cluster.voices import Doubt, NotSent, Refused
from tests.cluster.writers import RECEIPT, Producer, payloads_of
from tests.codecs import JSON
from tests.daemon.talk import topic_path

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedStage

#: Number of times that a store is sent before its attempt is abandoned.
_TRIES = 4
#: Refusals of a batch whose segments were removed, for example because a clock jumped by an hour. Nothing was
#: published.
_CLEANED = ("invalid_parameter", "already_published")


class Job:
    """One producer's consecutive batches in one topic."""

    def __init__(self, producer: Producer, pause_s: float) -> None:
        self.producer, self.pause_s = producer, pause_s
        self.voice, self.stage = producer.voice, producer.voice.stage
        self._attempts = count(1)

    async def run_batch(self, number: int) -> None:
        """Stage and publish until the batch is stored; return early if the history ends before it was published."""
        sequence_id, self.producer.next_sequence = self.producer.next_sequence, self.producer.next_sequence + 1
        while not self.stage.over:
            won: dict[str, tuple[bytes, ...]] = {}
            for task in range(self.voice.rng.choice((1, 1, 2))):
                segment, payloads = await self._run_task(f"{self.producer.name}-{number}.{task}")
                won[segment] = payloads
            if await self._publish(sequence_id, won):
                return
        # Nothing was sent with this sequence id: the next session continues from the daemon's answer.

    async def _run_task(self, name: str) -> tuple[str, tuple[bytes, ...]]:
        """Run attempts with new segments until one has stored all messages and wins."""
        while True:
            segment = f"{name}.{next(self._attempts)}"
            payloads = payloads_of(segment, self.voice)
            if await self._store(segment, payloads) and self.voice.rng.random() < 0.8:
                return segment, payloads
            await self.stage.rest(self.pause_s)

    async def _store(self, segment: str, payloads: tuple[bytes, ...]) -> bool:
        """Store in one or two requests, each repeated until it is answered, and sometimes once more."""
        cut = self.voice.rng.randrange(len(payloads)) if self.voice.rng.random() < 0.5 else 0
        for low, high in ((0, cut), (cut, len(payloads))):
            request = PublishRequest(
                payloads[low:high],
                producer=self.producer.name,
                producer_epoch=self.producer.epoch,
                segment=segment,
                sequence_ids=tuple(range(low, high)),
            )
            if request.messages and not await self._send_store(request):
                return False
        return True

    async def _send_store(self, request: PublishRequest) -> bool:
        answered = False
        for _ in range(_TRIES):
            try:
                await self._ask("store", request)
            except Refused as refused:
                if refused.code == "producer_fenced":  # by its own opening, which got no answer
                    await self.producer.reopen(self.pause_s)
                    return False
                if refused.code in _CLEANED:
                    return False
                await self.stage.rest(self.pause_s)
            except (NotSent, Doubt):
                await self.stage.rest(self.pause_s)
            else:
                if answered or self.voice.rng.random() < 0.8:
                    return True
                answered = True
        return answered

    async def _publish(self, sequence_id: int, won: dict[str, tuple[bytes, ...]]) -> bool:
        """Publish; return True if the batch is stored, False if it never will be, because its segments are gone."""
        producer, payloads = self.producer, tuple(payload for each in won.values() for payload in each)
        write = Write(
            producer.topic, payloads, trio.current_time(), producer=producer.name, sequences=(sequence_id,), epoch=None
        )
        self.stage.history.writes.append(write)
        while True:
            write.sent()
            request = PublishRequest(
                (),
                producer=producer.name,
                producer_epoch=producer.epoch,
                sequence_ids=(sequence_id,),
                segments=tuple(won),
            )
            try:
                await self._ask("publish", request)
            except Refused as refused:
                write.refused()
                if refused.code in _CLEANED:
                    return False
            except NotSent:
                write.refused()
            except Doubt:
                pass
            else:
                write.acknowledged(trio.current_time())
                self.stage.count("acknowledged")
                if self.voice.rng.random() < 0.8:
                    return True
            await self.stage.rest(self.pause_s)
            if write.outcome != "acknowledged" and self.voice.rng.random() < 0.5:
                await producer.reopen(self.pause_s)

    async def _ask(self, verb: str, request: PublishRequest) -> Any:
        path = topic_path(self.producer.topic, f"/{verb}")
        return await self.voice.ask("POST", path, JSON.encode_publish(request), RECEIPT)


async def run(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Run batches until the end; complete a batch whose publish was sent."""
    async with stage.stager(seed) as voice:
        producer = Producer(voice, name, voice.rng.choice(stage.topics))
        await producer.reopen(pause_s)
        job = Job(producer, pause_s)
        for number in count(1):
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused):
                await job.run_batch(number)
            await stage.rest(pause_s)
