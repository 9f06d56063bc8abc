"""Asking a topic's actor wherever it lives: here, or at the instance that owns the topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from actors.failing import READS
from broker.cluster.owners import PATIENCE_S
from broker.peering.link import LinkBroken
from protocol.topic.asks import Look
from protocol.topic.pointer_asks import ClosePointers, RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from actors.directory import Directory
    from actors.ownership import Instance
    from broker.cluster.owners import Owners
    from broker.peering.link import Link, Reply
    from protocol.names import TopicName
    from protocol.topic.asks import Ask

A = TypeVar("A")

#: What a decision waits for: done twice it changes nothing, and an owner that was replaced may never answer.
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
            del waited_ms
            answer = link.call("ask", told_ask(name, ask))
            reply = await (self._owners_answer(name, owner, answer) if isinstance(ask, SETTLES) else answer)
            return cast("A", reply.value)

        again = isinstance(ask, (*READS, *SETTLES))
        return await self._owners.do(name, here, there, only_looks=again, patience_s=lambda: patience_s)

    async def _owners_answer(self, name: TopicName, owner: Instance, answer: Awaitable[Reply]) -> Reply:
        """An answer that is waited for as long as that owner is the one. Raises LinkBroken."""
        staying = _Staying(self._owners, name, owner)
        self._owners.watch(staying)
        with staying.scope:
            return await answer
        raise LinkBroken(f"{owner.name} does not own {name} any more", sent=True)


class _Staying:
    """Implements ``owners.Watcher``: ends its scope when a name has another owner."""

    def __init__(self, owners: Owners, name: TopicName, owner: Instance) -> None:
        self.scope = trio.CancelScope()
        self._owners, self._name, self._owner = owners, name, owner

    def look(self) -> None:
        """See ``Watcher.look``."""
        if self._owners.elsewhere(self._name) != self._owner:
            self.scope.cancel()


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
