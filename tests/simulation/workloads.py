"""More clients: rivals for one producer name, producers that regroup messages when they resend them, transactions that
overlap and end in every way, and readers that wait.

Their records go into the history, which the clusters' checker judges; this module judges only the wake-ups of readers.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import trio

from plainsong.protocol.requests import PublishRequest
from tests.cluster.course import at_last
from tests.cluster.history.records import Transaction, Write
from tests.cluster.readers import read_page
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import RECEIPT, TX, Producer, decide, payloads_of, publish
from tests.codecs import JSON
from tests.daemon.talk import topic_path
from tests.simulation.clocks import time_now

if TYPE_CHECKING:
    from tests.cluster.harness import Instance
    from tests.simulation.world import SimulatedStage


# --- producers -------------------------------------------------------------------------------------


async def rival(stage: SimulatedStage, name: str, who: str, topic: str, seed: int, pause_s: float) -> None:
    """Run one of several clients with the same producer name, which take the session from one another now and then."""
    async with stage.voice(seed) as voice:
        producer, is_open = Producer(voice, name, topic), False
        for number in count(1):
            if stage.over:
                return
            if not is_open or voice.rng.random() < 0.15:
                with suppress(NotSent, Doubt, Refused):
                    await producer.open()
                    producer.next_sequence = stage.history.openings[-1].last_sequence + 1
                    is_open = True
            if is_open:
                is_open = await _sent_in_session(producer, payloads_of(f"{name}-{who}-{number}", voice), pause_s)
            await stage.rest(pause_s)


async def _sent_in_session(producer: Producer, payloads: tuple[bytes, ...], pause_s: float) -> bool:
    """Send a batch up to a few times, only in this session. Return True if the session may continue: no doubt is left."""
    voice, first = producer.voice, producer.next_sequence
    write = Write(
        producer.topic,
        payloads,
        trio.current_time(),
        producer=producer.name,
        epoch=producer.epoch,
        sequences=tuple(range(first, first + len(payloads))),
    )
    producer.next_sequence += len(payloads)
    voice.stage.history.writes.append(write)
    for _ in range(3):
        try:
            await publish(
                voice,
                write,
                atomic=len(payloads) > 1,
                producer=producer.name,
                producer_epoch=producer.epoch,
                sequence_ids=write.sequences,
            )
        except Refused as refused:
            if refused.code == "producer_fenced":
                return voice.rng.random() < 0.3  # it may continue anyway, like a program that ignores answers
        except (NotSent, Doubt):
            pass
        else:
            return True
        await voice.stage.rest(pause_s)
    return False


async def regrouping_producer(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Resend unacknowledged messages together with new ones, and sometimes the last acknowledged ones."""
    async with stage.voice(seed) as voice:
        producer = Producer(voice, name, voice.rng.choice(stage.topics))
        await producer.reopen(pause_s)
        window: list[Write] = []
        for number in count(1):
            if stage.over:
                return
            kept = 1 if voice.rng.random() < 0.3 else 0
            done = [write for write in window if write.outcome == "acknowledged"]
            window = done[len(done) - kept :] + [write for write in window if write.outcome != "acknowledged"]
            for part in range(voice.rng.choice((1, 1, 2))):
                window.append(_of_window(producer, b"%s-%d.%d" % (name.encode(), number, part)))
            try:
                await _send_together(producer, window)
            except Refused as refused:
                if refused.code == "producer_fenced":  # by its own opening, which got no answer
                    await producer.reopen(pause_s)
            except (NotSent, Doubt):
                if voice.rng.random() < 0.3:
                    await producer.reopen(pause_s)
            await stage.rest(pause_s)


def _of_window(producer: Producer, payload: bytes) -> Write:
    sequence = producer.next_sequence
    producer.next_sequence += 1
    # The write's session is unknown, since it may be sent again in a later session.
    write = Write(
        producer.topic, (payload,), trio.current_time(), producer=producer.name, epoch=None, sequences=(sequence,)
    )
    producer.voice.stage.history.writes.append(write)
    return write


