"""Tephra's clients, which begin transactions over Thrift, write to another store, and commit or leave them.

The judge uses only the answers to the clients. In the other store a transaction sees every pointer that Tephra's rule
shows it: those up to the read pointer that are on neither list. So it may see no transaction whose client has not asked
for its end, and of two committed transactions with a common key, the later one must have seen the earlier one.

Writers also publish to the daemon under their pointers, commit without canCommit, run long transactions, and roll back.
The judge of the messages checks these publishes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import trio

from broker.thrift import TephraMethods
from plainsong.protocol.tephra.rpc import ApplicationError, TephraError, decode_reply, encode_call
from plainsong.protocol.transactions.view import Verdict, View
from tests.cluster.history.records import Transaction as Noted
from tests.cluster.history.records import Write
from tests.cluster.voices import Doubt, NotSent, Refused, Voice
from tests.cluster.writers import payloads_of, publish
from tests.daemon.talk import topic_path
from tests.simulation.clocks import time_now

if TYPE_CHECKING:
    from random import Random

    from plainsong.protocol.transactions.transaction import Transaction
    from tests.simulation.world import SimulatedStage

#: Few keys, so that transactions conflict.
KEYS = (b"one", b"two", b"three")


@dataclass(slots=True, eq=False)
class Begun:
    """A client's record of a transaction."""

    snapshot: Transaction
    keys: frozenset[bytes] = frozenset()
    """The keys of its latest successful canCommit."""
    ends: set[str] = field(default_factory=set)
    """``committed`` or ``aborted`` if that was requested, with or without an answer; it may have both."""
    is_committed: bool = False
    """True if the commit was acknowledged."""


@dataclass(slots=True)
class Notes:
    """All transactions of these clients."""

    begun: list[Begun] = field(default_factory=list)


def judged(notes: Notes) -> list[tuple[str, str]]:
    """Return all violations."""
    anomalies = []
    for later in notes.begun:
        view = View.of(later.snapshot)
        for earlier in notes.begun:
            if earlier is later or view.verdict(earlier.snapshot.transaction_id) is not Verdict.DELIVER:
                continue
            if not earlier.ends:
                text = f"{later.snapshot.transaction_id} sees {earlier.snapshot.transaction_id}, which is not decided"
                anomalies.append(("shown undecided", text))
    committed = [each for each in notes.begun if each.is_committed]
    committed.sort(key=lambda each: each.snapshot.transaction_id)
    for at, later in enumerate(committed):
        view = View.of(later.snapshot)
        for earlier in committed[:at]:
            unseen = view.verdict(earlier.snapshot.transaction_id) is not Verdict.DELIVER
            if unseen and earlier.keys & later.keys:
                ids = f"{earlier.snapshot.transaction_id} and {later.snapshot.transaction_id}"
                anomalies.append(("missed conflict", f"{ids} changed the same key, and are both committed"))
    return anomalies


