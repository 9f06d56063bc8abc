"""A correct service and its clients in simulated time: a correct history for every seed.

Clients are generators that yield each step's duration. A request takes effect at one moment between its start and its
end, and it may fail before or after that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Literal

from plainsong.protocol.ids import FIRST_BOUND, after, pack_id
from tests.cluster.history.records import End, History, Opening, Poll, Row, Transaction, Write

TOPICS = ("one", "two", "three")
INSTANCES = ("a", "b", "c")
Course = Iterator[float]
Fate = Literal["answered", "refused", "lost before", "lost after"]


class Service:
    """Topics, transactions and producers that behave as promised."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {topic: [] for topic in TOPICS}
        self.states: dict[int, str] = {}
        self.sessions: dict[tuple[str, str], int] = {}
        self.stored: dict[tuple[str, str], tuple[int, bytes, bytes]] = {}
        """By producer and topic: the last sequence, and its request's ids."""

    def publish(self, write: Write, pointer: int) -> tuple[bytes, bytes] | None:
        """Return the receipt; None if refused."""
        producer = (write.producer or "", write.topic)
        if pointer and self.states[pointer] != "open":
            return None
        if write.producer is not None:
            if write.epoch != self.sessions[producer]:
                return None
            last, *receipt = self.stored.get(producer, (-1, b"", b""))
            if write.sequences[-1] <= last:
                return receipt[0], receipt[1]
        rows = self.rows[write.topic]
        ids = [pack_id(1_000 + len(rows), 0, 0, number) for number in range(len(write.payloads))]
        rows += [(message_id, payload, pointer) for message_id, payload in zip(ids, write.payloads, strict=True)]
        if write.producer is not None:
            self.stored[producer] = write.sequences[-1], ids[0], ids[-1]
        return ids[0], ids[-1]

    def begin(self) -> int:
        number = 1_000 + len(self.states)
        self.states[number] = "open"
        return number

    def decide(self, number: int, state: str) -> str:
        if self.states[number] == "open":
            self.states[number] = state
            if state == "aborted":
                for rows in self.rows.values():
                    rows[:] = [(i, p, -pointer if pointer == number else pointer) for i, p, pointer in rows]
        return self.states[number]

    def read(
        self, topic: str, since: bytes, limit: int, *, committed: bool
    ) -> tuple[list[Row], bytes | None, End, int]:
        """Return the messages, the last id passed, how the page ended, and the transaction that blocked it (or 0)."""
        found: list[Row] = []
        through: bytes | None = None
        for row in self.rows[topic]:
            if row[0] < since:
                continue
            if len(found) == limit:
                return found, through, "more", 0
            if committed and row[2] > 0 and self.states[row[2]] == "open":
                return found, through, "held", row[2]
            through = row[0]
            if not committed or row[2] == 0 or (row[2] > 0 and self.states[row[2]] == "committed"):
                found.append(row)
        return found, through, "end", 0


