"""Runs a request at the owner of a name, here or over a link, and retries while it is certain that nothing happened."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast
from weakref import WeakSet

import trio

from actors.topic import TOPIC_READS
from broker.link.flow import LinkBroken
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, ShuttingDown
from plainsong.protocol.topic.asks import ClosePointers, Look, RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from actors.directory import Directory
    from actors.ownership import Instance, Ownership
    from broker.link.client import Link, Links
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName

A = TypeVar("A")
#: Time limit for the search for an owner, unless the request itself may wait longer.
PATIENCE_S = 2.0
#: Pauses in seconds between attempts, unless the view changes sooner; the last one repeats.
PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.25)
Direction = Literal["in", "out"]


class ForwardingMetrics(Protocol):
    """Counts forwarded requests; ``broker.metrics`` implements it."""

    def forwarded(self, direction: Direction) -> None:
        """Count a request sent to its owner (``out``), or received from another instance (``in``)."""

    def forward_retried(self) -> None:
        """Count a further attempt to find an owner."""

    def no_owner_found(self) -> None:
        """Count a request for which no owner was found in time."""


class ViewListener(Protocol):
    """Receives changes to the cluster's view."""

    def on_view_change(self) -> None:
        """Called when the view of the cluster has changed. Must not raise."""


class Owners:
    """Finds the owner of any name; there is one ``Owners`` per instance."""

    def __init__(self, ownership: Ownership, links: Links, metrics: ForwardingMetrics) -> None:
        self.ownership = ownership
        self.links = links
        self.metrics = metrics
        #: Set, and replaced, at each change of the view.
        self.changed = trio.Event()
        self._listeners: WeakSet[ViewListener] = WeakSet()
        self._bound: set[_BoundToOwner] = set()
        ownership.on_change(self._on_change)

    def _on_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
        for listener in [*self._listeners, *self._bound]:
            listener.on_view_change()
        present = {instance.address for instance in self.ownership.instances}
        for address in [*dict(self.links), *self.links.unreachable]:
            if address not in present:
                self.links.forget(address)  # it still answers pending calls, unless it has died

    def listen(self, listener: ViewListener) -> None:
        """Notify ``listener`` of every change of the view, without keeping it alive."""
        self._listeners.add(listener)

    def remote_owner(self, name: TopicName) -> Instance | None:
        """Return the other instance that owns a name; None if this instance owns it, or none does."""
        owner = None if self.ownership.is_mine(name) else self.ownership.owner(name)
        return None if owner is None or owner.name == self.ownership.me.name else owner

    def attempts(self, until_s: float | None = None) -> Attempts:
        """Return a loop of attempts at something that needs an owner."""
        return Attempts(self, until_s)

    async def run_at_owner(
        self,
        name: TopicName,
        local: Callable[[int], Awaitable[A]],
        remote: Callable[[Link, Instance, int], Awaitable[A]],
        *,
        repeatable: bool,
        patience_s: Callable[[], float] = lambda: PATIENCE_S,
    ) -> A:
        """Run ``local`` if this instance owns the name, else ``remote`` over a link to its owner, once there is one.

        Args:
          local, remote: receive the milliseconds that the request has already waited.
          repeatable: running the request twice has the same effect as once. It is then repeated if its answer was lost,
            and as soon as the name has an owner other than the one that was called, which may never answer. Any other
            request waits for its answer.
          patience_s: returns how long to search for an owner; called once there was none.
        Raises:
          NoOwner: no owner was found in time; nothing happened.
          OutcomeUnknown: the link broke before the answer arrived.
          PlainsongError: as ``local`` and ``remote`` raise it.
        """
        begun_s = trio.current_time()
        attempts = self.attempts()
        refusal: NoOwner | None = None
        async for _ in attempts:
            waited_ms = round((trio.current_time() - begun_s) * 1000)
            try:
                if self.ownership.is_mine(name):
                    return await local(waited_ms)
                owner = self.remote_owner(name)
                if owner is None:
                    raise NoOwner(f"no instance owns {name} at the moment")
                return await self._forward(name, owner, remote, waited_ms, repeatable=repeatable)
            except NoOwner as error:
                refusal = error
            if attempts.until_s is None:  # the owner may have been silent for a long time before it was lost
                attempts.until_s = max(begun_s + patience_s(), trio.current_time() + PATIENCE_S)
        self.metrics.no_owner_found()
        raise refusal or NoOwner()

    async def _forward(
        self,
        name: TopicName,
        owner: Instance,
        remote: Callable[[Link, Instance, int], Awaitable[A]],
        waited_ms: int,
        *,
        repeatable: bool,
    ) -> A:
        """Run ``remote`` once. Raises NoOwner: nothing happened, or the request is repeatable; OutcomeUnknown."""

        async def forward(link: Link) -> A:
            self.metrics.forwarded("out")
            return await remote(link, owner, waited_ms)

        try:
            return await self.call_owner((name,), owner, forward, repeatable=repeatable)
        except LinkBroken as broken:
            if broken.sent and not repeatable:
                raise OutcomeUnknown(
                    f"the owner of {name} was lost before it answered",
                    hint=("read the topic to check whether it happened"),
                ) from broken
            raise NoOwner(f"the owner of {name} cannot be reached") from broken

    async def call_owner(
        self, names: Iterable[TopicName], owner: Instance, call: Callable[[Link], Awaitable[A]], *, repeatable: bool
    ) -> A:
        """Run ``call`` once, on the link to the instance that owns these names.

        Raises:
          LinkBroken: there is no link to it, or the link broke; if ``repeatable``, also because the instance lost one
            of the names.
          NoOwner: it is shutting down, and another instance will take over; nothing happened.
          PlainsongError: as ``call`` raises it.
        """
        link = await self.links.to(owner.address)
        try:
            return await (self.while_owner(names, owner, call(link)) if repeatable else call(link))
        except ShuttingDown as error:
            raise NoOwner(error.detail) from error

    async def while_owner(self, names: Iterable[TopicName], owner: Instance, answer: Awaitable[A]) -> A:
        """Wait for an answer while ``owner`` owns all these names; cancel the call when it does not.

        Raises:
          LinkBroken: it no longer owns one of them. Also any error of ``answer``.
        """
        bound = _BoundToOwner(self, names, owner)
        self._bound.add(bound)
        bound.on_view_change()  # the view may have changed while the link was dialled
        try:
            with bound.scope:
                return await answer
        finally:
            self._bound.discard(bound)
        raise LinkBroken(f"{owner.name} no longer owns all of the requested topics", sent=True)


