"""How clients of a cluster speak: each request goes to some instance, and has an answer, a doubt, or never left."""

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

#: Longer than a call to HBase may take with all its attempts.
PATIENCE_S = 12.0
#: How long everything may take to come right once nothing is wrong any more.
QUIET_S = 90.0
#: For how long clients are brisk once something is wrong, and how much longer they pause after that: most of a run is
#: waiting for sessions to end, which nobody sees anything of.
BRISK_S = 1.0
SLOWER = 4
#: What an instance says while something is wrong, and means it.
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
    """Nobody was there: nothing happened."""


class Doubt(Exception):
    """No answer, or one that says that nobody knows."""


class Refused(Exception):
    """It did not happen, and the instance says so."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.code)
        self.code = answer.code


class Stage:
    """What all clients share: the cluster, the topics, and what is noted."""

    #: How many messages a request may have, how long a page may be, how long a transaction may take.
    sizes: tuple[int, ...] = (1, 1, 1, 3, 40)
    limits: tuple[int | None, ...] = (7, 50, None)
    timeouts_s: tuple[int, ...] = (2, 10, 30)
    #: How likely a transaction stores its messages first, and publishes what is stored.
    stores = 0.0

    def __init__(
        self, cluster: Cluster, topics: list[str], seed: int, *, plain: bool = False, quiet_s: float = QUIET_S
    ) -> None:
        self.quiet_s = quiet_s
        self.cluster, self.topics, self.rng, self.plain = cluster, topics, Random(seed), plain
        self.isolations = (False,) if plain else (True, False)
        """Whether readers are committed ones."""
        self.history = History()
        self.over = False
        self.surprises: list[str] = []
        """Answers that no failure explains."""
        self.answers: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=12)
        """The latest answers that were not what was wanted."""
        self.brisk_until_s = math.inf
        """When a fault that lasts has lasted long enough for clients to pause longer until it is over."""
        self.acknowledged_s = 0.0
        self.news = trio.Event()

    def voice(self, seed: int) -> Voice:
        """One more client."""
        return Voice(self, seed)

    async def rest(self, pause_s: float) -> None:
        """What a client does between two requests: less often where nothing new can be seen, or nothing succeeds."""
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
        """Wait until so many more of it were counted, ``patience_s`` for each at most."""
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
    """One client's connections: one to each instance it has spoken to."""

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
        """An instance by chance: whoever cannot be reached is asked less often, as a client would."""
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
        """An answer that says 200. Raises NotSent, Doubt, Refused."""
        instance = at or self.somebody()
        try:
            # As ``trio.fail_after``, which costs twice as much; simulated clients feel that.
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
        """What an answer in JSON says."""
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