class Simulation:
    """Runs the clients until all have finished; ``history`` is their record."""

    def __init__(self, seed: int, *, clients: int = 3, rounds: int = 12) -> None:
        self.rng, self.now_s, self.history, self.service = Random(seed), 0.0, History(), Service()
        self._names, self._numbers = count(1), count()
        self._due: list[tuple[float, int, Course]] = []
        for number in range(clients):
            for course in (self._plain, self._producer, self._transactions):
                self._start(self._repeated(course, rounds, f"{course.__name__.strip('_')} {number}"))
            for committed in (True, False):
                self._start(self._reader(2 * rounds, committed=committed))
        self._run()
        self._end()

    def _start(self, course: Course) -> None:
        heappush(self._due, (self.now_s, next(self._numbers), course))

    def _run(self) -> None:
        while self._due:
            self.now_s, _, course = heappop(self._due)
            delay_s = next(course, None)
            if delay_s is not None:
                heappush(self._due, (self.now_s + delay_s, next(self._numbers), course))

    def _end(self) -> None:
        for number in list(self.service.states):
            self.service.decide(number, "aborted")
        for each in self.history.transactions:
            each.state = self.service.states[each.id]
        self.history.logs = {topic: tuple(rows) for topic, rows in self.service.rows.items()}
        for topic in TOPICS:
            for committed in (True, False):
                self._start(self._reader(8, committed=committed, topic=topic, limit=1_000))
        self._run()

    def _repeated(self, course: Callable[[str], Course], rounds: int, name: str) -> Course:
        for _ in range(rounds):
            yield self._moment()
            yield from course(name)

    def _moment(self) -> float:
        return self.rng.choice((0.001, 0.01, 0.1)) * self.rng.random()

    def _fate(self) -> Fate:
        return self.rng.choice(("answered", "answered", "answered", "refused", "lost before", "lost after"))

    def _payloads(self, name: str) -> tuple[bytes, ...]:
        number = next(self._names)
        return tuple(b"%s, %d.%d" % (name.encode(), number, i) for i in range(self.rng.choice((1, 1, 3, 5))))

    # --- clients -------------------------------------------------------------------------------

    def _send(self, write: Write, pointer: int = 0) -> Course:
        """Send one publish, with any outcome."""
        write.sent()
        fate = self._fate()
        yield self._moment()
        receipt = self.service.publish(write, pointer) if fate in ("answered", "lost after") else None
        yield self._moment()
        if fate == "refused" or (fate == "answered" and receipt is None):
            write.refused()
        elif fate == "answered" and receipt is not None:
            write.acknowledged(self.now_s, *receipt)

    def _plain(self, name: str) -> Course:
        write = Write(self.rng.choice(TOPICS), self._payloads(name), self.now_s)
        self.history.writes.append(write)
        yield from self._send(write)

    def _producer(self, name: str) -> Course:
        """Open a session, and send the next sequence ids until they are acknowledged; sometimes send them again."""
        topic, began_s = self.rng.choice(TOPICS), self.now_s
        yield self._moment()
        key = name, topic
        epoch = self.service.sessions[key] = self.service.sessions.get(key, 0) + 1
        last = self.service.stored.get(key, (-1, b"", b""))[0]
        yield self._moment()
        self.history.openings.append(Opening(name, topic, began_s, self.now_s, epoch, last))
        payloads = self._payloads(name)
        sequences = tuple(range(last + 1, last + 1 + len(payloads)))
        write = Write(topic, payloads, self.now_s, producer=name, epoch=epoch, sequences=sequences)
        self.history.writes.append(write)
        while write.outcome != "acknowledged" or self.rng.random() < 0.2:
            yield from self._send(write)

    def _transactions(self, name: str) -> Course:
        """Begin, write to some topics, and commit, abort, or die."""
        began_s = self.now_s
        yield self._moment()
        number = self.service.begin()
        yield self._moment()
        transaction = Transaction(number, began_s, self.now_s)
        self.history.transactions.append(transaction)
        for topic in self.rng.sample(TOPICS, self.rng.choice((1, 2, 3))):
            write = Write(topic, self._payloads(name), self.now_s, transaction)
            self.history.writes.append(write)
            yield from self._send(write, number)
        end = self.rng.choice(("committed", "committed", "aborted", "died"))
        if end != "died":
            yield from self._decide(transaction, end)

    def _decide(self, transaction: Transaction, end: str) -> Course:
        if end == "committed":
            transaction.asked_s = self.now_s
        fate = self._fate()
        yield self._moment()
        if fate in ("answered", "lost after"):
            self.service.decide(transaction.id, end)
        yield self._moment()
        if fate == "answered" and end == "committed":
            transaction.committed_s = self.now_s
        elif fate == "answered":
            transaction.undone_s = self.now_s

    def _reader(self, rounds: int, *, committed: bool, topic: str | None = None, limit: int = 7) -> Course:
        topic = topic or self.rng.choice(TOPICS)
        name, since = f"{'committed' if committed else 'uncommitted'} reader", FIRST_BOUND
        for _ in range(rounds):
            yield self._moment()
            began_s, instance = self.now_s, self.rng.choice(INSTANCES)
            yield self._moment()
            found, through, end, held_by = self.service.read(topic, since, limit, committed=committed)
            yield self._moment()
            messages = tuple((message_id, payload) for message_id, payload, _ in found)
            told = (
                name,
                instance,
                topic,
                committed,
                began_s,
                self.now_s,
                messages,
                since,
                through,
                end,
                held_by or None,
            )
            self.history.polls.append(Poll(*told))
            since = after(through) if through is not None and self.rng.random() < 0.9 else FIRST_BOUND
