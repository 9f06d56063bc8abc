"""Producers that survive every fault, and a check of the messages that readers saw from them.

A payload is ``name:id`` or, in an atomic batch, ``name:id:first-last``. After losing its connection, a producer with a
session opens the session again and sends the missing messages; one without a session sends the same request again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import trio

from tests.daemon.history import Seen
from tests.daemon.ring import Place
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk, json_body, topic_path

KINDS = ("single", "single", "batch", "atomic")
#: Errors of a daemon that is shutting down, or after which the producer must find out the outcome.
_IN_DOUBT = ("shutting_down", "outcome_unknown", "storage_failed")


class HungUp(Exception):
    """The producer itself closed its connection."""


@dataclass(slots=True)
class Request:
    """Messages of a producer, sent together, repeatedly, until they are known to be stored."""

    ids: tuple[int, ...]
    payloads: tuple[str, ...]
    atomic: bool


@dataclass(slots=True)
class RingProducer:
    """One producer, and everything that it has sent."""

    name: str
    topic: str
    session: bool
    rng: Random
    epoch: int | None = None
    generation: int | None = None
    next_id: int = 0
    pending: Request | None = None
    sent: list[str] = field(default_factory=list)
    cuts: int = 0
    resent: int = 0
    """Requests that were found missing, or were sent again to find out."""

    async def run(self, place: Place) -> None:
        """Send until ``place.over`` and until no outcome is unknown."""
        while not place.over or self.pending:
            try:
                async with place.talk() as talk:
                    await self._find_out(talk)
                    while not place.over:
                        await self._send_next(talk)
                        place.count(acknowledged=1)
            except (ConnectionLost, NotConnected, HungUp):
                await trio.lowlevel.checkpoint()

    async def _send_next(self, talk: Talk) -> None:
        """Send the next request. Raises ConnectionLost, HungUp."""
        request = self.pending = self._made()
        self.sent += request.payloads
        method, path, body, headers = self._publish(request)
        if self.rng.random() < 0.03:
            self.cuts += 1
            await self._cut(talk, method, path, body, headers)
        receipt = _checked(await talk.ask(method, path, body, headers)).json()
        assert (receipt["duplicate"], receipt["lastSequenceId"]) == (False, request.ids[-1]), receipt
        self.pending = None

    async def _cut(self, talk: Talk, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send the whole request or half of it, and hang up. Always raises HungUp."""
        if self.rng.random() < 0.5:
            await talk.send(method, path, body, headers)
            if self.rng.random() < 0.5:
                await trio.sleep(self.rng.random() * 0.005)
        else:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            await talk.send_raw((head + "\r\n").encode() + body[: len(body) // 2])
        raise HungUp

    async def _find_out(self, talk: Talk) -> None:
        """Find out the outcome of the last request, and send the missing messages."""
        last = await self._open(talk) if self.session else -1
        request = self.pending
        if request is None:
            return
        missing = tuple(each for each in request.ids if each > last)
        if request.atomic:
            assert missing in ((), request.ids), f"{self.name}: a part of {request.ids} took, up to {last}"
        if missing:
            self.resent += 1
            receipt = _checked(await talk.ask(*self._publish(request))).json()
            assert receipt["lastSequenceId"] == request.ids[-1], receipt
        self.pending = None

    async def _open(self, talk: Talk) -> int:
        answer = await talk.ask("PUT", topic_path(self.topic, f"/producers/{self.name}"), b"{}", JSON_HEADERS)
        told = _checked(answer).json()
        assert told["epoch"] > (self.epoch or 0)
        self.epoch, self.generation = told["epoch"], told["generation"]
        last = int(told["lastSequenceId"])
        assert last <= self.next_id - 1
        known = self.next_id - 1 if self.pending is None else self.pending.ids[0] - 1
        assert last >= known or self.pending is not None, f"{self.name} forgot {known}, knows {last}"
        return last

    def _made(self) -> Request:
        kind = self.rng.choice(KINDS)
        count = 1 if kind == "single" else self.rng.choice((2, 5, 40))
        first = self.next_id + self.rng.choice((0, 0, 0, 3))  # gaps are allowed
        ids = tuple(range(first, first + count))
        self.next_id = ids[-1] + 1
        batch = f":{ids[0]}-{ids[-1]}" if kind == "atomic" else ""
        return Request(ids, tuple(f"{self.name}:{each}{batch}" for each in ids), kind == "atomic")

    def _publish(self, request: Request) -> tuple[str, str, bytes, dict[str, str]]:
        body: dict[str, object] = {"messages": request.payloads, "producer": self.name, "sequenceIds": request.ids}
        if self.session:
            body |= {"producerEpoch": self.epoch, "generation": self.generation}
        if request.atomic:
            body |= {"atomic": True, "routingKey": self.name}
        return "POST", topic_path(self.topic, "/publish"), json_body(body), dict(JSON_HEADERS)


def _checked(answer: Answer) -> Answer:
    """Return an answer of 200. Raises ConnectionLost if the outcome is unknown or the daemon is shutting down."""
    if answer.status == 503 and answer.code in _IN_DOUBT:
        raise ConnectionLost(answer.code)
    assert answer.status == 200, answer
    return answer


def anomalies(producers: Sequence[RingProducer], seen: Sequence[Seen], last: Seen) -> Iterator[str]:
    """Find all errors in the final log, and in every page that was read before."""
    log = [(message_id, payload.decode()) for message_id, payload in last.messages]
    of = defaultdict(list)
    for _, payload in log:
        of[payload.partition(":")[0]].append(payload)
    for producer in producers:
        if of[producer.name] != producer.sent:
            missing = sorted(set(producer.sent) - set(of[producer.name]))[:5]
            extra = len(of[producer.name]) - len(set(of[producer.name]))
            yield f"{producer.name}: {len(producer.sent)} sent, {len(of[producer.name])} there, missing {missing}, {extra} twice"
    at = {message_id: number for number, (message_id, _) in enumerate(log)}
    for page in seen:
        messages = [(message_id, payload.decode()) for message_id, payload in page.messages]
        if not messages:
            continue
        start = at.get(messages[0][0])
        if start is None or log[start : start + len(messages)] != messages:
            yield f"{page.reader} saw what is not the log, from {messages[0]}"
        elif start and log[start - 1][0] >= page.since:
            yield f"{page.reader} was not shown {log[start - 1]}"
        elif not page.cut and not _whole(messages[-1][1]):
            yield f"{page.reader} saw a part of a batch, up to {messages[-1]}"
    for number, (_, payload) in enumerate(log):
        if not _whole(payload) and (number + 1 == len(log) or log[number + 1][1] != _next(payload)):
            yield f"something follows {payload} in its batch"


def _whole(payload: str) -> bool:
    """True if the payload is the last of its batch, or in no batch."""
    _, number, *batch = payload.split(":")
    return not batch or batch[0].partition("-")[2] == number


def _next(payload: str) -> str:
    name, number, batch = payload.split(":")
    return f"{name}:{int(number) + 1}:{batch}"
