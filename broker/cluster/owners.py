"""Finds a name's owner, here or over a link, and retries while it is certain that nothing happened.

Has something done at a name's owner: here, or over a link; and again, as long as it is known not to have happened.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from weakref import WeakSet

import trio

from actors.topic import TOPIC_READS
from broker.link.flow import LinkBroken
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, ShuttingDown
from plainsong.protocol.topic.asks import ClosePointers, Look, RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from actors.directory import Directory
    from actors.ownership import Instance, Ownership
    from broker.link.client import Link, Links
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.names import TopicName

A = TypeVar("A")
#: How long an owner is looked for, unless the request itself has longer to wait.
PATIENCE_S = 2.0
#: Between two looks, unless the view changes sooner; they double.
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.25
Direction = Literal["in", "out"]


class Counted(Protocol):
    """Who is told of what is forwarded: ``broker.metrics``."""

    def forwarded(self, direction: Direction) -> None:
        """A request left for its owner, or came from another instance."""

    def forward_retried(self) -> None:
        """An owner was looked for again."""

    def no_owner_found(self) -> None:
        """None was found in time."""


class Watcher(Protocol):
    """Who is to look again when the view has changed."""

    def look(self) -> None:
        """The view has changed."""


class Owners:
    """The way to the owner of any name; one for an instance."""

    def __init__(self, ownership: Ownership, links: Links, counted: Counted) -> None:
        self.ownership = ownership
        self.links = links
        self.counted = counted
        self.changed = trio.Event()
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._asked: set[_Staying] = set()
        ownership.on_change(self._has_changed)

    def _has_changed(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
        for watcher in [*self._watchers, *self._asked]:
            watcher.look()
        there = {instance.address for instance in self.ownership.instances}
        for address in [*dict(self.links), *self.links.unreachable]:
            if address not in there:
                self.links.forget(address)  # gone, or leaving: what is under way is answered, if anybody is there

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher.look`` called after every change of the view, for as long as somebody else holds it."""
        self._watchers.add(watcher)

    def elsewhere(self, name: TopicName) -> Instance | None:
        """The other instance that owns a name; None: this one does, or nobody."""
        owner = None if self.ownership.is_mine(name) else self.ownership.owner(name)
        return None if owner is None or owner.name == self.ownership.me.name else owner

    async def do(
        self,
        name: TopicName,
        here: Callable[[int], Awaitable[A]],
        there: Callable[[Link, Instance, int], Awaitable[A]],
        *,
        only_looks: bool,
        patience_s: Callable[[], float] = lambda: PATIENCE_S,
    ) -> A:
        """What ``here`` or ``there`` gives, whichever is at the owner; each is told for how many ms was waited already.

        Args:
          only_looks: nothing happens by it, so that it may be done again after a doubt. It is, as soon as the name has
            another owner than the one that was asked, which may never answer; whatever writes waits for its answer.
          patience_s: how long an owner is looked for; asked once one was not found.
        Raises:
          NoOwner: none was found in time; nothing happened.
          OutcomeUnknown: the link broke before its answer came.
          PlainsongError: whatever ``here`` and ``there`` raise.
        """
        begun_s = trio.current_time()
        waited_ms = 0
        search = self.search()
        while True:
            search.look()
            try:
                return await self._once(name, here, there, waited_ms, only_looks=only_looks)
            except NoOwner as error:
                refusal = error
            except LinkBroken as broken:
                refusal = _after_break(name, broken, only_looks=only_looks)
            if search.until_s is None:  # one that was there may have said nothing for long before it was lost
                search.until_s = max(begun_s + patience_s(), trio.current_time() + PATIENCE_S)
            if not await search.goes_on():
                self.counted.no_owner_found()
                raise refusal
            waited_ms = round((trio.current_time() - begun_s) * 1000)

    async def while_owner(self, names: Iterable[TopicName], owner: Instance, answering: Awaitable[A]) -> A:
        """An answer that is waited for as long as all these names are ``owner``'s; then it is left, and cancelled there.

        Raises:
          LinkBroken: one of them is not any more. Whatever ``answering`` raises.
        """
        staying = _Staying(self, names, owner)
        self._asked.add(staying)
        staying.look()  # the view may have changed while a link was dialled
        try:
            with staying.scope:
                return await answering
        finally:
            self._asked.discard(staying)
        raise LinkBroken(f"{owner.name} does not own all of what it was asked for any more", sent=True)

    def search(self, until_s: float | None = None) -> Search:
        """A search for somebody who is not there, until then on trio's clock."""
        return Search(self, until_s)

    async def _once(
        self,
        name: TopicName,
        here: Callable[[int], Awaitable[A]],
        there: Callable[[Link, Instance, int], Awaitable[A]],
        waited_ms: int,
        *,
        only_looks: bool,
    ) -> A:
        if self.ownership.is_mine(name):
            return await here(waited_ms)
        owner = self.elsewhere(name)
        if owner is None:
            raise NoOwner(f"nobody owns {name} just now")
        link = await self.links.to(owner.address)
        self.counted.forwarded("out")
        try:
            answering = there(link, owner, waited_ms)
            return await (self.while_owner((name,), owner, answering) if only_looks else answering)
        except ShuttingDown as error:  # its own: somebody else takes over
            raise NoOwner(error.detail) from error


