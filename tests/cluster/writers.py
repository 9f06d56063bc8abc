"""Clients that write: plain messages and batches, producers with retries, and transactions over two topics."""

from __future__ import annotations

from itertools import count
from typing import Any

import trio

from plainsong.protocol.requests import PublishRequest
from tests.cluster.history.records import Opening, Transaction, Write
from tests.cluster.voices import Doubt, NotSent, Refused, Stage, Voice
from tests.codecs import JSON
from tests.daemon.talk import JSON_HEADERS, topic_path

TX = "/v1/transactions"
RECEIPT = {**JSON_HEADERS, "Prefer": "return=representation"}


async def publish(voice: Voice, write: Write, pointer: int | None = None, **more: Any) -> None:
    """Send the write once, and record its outcome. Raises NotSent, Doubt, Refused."""
    request = PublishRequest(write.payloads, pointer, **more)
    write.sent()
    try:
        answer = await voice.ask("POST", topic_path(write.topic, "/publish"), JSON.encode_publish(request), RECEIPT)
    except (NotSent, Refused):
        write.refused()
        raise
    if pointer is None:
        receipt = answer.receipt()
        write.acknowledged(trio.current_time(), receipt.first_id, receipt.last_id)
    else:
        write.acknowledged(trio.current_time())
    voice.stage.count("acknowledged")


async def store_and_publish(voice: Voice, write: Write, pointer: int) -> None:
    """Store the messages in up to two requests, then publish them. Raises NotSent, Doubt, Refused."""
    cut = voice.rng.randrange(len(write.payloads) + 1)
    for part in (write.payloads[:cut], write.payloads[cut:]):
        if part:
            body = JSON.encode_publish(PublishRequest(part, pointer))
            await voice.ask("POST", topic_path(write.topic, "/store"), body, RECEIPT)
    write.sent()
    body = JSON.encode_publish(PublishRequest((), pointer))
    try:
        await voice.ask("POST", topic_path(write.topic, "/publish"), body, RECEIPT)
    except (NotSent, Refused):
        write.refused()
        raise
    write.acknowledged(trio.current_time())
    voice.stage.count("acknowledged")


def payloads_of(name: str, voice: Voice) -> tuple[bytes, ...]:
    return tuple(b"%s.%d" % (name.encode(), number) for number in range(voice.rng.choice(voice.stage.sizes)))


async def plain_writer(stage: Stage, name: str, seed: int, pause_s: float) -> None:
    """Publish each message once, with any outcome; some as atomic batches."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            payloads = payloads_of(f"{name}-{number}", voice)
            write = Write(voice.rng.choice(stage.topics), payloads, trio.current_time())
            stage.history.writes.append(write)
            try:
                await publish(voice, write, atomic=voice.rng.random() < 0.3)
            except (NotSent, Doubt, Refused):
                await stage.rest(pause_s)
            await stage.rest(pause_s)


class Producer:
    """A producer on one topic: it sends every request until it is acknowledged, and sometimes again."""

    def __init__(self, voice: Voice, name: str, topic: str) -> None:
        self.voice, self.name, self.topic = voice, name, topic
        self.epoch, self.next_sequence = 0, 0

    async def open(self) -> None:
        """Open a session, and record the response. Raises NotSent, Doubt, Refused."""
        began_s = trio.current_time()
        told = await self.voice.tell("PUT", topic_path(self.topic, f"/producers/{self.name}"), {})
        self.epoch = told["epoch"]
        opening = Opening(self.name, self.topic, began_s, trio.current_time(), self.epoch, told["lastSequenceId"])
        self.voice.stage.history.openings.append(opening)

    async def send(self, payloads: tuple[bytes, ...], pause_s: float) -> None:
        """Send until acknowledged. After an error, possibly reopen the session; the same request is sent again."""
        sequences = tuple(range(self.next_sequence, self.next_sequence + len(payloads)))
        self.next_sequence += len(payloads)
        write = Write(
            self.topic, payloads, trio.current_time(), producer=self.name, epoch=self.epoch, sequences=sequences
        )
        self.voice.stage.history.writes.append(write)
        while write.outcome != "acknowledged" or self.voice.rng.random() < 0.1:
            try:
                more: dict[str, Any] = {"producer": self.name, "producer_epoch": self.epoch, "sequence_ids": sequences}
                await publish(self.voice, write, atomic=len(sequences) > 1, **more)
            except (NotSent, Doubt, Refused) as error:
                await self.voice.stage.rest(pause_s)
                if self.voice.rng.random() < 0.5 or "fenced" in str(error):
                    await self.reopen(pause_s)
                    write.epoch = None  # the attempts had different epochs, and either may have taken effect

    async def reopen(self, pause_s: float) -> None:
        """Retry until a session is open."""
        while True:
            try:
                await self.open()
            except (NotSent, Doubt, Refused):
                await self.voice.stage.rest(pause_s)
            else:
                return


async def producing_writer(stage: Stage, name: str, seed: int, pause_s: float) -> None:
    """Run a producer until the run is over, and finish its request in progress."""
    async with stage.voice(seed) as voice:
        producer = Producer(voice, name, voice.rng.choice(stage.topics))
        await producer.reopen(pause_s)
        for number in count(1):
            if stage.over:
                return
            await producer.send(payloads_of(f"{name}-{number}", voice), pause_s)
            await stage.rest(pause_s)


async def transactional_writer(stage: Stage, name: str, seed: int, pause_s: float) -> None:
    """Run transactions over two topics until the run is over: some committed, some aborted, some abandoned."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            try:
                await _transaction(voice, f"{name}-{number}")
            except (NotSent, Doubt, Refused):
                await stage.rest(pause_s)
            await stage.rest(pause_s)


