"""A producer's requests to one topic, while one of its owner's calls to HBase is disturbed; many cases run in parallel.

Every key that a call reads or writes contains the topic's name, from which the proxy finds the call's case.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.cluster.harness import Instance
from tests.cluster.proxy import GOOD, Fate
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk, topic_path
from tests.patience import PATIENCE_S

#: Larger than a cell at the minimum of ``storage.hbase.max_cell_bytes``, so its payloads get separate rows.
LARGE = "x" * 100_000
MAX_CELL_BYTES = 256 << 10
#: Sequence ids of the producer's requests; all but the first are atomic batches.
REQUESTS = ((0,), (1, 2, 3), (4, 5, 6), (10,))
#: Numbers of messages that a reader may see, given that a batch is atomic.
WHOLE = (0, 1, 4, 7, 8)


@dataclass(slots=True, eq=False)
class Case:
    """A topic with the number of the call to HBase that is disturbed, and with the ``fate`` of that call."""

    topic: str
    number: int
    fate: Fate
    calls: int = 0
    hit: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)

    def __str__(self) -> str:
        return f"call {self.number}, {self.fate.fault}"


class ByTopic:
    """Selects the calls that a proxy disturbs: one for each case; with ``ends``, the case's later calls are lost."""

    def __init__(self, cases: list[Case], *, ends: bool = False) -> None:
        self._cases = {case.topic.encode(): case for case in cases}
        self._ends = ends
        self.all_hit = trio.Event()

    def __call__(self, request: bytes) -> Fate:
        at = request.find(b"ring:case-")
        case = self._cases.get(request[at + 5 : request.find(b":", at + 5)]) if at >= 0 else None
        if case is None:
            return GOOD
        case.calls += 1
        if case.calls == case.number:
            case.hit.set()
            self.look()
            return case.fate
        return Fate("lost request") if self._ends and case.hit.is_set() else GOOD

    def look(self) -> None:
        """Set ``all_hit`` if every case has been hit or is finished."""
        if all(each.hit.is_set() or each.done.is_set() for each in self._cases.values()):
            self.all_hit.set()


class Client:
    """The producer's program: if a request's outcome is unknown, it opens its session again."""

    def __init__(self, instance: Instance, topic: str) -> None:
        self.instance, self.topic = instance, topic
        self.epoch = 0

    async def ask(self, method: str, path: str, value: Any = None) -> Answer | None:
        """Return the answer; None if the connection failed."""
        body = b"" if value is None else json.dumps(value).encode()
        try:
            async with await Talk.to(self.instance.address) as talk:
                return await talk.ask(method, topic_path(self.topic, path), body, JSON_HEADERS)
        except (ConnectionLost, NotConnected):
            return None

    async def open(self) -> int:
        """Try until a session is open; return its last sequence id."""
        with trio.fail_after(PATIENCE_S):
            while True:
                answer = await self.ask("PUT", "/producers/p", {})
                if answer is not None and answer.status == 200:
                    told = answer.json()
                    self.epoch = told["epoch"]
                    return int(told["lastSequenceId"])
                assert answer is None or answer.status == 503, answer
                await trio.sleep(0.05)

    async def send(self, sequences: tuple[int, ...]) -> None:
        """Send the request until it is stored; after an error, open the session again to find out whether it is."""
        messages = [payload_of(number) for number in sequences]
        request = {"messages": messages, "producer": "p", "sequenceIds": sequences, "atomic": len(sequences) > 1}
        while True:
            answer = await self.ask("POST", "/publish", {**request, "producerEpoch": self.epoch})
            if answer is not None and answer.status == 200:
                return
            assert answer is None or answer.status == 503, answer
            await self.look()
            last = await self.open()
            assert last in (sequences[-1], *(each[-1] for each in REQUESTS if each < sequences), -1)
            if last == sequences[-1]:
                return

    async def look(self) -> list[str]:
        """Check that a reader sees complete requests in order, and return them; empty if there is no answer."""
        answer = await self.ask("POST", "/poll", {})
        if answer is None or answer.status != 200:
            return []
        found = [message["payload"] for message in answer.json()]
        assert found == [payload_of(number) for each in REQUESTS for number in each][: len(found)], self.topic
        assert len(found) in WHOLE, (self.topic, len(found))
        return found

    async def create(self) -> None:
        """Create the topic before any fault; with the short time-out, HBase may answer too late."""
        with trio.fail_after(PATIENCE_S):
            while True:
                answer = await self.ask("PUT", "?ifNotExists=true", {})
                assert answer is not None, self.topic
                if answer.status == 200:
                    return
                assert answer.status == 503, answer
                await trio.sleep(0.05)


def payload_of(number: int) -> str:
    return f"{number}{LARGE if number in (4, 5, 6) else ''}"


async def course(instance: Instance, case: Case, choice: ByTopic) -> None:
    """Send all of the producer's requests, then read the topic."""
    client = Client(instance, case.topic)
    await client.open()
    for sequences in REQUESTS:
        await client.send(sequences)
    case.done.set()
    choice.look()
    found: list[str] = []
    while not found:  # the disturbed call may be part of this read
        await client.open()
        found = await client.look()
    assert len(found) == WHOLE[-1], case
