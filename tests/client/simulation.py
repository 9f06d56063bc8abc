"""A simulation that runs clients without waiting: answers are scripted, and time passes only in pauses.

With ``both_clients`` each test runs twice: with the asynchronous client, and with the synchronous client that is
generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import trio

from plainsong._async import delivery as async_delivery
from plainsong._async import read as async_read
from plainsong._async import reading as async_reading
from plainsong._async import retry as async_retry
from plainsong._async import transaction as async_transaction
from plainsong._async import transaction_messages as async_messages
from plainsong._sync import delivery, read, reading, retry, transaction, transaction_messages
from plainsong.calls import Answer, Failure, Send
from plainsong.settings import Settings


class Kind(NamedTuple):
    """One client's names for objects that the tests use with both clients."""

    name: str
    Channel: Any
    Delivery: Any
    begin: Any
    Reading: Any
    Reader: Any
    TransactionContext: Any
    transaction_messages: Any
    """The module."""


KINDS = {
    "async": Kind(
        "async",
        async_retry.AsyncChannel,
        async_delivery.AsyncDelivery,
        async_delivery.begin,
        async_reading.AsyncReading,
        async_read.AsyncReader,
        async_transaction.AsyncTransactionContext,
        async_messages,
    ),
    "sync": Kind(
        "sync",
        retry.Channel,
        delivery.Delivery,
        delivery.begin,
        reading.Reading,
        read.Reader,
        transaction.TransactionContext,
        transaction_messages,
    ),
}
#: The last entry is the kind that the running test covers.
kinds: list[Kind] = [KINDS["sync"]]


def kind() -> Kind:
    """Return the kind of client that the running test covers."""
    return kinds[-1]


def run(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``work``, awaited if it is asynchronous."""
    if kind().name == "sync":
        return work(*arguments)

    async def main() -> Any:
        return await work(*arguments)

    return trio.run(main)


def settings(url: str | list[str] = "http://one", **changed: Any) -> Settings:
    given = {
        "namespace": "default",
        "token_file": None,
        "connect_timeout_s": 5.0,
        "request_timeout_s": 30.0,
        "deadline_s": 60.0,
        "retry": True,
        "max_connections": 10,
    }
    return Settings.checked(url, **{**given, **changed})


def problem(status: int, code: str, outcome: str = "not-applied", **headers: str) -> Answer:
    body = {"code": code, "status": status, "detail": f"told {code}", "hint": "a hint", "outcome": outcome}
    told = {"content-type": "application/problem+json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return Answer(status, told, json.dumps(body).encode())


def said(value: Any) -> Answer:
    return Answer(200, {"content-type": "application/json"}, json.dumps(value).encode())


#: More than any test needs: a client that retries forever must fail, not fill the memory.
MOST_REQUESTS = 10_000
NO_DAEMON = Failure("connect", "refused")
LOST = Failure("lost", "reset")
SILENT = Failure("timeout", "no answer within 30 s")


class Simulation:
    """A network and a clock for a client. ``answers``: in order, or a function of the request.

    A request takes ``took_s``, and each pause takes ``overslept_s`` longer than requested.
    """

    def __init__(
        self,
        answers: Iterable[Answer | Failure] | Callable[[Send], Answer | Failure],
        took_s: float = 0,
        overslept_s: float = 0,
    ) -> None:
        self.now_s = 0.0
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        self._took_s = took_s
        self._overslept_s = overslept_s
        script = answers if callable(answers) else iter(answers)
        self._answer = script if callable(script) else lambda _: next(script)
        self.carry = self._carried_async if kind().name == "async" else self._carried
        self.sleep = self._slept_async if kind().name == "async" else self._slept

    def channel(
        self,
        url: str | list[str] = "http://one",
        *,
        clock: Callable[[], float] | None = None,
        reached: bool = True,
        **changed: Any,
    ) -> Any:
        """Return the channel of a client in this simulation. ``reached``: True if a daemon has answered it before."""
        channel = kind().Channel(
            settings(url, **changed),
            self,
            random=lambda: 0.0,
            wall_ms=lambda: 1_000_000,
            clock=clock or (lambda: self.now_s),
        )
        channel.now, channel.sleep = lambda: self.now_s, self.sleep
        channel.places._was_reached = reached
        return channel

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return run(work, *arguments)

    def _carried(self, send: Send) -> Answer | Failure:
        self.sent.append(send)
        assert len(self.sent) < MOST_REQUESTS
        self.now_s += self._took_s
        return self._answer(send)

    async def _carried_async(self, send: Send) -> Answer | Failure:
        return self._carried(send)

    def _slept(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds + self._overslept_s

    async def _slept_async(self, seconds: float) -> None:
        self._slept(seconds)
