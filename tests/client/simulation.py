"""A simulation in which clients run without waiting: answers come from a script, and time passes only in pauses.

Each test of it runs twice (``both_clients``): with the client for event loops, and with the one for threads that is
generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import trio

from plainsong._async import delivery as async_delivery
from plainsong._async import read as async_read
from plainsong._async import retry as async_retry
from plainsong._async import transaction as async_transaction
from plainsong._async import transaction_messages as async_messages
from plainsong._sync import delivery, read, retry, transaction, transaction_messages
from plainsong.calls import Answer, Failure, Send
from plainsong.settings import Settings


class Kind(NamedTuple):
    """What the tests of both clients use of one."""

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
        async_read.AsyncReading,
        async_read.AsyncReader,
        async_transaction.AsyncTransactionContext,
        async_messages,
    ),
    "sync": Kind(
        "sync",
        retry.Channel,
        delivery.Delivery,
        delivery.begin,
        read.Reading,
        read.Reader,
        transaction.TransactionContext,
        transaction_messages,
    ),
}
#: The last is the one that the running test is about.
kinds: list[Kind] = [KINDS["sync"]]


def kind() -> Kind:
    """The client that the running test is about."""
    return kinds[-1]


def run(work: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or comes to."""
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


#: More than any test needs: a client that asks for ever is to fail, and not to fill the memory.
MOST_REQUESTS = 10_000
NOBODY = Failure("connect", "refused")
LOST = Failure("lost", "reset")
SILENT = Failure("timeout", "no answer within 30 s")


class Simulation:
    """Where a client sends its requests, and how its time passes. ``answers``: in turn, or by a function of what was sent.

    ``took_s`` is a request's time, ``overslept_s`` what each pause takes longer than was asked for.
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
        """What sends the calls of a client that lives here. ``reached``: a daemon has answered it before."""
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
        """What it returns, or comes to."""
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
