"""Asking a topic's actor wherever it lives: here, or at the instance that owns the topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from actors.topic import TOPIC_READS
from broker.cluster.owners import PATIENCE_S
from protocol.topic.asks import Look
from protocol.topic.pointer_asks import ClosePointers, RollBackPointer

if TYPE_CHECKING:
    from actors.directory import Directory
    from actors.ownership import Instance
    from broker.cluster.owners import Owners
    from broker.peering.link import Link
    from protocol.names import TopicName
    from protocol.topic.asks import Ask

A = TypeVar("A")

#: What a decision waits for: done twice it changes nothing, so it is asked again like what only looks.
SETTLES = (ClosePointers, RollBackPointer)


class AskAnywhere:
    """``Directory.ask`` for topics of all instances: what is not a client's request goes this way."""

    def __init__(self, owners: Owners, directory: Directory) -> None:
        self._owners = owners
        self._directory = directory

    async def ask(self, name: TopicName, ask: Ask[A], *, patience_s: float = PATIENCE_S) -> A:
        """The actor's answer.

        Args:
          patience_s: how long an owner is looked for, at least ``owners.PATIENCE_S``.
        Raises:
          NoOwner: none was found in time; nothing happened.
          OutcomeUnknown: the link broke before its answer came.
          PlainsongError: whatever ``Directory.ask`` raises there.
        """

        async def here(waited_ms: int) -> A:
            del waited_ms
            return await self._directory.ask(name, ask)

        async def there(link: Link, owner: Instance, waited_ms: int) -> A:
            del owner, waited_ms
            return cast("A", (await link.call("ask", told_ask(name, ask))).value)

        again = isinstance(ask, (*TOPIC_READS, *SETTLES))
        return await self._owners.do(name, here, there, only_looks=again, patience_s=lambda: patience_s)


def told_ask(name: TopicName, ask: Ask[Any]) -> list[Any]:
    """An ask as it travels: a deadline as what is left until it, since no two clocks are the same."""
    if isinstance(ask, Look) and ask.deadline_s is not None:
        return [name, replace(ask, deadline_s=None), max(0.0, ask.deadline_s - trio.current_time())]
    return [name, ask, None]


def heard_ask(value: list[Any]) -> tuple[TopicName, Ask[Any]]:
    """The ask that ``told_ask`` told. Raises ValueError."""
    name, ask, left_s = value
    if isinstance(ask, Look) and left_s is not None:
        ask.deadline_s = trio.current_time() + left_s
    return name, ask