class _Staying:
    """Implements ``Watcher``: ends its scope when one of some names has another owner than the one they had."""

    def __init__(self, owners: Owners, names: Iterable[TopicName], owner: Instance) -> None:
        self.scope = trio.CancelScope()
        self._owners, self._names, self._owner = owners, tuple(names), owner

    def look(self) -> None:
        """See ``Watcher.look``."""
        if any(self._owners.elsewhere(name) != self._owner for name in self._names):
            self.scope.cancel()


class Search:
    """Looks, and pauses between them: until the view changes, and never for long, since it may be late."""

    def __init__(self, owners: Owners, until_s: float | None) -> None:
        self.until_s = until_s
        self._owners = owners
        self._pause_s = FIRST_PAUSE_S
        self._changed = owners.changed

    def look(self) -> None:
        """To be called before each look: a change that comes after it ends the pause behind it."""
        self._changed = self._owners.changed

    async def goes_on(self) -> bool:
        """Pauses; False at once when the time is over."""
        now_s = trio.current_time()
        if self.until_s is not None and now_s >= self.until_s:
            return False
        with trio.move_on_at(min(self.until_s or inf, now_s + self._pause_s)):
            await self._changed.wait()
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._owners.counted.forward_retried()
        return True


def _after_break(name: TopicName, broken: LinkBroken, *, only_looks: bool) -> NoOwner:
    """What a broken link leaves to say: that nothing happened. Raises OutcomeUnknown where nobody knows that."""
    if broken.sent and not only_looks:
        unknown: PlainsongError = OutcomeUnknown(
            f"the owner of {name} was lost before it answered", hint="read to see whether it happened"
        )
        raise unknown from broken
    refusal = NoOwner(f"the owner of {name} cannot be reached")
    refusal.__cause__ = broken
    return refusal


# --- asking ----------------------------------------------------------------------------------------
#
# Asking a topic's actor wherever it lives: here, or at the instance that owns the topic.


#: What a decision waits for: done twice it changes nothing, so it is asked again like what only looks.
SETTLES = (ClosePointers, RollBackPointer)


class RoutedAsks:
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
            return cast("A", (await link.call("ask", encode_ask(name, ask))).value)

        again = isinstance(ask, (*TOPIC_READS, *SETTLES))
        return await self._owners.do(name, here, there, only_looks=again, patience_s=lambda: patience_s)


def encode_ask(name: TopicName, ask: Ask[Any]) -> list[Any]:
    """An ask as it travels: a deadline as what is left until it, since no two clocks are the same."""
    if isinstance(ask, Look) and ask.deadline_s is not None:
        return [name, replace(ask, deadline_s=None), max(0.0, ask.deadline_s - trio.current_time())]
    return [name, ask, None]


def decode_ask(value: list[Any]) -> tuple[TopicName, Ask[Any]]:
    """The ask that ``told_ask`` told. Raises ValueError."""
    name, ask, left_s = value
    if isinstance(ask, Look) and left_s is not None:
        ask.deadline_s = trio.current_time() + left_s
    return name, ask
