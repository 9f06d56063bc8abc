"""Clients that write in transactions while the daemon is killed: they commit, abort, die, or are disconnected."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import trio

from plainsong.protocol.requests import PublishRequest
from tests.codecs import JSON
from tests.daemon.ring import Place
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk, topic_path
from tests.daemon.transactional_history import Page, Request, Transaction
from tests.patience import PATIENCE_S

#: Kinds of transactions, repeated in this order; each is a method of ``Work``.
COURSES = ("inline", "stored", "abort", "inline", "redo", "die", "checkpoint", "plain", "invalidate", "stored", "wipe")
TX = "/v1/transactions"


class NotDone(Exception):
    """The daemon refused the request; nothing happened, unless ``unknown``."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.code)
        self.code = answer.code
        self.unknown = answer.json()["outcome"] != "not-applied"


@dataclass(slots=True)
class Plot:
    """The records of all topics."""

    transactions: list[Transaction] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)


async def done(talk: Talk, method: str, path: str, body: Any = None) -> Any:
    """Return the decoded answer. Raises NotDone, ConnectionLost."""
    return said(await talk.ask(method, path, b"" if body is None else json.dumps(body).encode(), JSON_HEADERS))


def said(answer: Answer) -> Any:
    if answer.status != 200:
        raise NotDone(answer)
    return answer.json() if answer.body else None


async def begin(talk: Talk, plot: Plot, name: str, timeout_s: int) -> tuple[Transaction, dict[str, Any]]:
    """Begin a transaction; return it and the complete answer."""
    begun = await done(talk, "POST", TX, {"timeoutSeconds": timeout_s, "clientId": name})
    transaction = Transaction(begun["id"], begun["expires"], {begun["writePointer"]})
    plot.transactions.append(transaction)
    return transaction, begun


async def decide(talk: Talk, transaction: Transaction, verb: str) -> None:
    """Commit, abort, or invalidate, and record the outcome. Raises ConnectionLost, NotDone."""
    if verb == "commit":
        transaction.asked_s = min(transaction.asked_s, time.monotonic())
    try:
        state = (await done(talk, "POST", f"{TX}/{transaction.id}/{verb}"))["state"]
    except NotDone as refused:
        if refused.code not in ("transaction_not_in_progress", "transaction_not_found"):
            raise
        # "Not found" means that a kill lost its begin, before anything was published in it.
        is_committed = verb != "commit" and refused.code == "transaction_not_in_progress"
        state = "committed" if is_committed else "undone"
    if state == "committed":
        transaction.committed_s = min(transaction.committed_s, time.monotonic())
    else:
        transaction.undone_s = min(transaction.undone_s, time.monotonic())


async def decide_somehow(talk: Talk, transaction: Transaction, rng: Random) -> None:
    """Act like a client that lost its connection: repeat the commit, abort, or do nothing."""
    what = rng.choice(("again", "abort", "nothing"))
    if what == "again" and transaction.asked_s < inf:
        await decide(talk, transaction, "commit")
    elif what != "nothing":
        await decide(talk, transaction, "abort")