class _BoundToOwner:
    """Implements ``ViewListener``: cancels its scope when a name has an owner other than the one that was called."""

    def __init__(self, owners: Owners, names: Iterable[TopicName], owner: Instance) -> None:
        self.scope = trio.CancelScope()
        self._owners, self._names, self._owner = owners, tuple(names), owner

    def on_view_change(self) -> None:
        if any(self._owners.remote_owner(name) != self._owner for name in self._names):
            self.scope.cancel()


class Attempts:
    """The retry loop: ``async for`` runs its body immediately, and again after each pause until time is up.

    A pause ends early if the view changes, even if it changed while the body ran. Pauses are short, since the view may
    be out of date. The body leaves the loop by ``return`` or ``break`` once it has succeeded.
    """

    def __init__(self, owners: Owners, until_s: float | None) -> None:
        #: The end on trio's clock; None for no end. The body may set it.
        self.until_s = until_s
        self._owners = owners
        self._backoff = Backoff(PAUSES_S)
        self._changed: trio.Event | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        if self._changed is not None:
            await self._pause(self._changed)
        self._changed = self._owners.changed

    async def _pause(self, changed: trio.Event) -> None:
        now_s = trio.current_time()
        if self.until_s is not None and now_s >= self.until_s:
            raise StopAsyncIteration
        with trio.move_on_at(min(self.until_s or inf, now_s + self._backoff.failed())):
            await changed.wait()
        self._owners.metrics.forward_retried()


# --- asks of topics, wherever they are -------------------------------------------------------------


#: Asks by which transactions are completed. They are idempotent, so they may be repeated like reads.
TOPIC_DECISIONS = (ClosePointers, RollBackPointer)


class RoutedAsks:
    """``Directory.ask`` for the topics of all instances; for the daemon's own purposes, not for clients' requests."""

    def __init__(self, owners: Owners, directory: Directory) -> None:
        self._owners = owners
        self._directory = directory

    async def ask(self, name: TopicName, ask: Ask[A], *, patience_s: float = PATIENCE_S) -> A:
        """Return the actor's answer.

        Args:
          patience_s: how long to search for an owner; ``PATIENCE_S`` at least.
        Raises:
          NoOwner: no owner was found in time; nothing happened.
          OutcomeUnknown: the link broke before the answer arrived.
          PlainsongError: any error of ``Directory.ask`` there.
        """

        async def local(waited_ms: int) -> A:
            del waited_ms
            return await self._directory.ask(name, ask)

        async def remote(link: Link, owner: Instance, waited_ms: int) -> A:
            del owner, waited_ms
            return cast("A", (await link.call("ask", encode_ask(name, ask))).value)

        repeatable = isinstance(ask, (*TOPIC_READS, *TOPIC_DECISIONS))
        return await self._owners.run_at_owner(
            name, local, remote, repeatable=repeatable, patience_s=lambda: patience_s
        )


def encode_ask(name: TopicName, ask: Ask[Any]) -> list[Any]:
    """Encode an ask. A deadline becomes the remaining time, since clocks differ."""
    if isinstance(ask, Look) and ask.deadline_s is not None:
        return [name, replace(ask, deadline_s=None), max(0.0, ask.deadline_s - trio.current_time())]
    return [name, ask, None]


def decode_ask(value: list[Any]) -> tuple[TopicName, Ask[Any]]:
    """Reverse ``encode_ask``. Raises ValueError."""
    name, ask, left_s = value
    if isinstance(ask, Look) and left_s is not None:
        ask.deadline_s = trio.current_time() + left_s
    return name, ask