async def _send_together(producer: Producer, window: list[Write]) -> None:
    """Send the whole window in one request that is not atomic. Raises NotSent, Doubt, Refused."""
    request = PublishRequest(
        tuple(write.payloads[0] for write in window),
        producer=producer.name,
        producer_epoch=producer.epoch,
        sequence_ids=tuple(write.sequences[0] for write in window),
    )
    for write in window:
        write.sent()
    try:
        await producer.voice.ask("POST", topic_path(producer.topic, "/publish"), JSON.encode_publish(request), RECEIPT)
    except (NotSent, Refused):
        for write in window:
            write.refused()
        raise
    for write in window:
        write.acknowledged(trio.current_time())
    producer.voice.stage.count("acknowledged")


# --- transactions ----------------------------------------------------------------------------------

#: Ends of a transaction: decided, left to its time-out, or decided by two clients, one committing and one aborting; and
#: requests under its pointer during the commit, or after the decision.
ENDINGS = ("commit", "commit", "abort", "leave", "both", "both", "hasty", "late")


#: The pause between transactions of a client that publishes nothing: several begin before the first one is written.
IDLE_PAUSE_S = 0.02


async def entangled_writer(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Run transactions of several requests until the end."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused):
                await _Entangled(voice, f"{name}-{number}").run()
            await stage.rest(pause_s)


class _Entangled:
    """A transaction of an entangled writer."""

    def __init__(self, voice: Voice, name: str) -> None:
        self.voice, self.stage, self.name = voice, voice.stage, name
        self._parts = count(1)
        self._topics: list[str] = []

    async def run(self) -> None:
        """Run the transaction from begin to end. Raises NotSent, Doubt, Refused."""
        rng, began_s = self.voice.rng, trio.current_time()
        asked = {"timeoutSeconds": rng.choice((1, 1, 2, 30)), "clientId": self.name}
        begun = await self.voice.tell("POST", TX, asked)
        self.transaction = Transaction(begun["id"], began_s, trio.current_time(), {begun["writePointer"]})
        self.pointer = begun["writePointer"]
        self.stage.history.transactions.append(self.transaction)
        ending = rng.choice(ENDINGS)
        try:
            for _ in range(rng.choice((0, 0, 1) if ending == "hasty" else (1, 2, 3, 4))):
                if rng.random() < 0.1:
                    await self._checkpoint()
                await self._publish(rng.choice(self.stage.topics))
                await self._pause()
        except (NotSent, Doubt, Refused):
            ending = rng.choice(("abort", "leave"))
        await self._end(ending)

    async def _checkpoint(self) -> None:
        """Continue under a new pointer."""
        told = await self.voice.tell("POST", f"{TX}/{self.transaction.id}/checkpoint")
        self.pointer = told["writePointer"]
        self.transaction.pointers.add(self.pointer)

    async def _end(self, ending: str) -> None:
        if ending == "both":
            async with trio.open_nursery() as nursery:
                for verb in ("commit", "abort"):
                    nursery.start_soon(self._decide, verb)
        elif ending == "hasty":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._decide, "commit")
                nursery.start_soon(self._publish_elsewhere)
            await self._read(self._topics[-1])
        elif ending == "late":
            await self._decide(self.voice.rng.choice(("commit", "abort")))
            await self._publish_elsewhere()
        elif ending != "leave":
            await self._decide(ending)

    async def _publish_elsewhere(self) -> None:
        """Publish to a topic to which the transaction has not written yet, if there is one."""
        others = [topic for topic in self.stage.topics if topic not in self._topics]
        with suppress(NotSent, Doubt, Refused):
            await self._pause()
            await self._publish(self.voice.rng.choice(others or self.stage.topics))

    async def _publish(self, topic: str) -> None:
        self._topics.append(topic)
        payloads = payloads_of(f"{self.name}.{next(self._parts)} in {topic}", self.voice)
        write = Write(topic, payloads, trio.current_time(), self.transaction)
        self.stage.history.writes.append(write)
        await publish(self.voice, write, self.pointer)

    async def _read(self, topic: str) -> None:
        """Read the messages that have been committed by now."""
        with suppress(NotSent, Doubt, Refused):
            await read_page(self.voice, topic, None, committed=True)

    async def _decide(self, verb: str) -> None:
        """Request the decision, up to a few times."""
        await self._pause()
        for _ in range(3):
            try:
                await decide(self.voice, self.transaction, verb)
            except (NotSent, Doubt, Refused):
                await time_now().sleep(0.2)
            else:
                return

    async def _pause(self) -> None:
        """Pause so briefly that other requests only sometimes come in between."""
        await time_now().sleep(self.voice.rng.choice((0.0, 0.0, 0.002, 0.01, 0.05)))