async def _transaction(voice: Voice, name: str) -> None:
    stage, began_s = voice.stage, trio.current_time()
    timeout_s = voice.rng.choice(stage.timeouts_s)
    begun = await voice.tell("POST", TX, {"timeoutSeconds": timeout_s, "clientId": name})
    transaction = Transaction(begun["id"], began_s, trio.current_time(), {begun["writePointer"]})
    stage.history.transactions.append(transaction)
    verb = voice.rng.choice(("commit", "commit", "commit", "abort"))
    try:
        for topic in voice.rng.sample(stage.topics, 2):
            write = Write(topic, payloads_of(name, voice), trio.current_time(), transaction)
            write.payloads = tuple(payload + b" in " + topic.encode() for payload in write.payloads)
            stage.history.writes.append(write)
            if stage.stores and voice.rng.random() < stage.stores:
                await store_and_publish(voice, write, begun["writePointer"])
            else:
                await publish(voice, write, begun["writePointer"])
    except (NotSent, Doubt, Refused):
        if voice.rng.random() < 0.2:
            raise  # the client dies here; the time-out ends the transaction
        verb = "abort"
    await decide_at_last(voice, transaction, verb)


async def decide_at_last(voice: Voice, transaction: Transaction, verb: str, tries: int = 3) -> None:
    """Try to decide a few times, at any instance."""
    for _ in range(tries):
        try:
            await decide(voice, transaction, verb)
        except (NotSent, Doubt, Refused):
            await trio.sleep(0.2)
        else:
            return


async def decide(voice: Voice, transaction: Transaction, verb: str) -> None:
    """Commit or abort, and record the outcome. Raises NotSent, Doubt, Refused."""
    if verb == "commit":
        transaction.asked_s = min(transaction.asked_s, trio.current_time())
    try:
        state = (await voice.tell("POST", f"{TX}/{transaction.id}/{verb}"))["state"]
    except Refused as refused:
        if refused.code != "transaction_not_in_progress":
            raise
        # An abort is refused as soon as the commit has started, although the commit may still be abandoned.
        state = "undone" if verb == "commit" else (await voice.tell("GET", f"{TX}/{transaction.id}"))["state"]
        if state not in ("committed", "aborted", "invalid", "undone"):
            raise
    told_s = trio.current_time()
    if state == "committed":
        transaction.committed_s = min(transaction.committed_s, told_s)
        voice.stage.count("committed")
    else:
        transaction.undone_s = min(transaction.undone_s, told_s)
        voice.stage.count("undone")