async def client(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Run transactions until the end, and then one more, which must see none of those left in progress."""
    async with stage.voice(seed) as voice:
        rng = voice.rng
        for number in count(1):
            over = stage.over
            with suppress(NotSent, Doubt, TephraError, ApplicationError):
                await _transaction(stage, f"{name}-{number}", rng)
                if over:
                    return
            await stage.rest(0.2 if over else rng.choice((0.0, 0.02, pause_s)))


async def _transaction(stage: SimulatedStage, name: str, rng: Random) -> None:
    snapshot: Transaction = await _call(stage, "startShortWithClientIdAndTimeOut", name, rng.choice((2, 30)))
    begun = Begun(snapshot)
    stage.tephra.begun.append(begun)
    stage.idle.append(snapshot.transaction_id)
    ending = rng.choice(("commit", "commit", "abort", "leave"))
    if ending == "leave":
        return
    await time_now().sleep(rng.choice((0.0, 0.002, 0.02, 0.2)))
    if ending == "abort":
        begun.ends.add("aborted")
        await _call(stage, "abortTx", snapshot)
        return
    keys = frozenset(rng.sample(KEYS, rng.choice((0, 1, 1, 2))))
    await _call(stage, "canCommitOrThrow", snapshot.transaction_id, sorted(keys))
    begun.keys = keys
    await time_now().sleep(rng.choice((0.0, 0.002, 0.02, 0.2)))
    for _ in range(3):
        begun.ends.add("committed")
        try:
            await _call(stage, "commitOrThrow", snapshot.transaction_id, snapshot.write_pointer)
        except (NotSent, Doubt):  # as Tephra's client does, which also repeats a call after its connection broke
            await time_now().sleep(rng.choice((0.02, 0.3)))
        else:
            begun.is_committed = True
            return


async def writer(stage: SimulatedStage, name: str, seed: int, pause_s: float) -> None:
    """Publish under pointers of transactions over Thrift, and commit, abort or only roll them back, until the end."""
    async with stage.voice(seed) as voice:
        for number in count(1):
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused, TephraError, ApplicationError):
                await _write(voice, stage, f"{name}-{number}")
            await stage.rest(voice.rng.choice((0.0, 0.02, pause_s)))


async def _write(voice: Voice, stage: SimulatedStage, name: str) -> None:
    rng, topic, began_s = voice.rng, voice.rng.choice(stage.topics), trio.current_time()
    start = rng.choice(("startShortClientId", "startShortClientId", "startLongClientId"))
    snapshot: Transaction = await _call(stage, start, name)
    begun = Begun(snapshot)
    stage.tephra.begun.append(begun)
    await time_now().sleep(rng.choice((0.0, 0.02, 0.2)))
    if rng.random() < 0.3:
        # As if its publish had not arrived. It stays in progress, and must stay hidden whatever crashes.
        stage.idle.append(snapshot.transaction_id)
        await _roll_back(voice, topic, snapshot)
        return
    begun.ends.add("aborted")  # if an error ends this task, the transaction is aborted at the end of the run
    noted = Noted(snapshot.transaction_id, began_s, trio.current_time(), {snapshot.write_pointer})
    stage.history.transactions.append(noted)
    write = Write(topic, payloads_of(name, voice), trio.current_time(), noted)
    stage.history.writes.append(write)
    await publish(voice, write, snapshot.write_pointer)
    if rng.random() < 0.3:
        await _roll_back(voice, topic, snapshot)
        await _call(stage, "abortTx", snapshot)
        noted.undone_s = min(noted.undone_s, trio.current_time())
        return
    if rng.random() < 0.5:
        keys = frozenset(rng.sample(KEYS, rng.choice((0, 1, 2))))
        await _call(stage, "canCommitOrThrow", snapshot.transaction_id, sorted(keys))
        if start.startswith("startShort"):  # as in Tephra, conflicts with long ones may be missed
            begun.keys = keys
    await time_now().sleep(rng.choice((0.0, 0.02, 0.2)))
    begun.ends.add("committed")
    noted.asked_s = min(noted.asked_s, trio.current_time())
    await _call(stage, "commitOrThrow", snapshot.transaction_id, snapshot.write_pointer)
    begun.is_committed = True
    noted.committed_s = min(noted.committed_s, trio.current_time())


async def _roll_back(voice: Voice, topic: str, snapshot: Transaction) -> None:
    await voice.tell("POST", topic_path(topic, "/rollback"), {"transactionWritePointer": snapshot.write_pointer})


async def _call(stage: SimulatedStage, method: str, *args: Any) -> Any:
    """Call the service. Raises NotSent, Doubt; TephraError, ApplicationError: the service answered with an error."""
    (instance,) = stage.cluster.instances
    network = instance.network
    await network.pass_on("client", instance.name)
    life = instance.life
    if life is None or life.daemon is None:
        raise NotSent(method)
    service = life.daemon.authority.embedded
    assert service is not None
    answer = await life.serve(partial(TephraMethods(service).answer, encode_call(method, 1, *args)))
    if answer is None or instance.life is not life:
        raise Doubt(method)
    await network.pass_on(instance.name, "client")
    try:
        return decode_reply(answer, method, 1)
    except ApplicationError as error:
        await trio.lowlevel.checkpoint()
        raise Doubt(error.message) from None