async def hasty_writer(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Commit transactions while their only request is in progress; a client that gets an answer reads at once."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused):
                await _hurry(voice, f"{name}-{number}")
            await stage.rest(pause_s)


async def _hurry(voice: Voice, name: str) -> None:
    """Run one transaction of a hasty writer. Raises NotSent, Doubt, Refused if it did not begin."""
    stage, began_s, topic = voice.stage, trio.current_time(), voice.rng.choice(voice.stage.topics)
    begun = await voice.tell("POST", TX, {"timeoutSeconds": 30, "clientId": name})
    transaction = Transaction(begun["id"], began_s, trio.current_time(), {begun["writePointer"]})
    stage.history.transactions.append(transaction)
    write = Write(topic, payloads_of(name, voice), trio.current_time(), transaction)
    stage.history.writes.append(write)

    async def commit() -> None:
        with suppress(NotSent, Doubt, Refused):
            await time_now().sleep(voice.rng.choice((0.001, 0.002, 0.004)))
            await decide(voice, transaction, "commit")
            for _ in range(2):
                # A read that begins at exactly the time of an answer counts as begun before it.
                await time_now().sleep(0.0002)
                await read_page(voice, topic, None, committed=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit)
        with suppress(NotSent, Doubt, Refused):
            await publish(voice, write, begun["writePointer"])


async def idle_writer(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Begin transactions and publish nothing under them, so that a crash may lose them. ``pause_s`` is not used."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused):
                begun = await voice.tell("POST", TX, {"timeoutSeconds": 1, "clientId": f"{name}-{number}"})
                stage.idle.append(begun["id"])
            await stage.rest(IDLE_PAUSE_S)


def issued_twice(stage: SimulatedStage) -> list[tuple[str, str]]:
    """Return an anomaly for each transaction id that was returned to two begin requests."""
    known = Counter([*stage.idle, *(each.id for each in stage.history.transactions)])
    return [("issued twice", f"transaction {id_} was begun {times} times") for id_, times in known.items() if times > 1]


# --- readers that wait -----------------------------------------------------------------------------

#: The longest wait of readers, and the time within which they must be woken if there are no faults.
WAIT_S, TOLD_S = 10.0, 3.0


async def wake(stage: SimulatedStage, seed: int) -> None:
    """After all faults, have readers wait at the end of a topic at each instance, and check that they wake."""
    async with stage.voice(seed) as voice:
        topic = voice.rng.choice(stage.topics)
        for instance in stage.cluster.instances:
            for committed in stage.isolations:
                await _wake_one(stage, voice, topic, instance, committed=committed)


async def _wake_one(stage: SimulatedStage, voice: Voice, topic: str, at: Instance, *, committed: bool) -> None:
    position = await at_last(stage, partial(_end_of, voice, topic, at, committed))
    if position is None:
        return
    told_s: list[float] = []

    async def wait(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        with suppress(NotSent, Doubt, Refused):
            while not told_s:
                page = await read_page(
                    voice, topic, position, committed=committed, wait_ms=int(WAIT_S * 1000), at=at, noted=False
                )
                if page.messages:
                    told_s.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        await nursery.start(wait)
        await time_now().sleep(0.3)
        await at_last(stage, partial(_publish_one, voice, topic))
        published_s = trio.current_time()
    if told_s and told_s[0] > published_s + TOLD_S:
        kind = "committed" if committed else "plain"
        late_s = told_s[0] - published_s
        stage.asleep.append(f"a {kind} reader at {at.name} was woken for {topic} after {late_s:.1f} s")


async def _publish_one(voice: Voice, topic: str) -> None:
    """Publish a new message. Raises NotSent, Doubt, Refused."""
    write = Write(topic, (b"wake.%d" % len(voice.stage.history.writes),), trio.current_time())
    voice.stage.history.writes.append(write)
    await publish(voice, write)


async def _end_of(voice: Voice, topic: str, at: Instance, committed: bool) -> bytes | None:
    """Return the position after all messages; None if there are none, or if an open transaction blocks readers."""
    position = None
    while True:
        page = await read_page(voice, topic, position, committed=committed, at=at, noted=False)
        position = page.through or position
        if page.end != "more":
            return position if page.end == "end" else None
