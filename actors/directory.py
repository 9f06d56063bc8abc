"""The directory of open topics: opens them at first use, restarts their actors, and closes idle ones.

The directory: finds a topic's mailbox, opening the topic at its first use and letting idle ones go.

One entry per name, made synchronously by whoever comes first, so a hundred first callers make one load.
An entry supervises its actor: when it falls it is started again from disk, at once and then with growing
pauses; while the store does not answer, callers are told so instead of waiting. An entry that is let go
is out of the directory before it ends, and its successor waits for that end: never two owners.

Only our own topics are opened. What another instance is to own is let go when the view of that changes, and that one
is told to open it; what one has claimed already ends at once, and is not claimed back until a pause is over.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.actor import Supervision
from actors.cache import TopicCache
from actors.mailbox import Mailbox, Ticket
from actors.ownership import Alone, ClaimPauses
from actors.topic import TopicActor, topic_moved
from plainsong.protocol.errors import NoOwner, Overloaded, PlainsongError, Recovering, ShuttingDown, StorageFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from actors.cache import CacheBudget
    from actors.topic import TopicEnvironment
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.state import TopicState
    from storage.base import Deposed

log = logging.getLogger(__name__)
A = TypeVar("A")


class Directory:
    """All open topics of this daemon."""

    def __init__(
        self,
        nursery: trio.Nursery,
        around: TopicEnvironment,
        budget: CacheBudget,
        *,
        mailbox_requests: int,
        mailbox_bytes: int,
        max_open: int,
        idle_s: float,
    ) -> None:
        self.around = around
        self.budget = budget
        self.mailbox_requests = mailbox_requests
        self.mailbox_bytes = mailbox_bytes
        self._max_open = max_open
        self._idle_s = idle_s
        self._nursery = nursery
        self._entries: OrderedDict[TopicName, DirectoryEntry] = OrderedDict()
        self._leaving: dict[TopicName, DirectoryEntry] = {}
        self._pauses = ClaimPauses()
        self._closed = False
        self._handing = 0
        self._handed = trio.Event()
        #: Has the next owners of topics that were let go open them; bounded in time, and must not raise.
        self.pass_on: Callable[[Sequence[TopicName]], Awaitable[None]] | None = None
        around.ownership.on_change(self._view_changed)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[DirectoryEntry]:
        return iter(list(self._entries.values()))

    @property
    def closing(self) -> int:
        """Topics that were let go and have not ended yet."""
        return len(self._leaving)

    def peek(self, name: TopicName) -> TopicState | None:
        """The state of a topic that is open and loaded, to look at; does not count as use."""
        entry = self._entries.get(name)
        core = None if entry is None else entry.actor.core
        return None if core is None else core.state

    def cache(self, name: TopicName) -> TopicCache | None:
        """The topic's scan cache, if it is open."""
        entry = self._entries.get(name)
        return None if entry is None else entry.cache

    async def ask(self, name: TopicName, ask: Ask[A]) -> A:
        """Ask the topic's actor, opening the topic if need be. Raises as ``Mailbox.ask`` does."""
        return await self.entry(name).mailbox.ask(ask)

    def put(self, name: TopicName, ask: Ask[A]) -> Ticket[A]:
        """Ask without waiting: the ticket has the answer. Those put one after the other are taken in that order.

        Raises as ``Mailbox.put`` does.
        """
        ticket = Ticket(ask)
        self.entry(name).mailbox.put(ticket)
        return ticket

    def entry(self, name: TopicName) -> DirectoryEntry:
        """The topic's entry, new if need be.

        Raises:
          NoOwner: it is not ours, or another instance has claimed it a moment ago.
          ShuttingDown: the daemon is leaving.
          Overloaded: as many topics as may be are open, and none of them is idle.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = self._open(name)
        else:
            self._entries.move_to_end(name)
        entry.used_s = trio.current_time()
        return entry

    def _open(self, name: TopicName) -> DirectoryEntry:
        if self._closed:
            raise ShuttingDown("the daemon is shutting down")
        if not self.around.ownership.is_mine(name) or self._pauses.holds(name, trio.current_time()):
            raise topic_moved(name)
        if len(self._entries) >= self._max_open and not self._let_go_one():
            raise Overloaded(f"{len(self._entries)} topics are open", hint="raise topic.max_open, or use fewer at once")
        previous = self._leaving.get(name)
        entry = DirectoryEntry(name, self, None if previous is None else previous.done)
        self._entries[name] = entry
        self._nursery.start_soon(self._run, entry)
        return entry

    async def _run(self, entry: DirectoryEntry) -> None:
        try:
            await entry.run()
        finally:
            if self._leaving.get(entry.name) is entry:
                del self._leaving[entry.name]
            if self._entries.get(entry.name) is entry:
                del self._entries[entry.name]
            if entry.deposed and self.around.ownership.is_mine(entry.name):
                self.around.ownership.deposed(entry.name)
                self._pauses.begin(entry.name, trio.current_time())

    def _let_go(self, entry: DirectoryEntry, *, given_away: bool = False) -> None:
        del self._entries[entry.name]
        self._leaving[entry.name] = entry
        entry.close(given_away=given_away)

    def _view_changed(self) -> None:
        """Let all topics go at once that are not ours any more: what is in is served, who comes later hears NoOwner."""
        self._pauses.end()
        gone = [entry for entry in self if not self.around.ownership.is_mine(entry.name)]
        # What is not there is not worth being opened by anybody.
        there = [entry.name for entry in gone if (state := self.peek(entry.name)) is not None and state.metadata]
        for entry in gone:
            self._let_go(entry, given_away=True)
        if gone and not self._closed:
            self._handing += 1
            self._nursery.start_soon(self._hand_over, gone, there)

    async def _hand_over(self, gone: list[DirectoryEntry], there: list[TopicName]) -> None:
        begun_s = trio.current_time()
        try:
            for entry in gone:
                await entry.done.wait()
            took_s = trio.current_time() - begun_s
            self.around.observer.handed_over(len(gone), took_s)
            log.info("topics handed over", extra={"topics": len(gone), "seconds": round(took_s, 3)})
            if self.pass_on is not None and there:
                await self.pass_on(there)
        finally:
            self._handing -= 1
            self._handed.set()
            self._handed = trio.Event()

    async def handed(self) -> None:
        """Wait until the topics that are not ours any more were let go, and are with their next owners."""
        while self._handing:
            await self._handed.wait()

    def _let_go_one(self) -> bool:
        """Let the longest unused idle topic go, if there is one."""
        for entry in self._entries.values():
            if entry.actor.is_idle:
                self._let_go(entry)
                return True
        return False

    async def run_sweeper(self) -> None:
        """Let topics go that nobody has used for ``topic.idle_s``; absent ones much sooner."""
        while True:
            await trio.sleep(min(5.0, self._idle_s / 4))
            now_s = trio.current_time()
            for entry in self:
                core = entry.actor.core
                absent = core is not None and core.state.metadata is None
                if entry.actor.is_idle and now_s - entry.used_s > (1.0 if absent else self._idle_s):
                    self._let_go(entry)

    def close(self) -> None:
        """Take no more: every parked poll is answered, empty; what has been asked is served."""
        self._closed = True
        for entry in self:
            self._let_go(entry)

    async def drained(self) -> None:
        """Wait until every actor has ended. Call ``close`` first."""
        while self._leaving:
            await next(iter(self._leaving.values())).done.wait()
            await trio.lowlevel.checkpoint()


class DirectoryEntry(Supervision):
    """One open topic: its mailbox, its cache, and the supervision of its actor.

    opened ──► loaded ──► serves ──► closed: idle, handed over, or the daemon shuts down
       ▲                    │
       └──── fallen ◄───────┘ deposed by another owner: the end
    """

    def __init__(self, name: TopicName, directory: Directory, predecessor: trio.Event | None) -> None:
        super().__init__(Mailbox(directory.mailbox_requests, directory.mailbox_bytes), "topic", {"topic": str(name)})
        self.name = name
        self.cache = TopicCache(directory.budget)
        self.actor = TopicActor(name, directory.around, self.mailbox, self.cache)
        self.done = trio.Event()
        self.used_s = trio.current_time()
        self._around = directory.around
        self._predecessor = predecessor

    def __repr__(self) -> str:
        return f"<DirectoryEntry {self.name} waiting={len(self.mailbox)} {self.actor!r}>"

    async def run(self) -> None:
        """Keep the actor running until the mailbox is closed and empty. Never raises."""
        try:
            await self._supervise(self.actor.run, self._predecessor)
        finally:
            self.done.set()

    def _moved(self) -> NoOwner:
        return topic_moved(self.name)

    def _refuse(self, error: Exception) -> None:
        """After the first fall requests wait for the load; after the second, nobody knows how long that takes."""
        if self._failures > 1:
            detail = error.detail if isinstance(error, PlainsongError) else "the topic cannot be loaded"
            self.mailbox.closed_for = lambda: Recovering(detail, hint="the daemon keeps trying")
            self.mailbox.drain(lambda: StorageFailed(detail, hint="the daemon keeps trying"))

    def _report_loaded(self, load_s: float) -> None:
        self._around.observer.loaded(self.name, load_s)

    def _report_fall(self, error: Exception) -> None:
        self._around.observer.fell(self.name, error)

    def _report_deposed(self, error: Deposed) -> None:
        if not self.given_away:
            # Without ZooKeeper another daemon on the same store takes topics again and again: one warning says so, not
            # one for each topic.
            level = logging.DEBUG if isinstance(self._around.ownership, Alone) else logging.WARNING
            log.log(level, "topic taken over", extra={**self._extra, "why": str(error)})
        self._around.observer.deposed(self.name)