class Work:
    """One transaction, over a connection that may break at any moment."""

    def __init__(self, talk: Talk, plot: Plot, name: str, topics: Sequence[str], rng: Random) -> None:
        self.talk, self.plot, self.name, self.rng = talk, plot, name, rng
        self.topics = rng.sample(list(topics), rng.choice((2, 3)))
        self.transaction: Transaction | None = None
        self.pointer: int | None = None
        self._sent = 0

    async def run(self, course: str) -> None:
        if course == "plain":
            for topic in self.topics:
                await self.publish(topic)
            return
        await self.begin(1 if course == "die" else self.rng.choice((1, 3, 30)))
        try:
            await getattr(self, f"_{course}")()
        except NotDone:
            # Like a real client: abort after an error.
            await self.end("abort")

    async def begin(self, timeout_s: int) -> None:
        self.transaction, begun = await begin(self.talk, self.plot, self.name, timeout_s)
        self.pointer = begun["writePointer"]

    async def prepare(self) -> None:
        """Prepare, with a change that conflicts with no other."""
        assert self.transaction is not None
        changes = [b64encode(self.name.encode()).decode()]
        await done(self.talk, "POST", f"{TX}/{self.transaction.id}/prepare", {"changes": changes})

    async def _inline(self) -> None:
        await self._publish_all()
        await self.end("commit")

    async def _abort(self) -> None:
        await self._publish_all()
        await self.end("abort")

    async def _invalidate(self) -> None:
        await self._publish_all()
        await self.end("invalidate")

    async def _die(self) -> None:
        await self._publish_all()

    async def _stored(self) -> None:
        """Store in several requests, then publish, for some topics with one more message."""
        for topic in self.topics:
            stores = [await self.store(topic) for _ in range(self.rng.choice((1, 3)))]
            inline = self.rng.choice((True, False))
            await self.publish(topic, 1 if inline else 0, stores)
        await self.end(self.rng.choice(("commit", "commit", "abort")))

    async def _redo(self) -> None:
        """Roll back a first attempt by its range of rows, and commit a second one."""
        for topic in self.topics:
            request, answered = await self.publish(topic)
            request.rolled_back = "perhaps"
            await done(self.talk, "POST", topic_path(topic, "/rollback"), answered)
            request.rolled_back = "yes"
            await self.publish(topic)
        await self.end("commit")

    async def _checkpoint(self) -> None:
        assert self.transaction is not None
        await self._publish_all()
        begun = await done(self.talk, "POST", f"{TX}/{self.transaction.id}/checkpoint")
        self.pointer = begun["writePointer"]
        self.transaction.pointers.add(begun["writePointer"])
        await self._publish_all()
        await self.end(self.rng.choice(("commit", "abort")))

    async def _wipe(self) -> None:
        """Roll back by the pointer alone, as a participant does, then abort."""
        await self._publish_all()
        for topic in self.topics:
            await done(self.talk, "POST", topic_path(topic, "/rollback"), {"transactionWritePointer": self.pointer})
        await self.end("abort")

    async def end(self, verb: str) -> None:
        assert self.transaction is not None
        await decide(self.talk, self.transaction, verb)

    async def _publish_all(self) -> None:
        for topic in self.topics:
            await self.publish(topic)

    def _request(self, topic: str, count: int) -> Request:
        self._sent += 1
        payloads = tuple(b"%s.%d.%d" % (self.name.encode(), self._sent, number) for number in range(count))
        request = Request(topic, payloads, self.transaction)
        self.plot.requests.append(request)
        return request

    async def store(self, topic: str, count: int | None = None) -> Request:
        request = self._request(topic, self.rng.choice((1, 20)) if count is None else count)
        request.outcome = "refused"  # invisible until it is published
        await self._send(topic, "/store", request)
        return request

    async def publish(
        self, topic: str, count: int | None = None, stores: Sequence[Request] = ()
    ) -> tuple[Request, dict[str, Any] | None]:
        """Publish new messages together with stored ones; return the request and the answer."""
        request = self._request(topic, self.rng.choice((1, 3, 12)) if count is None else count)
        parts = [request, *stores]
        for part in parts:
            part.outcome = "unknown"
        try:
            answered = await self._send(topic, "/publish", request)
        except NotDone as refused:
            for part in parts if not refused.unknown else ():
                part.outcome = "refused"
            raise
        for part in parts:
            part.outcome, part.ended_s = "acknowledged", time.monotonic()
        return request, answered

    async def _send(self, topic: str, verb: str, request: Request) -> dict[str, Any] | None:
        body = JSON.encode_publish(PublishRequest(request.payloads, self.pointer))
        answered: dict[str, Any] | None = said(await self.talk.ask("POST", topic_path(topic, verb), body, JSON_HEADERS))
        return answered


async def writer(place: Place, plot: Plot, name: str, topics: Sequence[str], rng: Random, pause_s: float) -> None:
    """Run transactions until ``place.over``."""
    number, cut_off = rng.randrange(len(COURSES)), None
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    if cut_off is not None:
                        await decide_somehow(talk, cut_off, rng)
                        cut_off = None
                    number += 1
                    work = Work(talk, plot, f"{name}-{number}", topics, rng)
                    try:
                        await work.run(COURSES[number % len(COURSES)])
                    except (ConnectionLost, NotDone):
                        cut_off = work.transaction
                        raise
                    place.count(acknowledged=1)
                    await trio.sleep(pause_s)  # as real clients do between transactions
        except (ConnectionLost, NotConnected, NotDone):
            await trio.sleep(0.01)


async def settle(talk: Talk, plot: Plot, *, aborting: bool = True) -> None:
    """Wait until every transaction is decided, and record its state; abort those that would not time out soon."""
    for transaction in plot.transactions:
        with trio.fail_after(PATIENCE_S):
            while True:
                state = (await done(talk, "GET", f"{TX}/{transaction.id}"))["state"]
                if state != "in_progress":
                    break
                if aborting and transaction.expires_ms - time.time() * 1000 > 5_000:
                    await decide(talk, transaction, "abort")
                await trio.sleep(0.02)
        transaction.state = state
