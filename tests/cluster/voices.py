"""Clients of a cluster: a request to some instance succeeds, is refused, has an unknown outcome, or was never sent."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Mapping
from random import Random
from typing import Any

import trio

from tests.cluster.harness import Cluster, Instance
from tests.cluster.history.records import History
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk

#: Longer than a call to HBase takes with all its attempts.
PATIENCE_S = 12.0
#: Time limit for the recovery after the last fault.
QUIET_S = 90.0
#: Clients keep their pace for the first ``BRISK_S`` of a fault and then pause ``SLOWER`` times as long: most of a run
#: is spent waiting for sessions to end, during which nothing new can be observed.
BRISK_S = 1.0
SLOWER = 4
#: Error codes that a fault may legitimately cause.
EXPECTED = {
    *("no_owner", "overloaded", "recovering", "shutting_down", "storage_failed", "outcome_unknown"),
    *(
        "transactions_unavailable",
        "transaction_not_in_progress",
        "transaction_not_found",
        "producer_fenced",
        "rolled_back",
    ),
}


class NotSent(Exception):
    """The connection failed, so nothing happened."""


class Doubt(Exception):
    """The outcome is unknown: no response, or one that says so."""


class Refused(Exception):
    """The instance reported that the request did not happen."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.code)
        self.code = answer.code


class Stage:
    """The state that all clients share: the cluster, the topics, and the history."""

    #: Possible numbers of messages per request, page limits, and transaction time-outs.
    sizes: tuple[int, ...] = (1, 1, 1, 3, 40)
    limits: tuple[int | None, ...] = (7, 50, None)
    timeouts_s: tuple[int, ...] = (2, 10, 30)
    #: The probability that a transaction stores its messages first, and then publishes them.
    stores = 0.0

    def __init__(
        self, cluster: Cluster, topics: list[str], seed: int, *, plain: bool = False, quiet_s: float = QUIET_S
    ) -> None:
        self.quiet_s = quiet_s
        self.cluster, self.topics, self.rng, self.plain = cluster, topics, Random(seed), plain
        self.isolations = (False,) if plain else (True, False)
        """Kinds of readers: True for committed, False for uncommitted."""
        self.history = History()
        self.over = False
        self.surprises: list[str] = []
        """Responses that no fault explains."""
        self.answers: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=12)
        """The latest error responses."""
        self.brisk_until_s = math.inf
        """The time from which clients pause longer, while a fault lasts."""
        self.acknowledged_s = 0.0
        self.news = trio.Event()

    def voice(self, seed: int) -> Voice:
        """Return another client."""
        return Voice(self, seed)

    async def rest(self, pause_s: float) -> None:
        """Pause between two of a client's requests; longer while nothing new can be observed or nothing succeeds."""
        now_s = trio.current_time()
        slow = now_s > min(self.brisk_until_s, self.acknowledged_s + BRISK_S)
        await trio.sleep(pause_s * SLOWER if slow else pause_s)

    def count(self, what: str) -> None:
        self.answers[what] += 1
        if what == "acknowledged":
            self.acknowledged_s = trio.current_time()
        self.news.set()
        self.news = trio.Event()

    async def more(self, count: int, what: str = "acknowledged", patience_s: float = 60.0) -> None:
        """Wait for ``count`` more answers of this kind, up to ``patience_s`` for each."""
        before, goal = dict(self.answers), self.answers[what] + count
        while (counted := self.answers[what]) < goal:
            with trio.move_on_after(patience_s):
                while self.answers[what] == counted:
                    await self.news.wait()
            if self.answers[what] == counted:
                since = {
                    each: now - before.get(each, 0) for each, now in self.answers.items() if now > before.get(each, 0)
                }
                raise AssertionError(
                    f"{goal - counted} of {count} more {what} did not come, none in {patience_s} s, but {since}; last: {self.last}"
                )


class Voice:
    """One client's connections: one to each instance that it has used."""

    expected = EXPECTED

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.rng = stage, Random(seed)
        self._talks: dict[str, Talk] = {}

    async def __aenter__(self) -> Voice:
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._talks):
            self._drop(name)

    def somebody(self) -> Instance:
        """Return a random instance; as with a real client, instances that are down are chosen less often."""
        instances = self.stage.cluster.instances
        return self.rng.choice([each for each in instances if each.state == "up"] * 4 + instances)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] = JSON_HEADERS,
        *,
        at: Instance | None = None,
    ) -> Answer:
        """Return the answer if its status is 200. Raises NotSent, Doubt, Refused."""
        instance = at or self.somebody()
        try:
            # Like ``trio.fail_after`` at half the cost, which matters with simulated clients.
            with trio.CancelScope(deadline=trio.current_time() + PATIENCE_S) as limit:
                answer = await (await self._talk(instance)).ask(method, path, body, headers)
            if limit.cancelled_caught:
                raise trio.TooSlowError
        except NotConnected as error:
            raise NotSent(str(error)) from error
        except (ConnectionLost, trio.TooSlowError) as error:
            self._drop(instance.name)
            self.stage.count("no answer")
            self.stage.last.append(f"{method} {path} at {instance.name}: no answer")
            raise Doubt(str(error)) from error
        except trio.Cancelled:
            self._drop(instance.name)
            raise
        return self._judged(answer, f"{method} {path} at {instance.name}")

    async def tell(self, method: str, path: str, value: Any = None, *, at: Instance | None = None) -> Any:
        """Return the decoded JSON of an answer; None if it is empty. Raises NotSent, Doubt, Refused."""
        answer = await self.ask(method, path, b"" if value is None else json.dumps(value).encode(), at=at)
        return answer.json() if answer.body else None

    def _judged(self, answer: Answer, what: str) -> Answer:
        if answer.status == 200:
            return answer
        self.stage.count(answer.code or str(answer.status))
        self.stage.last.append(f"{what}: {answer.status} {answer.body[:300]!r}")
        if answer.code not in self.expected:
            self.stage.surprises.append(f"{what}: {answer.status} {answer.body[:400]!r}")
        if answer.code and answer.json()["outcome"] == "not-applied":
            raise Refused(answer)
        raise Doubt(answer.code)

    async def _talk(self, instance: Instance) -> Talk:
        talk = self._talks.get(instance.name)
        if talk is None:
            talk = self._talks[instance.name] = await Talk.to(instance.address)
        return talk

    def _drop(self, name: str) -> None:
        talk = self._talks.pop(name, None)
        if talk is not None:
            talk.stream.socket.close()
