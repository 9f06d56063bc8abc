"""The directory: finds a topic's mailbox, opening the topic at its first use and letting idle ones go.

One entry per name, made synchronously by whoever comes first, so a hundred first callers make one load.
An entry supervises its actor: when it falls it is started again from disk, at once and then with growing
pauses; while the store does not answer, callers are told so instead of waiting. An entry that is let go
is out of the directory before it ends, and its successor waits for that end: never two owners.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.mailbox import Mailbox, Ticket
from actors.scan_cache import TopicCache
from actors.topic import TopicActor
from protocol.errors import Overloaded, PlainsongError, Recovering, ShuttingDown, StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.scan_cache import CacheBudget
    from actors.topic import Surroundings
    from protocol.names import TopicName
    from protocol.topic.asks import Ask
    from protocol.topic.state import TopicState

log = logging.getLogger(__name__)

A = TypeVar("A")

#: Pauses before the second, third … attempt to load a topic whose store fails; the last one repeats.
RESTART_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


class Entry:
    """One open topic: its mailbox, its cache, and the supervision of its actor."""

    def __init__(self, name: TopicName, directory: Directory, predecessor: trio.Event | None) -> None:
        self.name = name
        self.mailbox = Mailbox(directory.mailbox_requests, directory.mailbox_bytes)
        self.cache = TopicCache(directory.budget)
        self.actor = TopicActor(name, directory.around, self.mailbox, self.cache)
        self.done = trio.Event()
        self.used_s = trio.current_time()
        self._around = directory.around
        self._predecessor = predecessor
        self._closing = trio.Event()
        self._failures = 0
        self._begun_s = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.name} waiting={len(self.mailbox)} {self.actor!r}>"

    def close(self) -> None:
        """Take no more; what is in is served, then the actor ends."""
        self._closing.set()
        self.mailbox.close()

    async def run(self) -> None:
        """Keep the actor running until the mailbox is closed and empty. Never raises."""
        try:
            if self._predecessor is not None:
                await self._predecessor.wait()
            await self._supervise()
        finally:
            self.mailbox.close()
            self.mailbox.drain(lambda: ShuttingDown("the daemon is shutting down"))
            self.done.set()

    async def _supervise(self) -> None:
        while True:
            self._begun_s = trio.current_time()
            try:
                await self.actor.run(self._is_loaded)
                return
            except Exception as error:  # noqa: BLE001  # whatever made it fall, it is started again from disk
                self._fell(error)
            if self._closing.is_set() and (self._failures > 1 or not len(self.mailbox)):
                return  # nobody waits: a mark that cannot be written costs the next load some time, no more
            if self._failures > 1:
                await self._pause(RESTART_PAUSES_S[min(self._failures - 1, len(RESTART_PAUSES_S)) - 1])

    def _is_loaded(self) -> None:
        self._failures = 0
        self.mailbox.closed_for = None
        self._around.observer.loaded(self.name, trio.current_time() - self._begun_s)

    def _fell(self, error: BaseException) -> None:
        self._failures += 1
        known = isinstance(error, PlainsongError)
        log.error(
            "topic fell, loading it again",
            extra={"topic": str(self.name), "why": str(error), "failures": self._failures},
            exc_info=None if known else error,
        )
        self._around.observer.fell(self.name, error)
        if self._failures > 1:  # it could not even be loaded: nobody should wait for it
            detail = error.detail if isinstance(error, PlainsongError) else "the topic cannot be loaded"
            self.mailbox.closed_for = lambda: Recovering(detail, hint="the daemon keeps trying")
            self.mailbox.drain(lambda: StorageFailed(detail, hint="the daemon keeps trying"))

    async def _pause(self, pause_s: float) -> None:
        with trio.move_on_after(pause_s):
            await self._closing.wait()


class Directory:
    """All open topics of this daemon."""

    def __init__(
        self,
        nursery: trio.Nursery,
        around: Surroundings,
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
        self._entries: OrderedDict[TopicName, Entry] = OrderedDict()
        self._leaving: dict[TopicName, Entry] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

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

    def entry(self, name: TopicName) -> Entry:
        """The topic's entry, new if need be.

        Raises:
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

    def _open(self, name: TopicName) -> Entry:
        if self._closed:
            raise ShuttingDown("the daemon is shutting down")
        if len(self._entries) >= self._max_open and not self._let_go_one():
            raise Overloaded(f"{len(self._entries)} topics are open", hint="raise topic.max_open, or use fewer at once")
        previous = self._leaving.get(name)
        entry = Entry(name, self, None if previous is None else previous.done)
        self._entries[name] = entry
        self._nursery.start_soon(self._run, entry)
        return entry

    async def _run(self, entry: Entry) -> None:
        try:
            await entry.run()
        finally:
            if self._leaving.get(entry.name) is entry:
                del self._leaving[entry.name]
            if self._entries.get(entry.name) is entry:
                del self._entries[entry.name]

    def _let_go(self, entry: Entry) -> None:
        del self._entries[entry.name]
        self._leaving[entry.name] = entry
        entry.close()

    def _let_go_one(self) -> bool:
        """Let the longest unused idle topic go, if there is one."""
        for entry in self._entries.values():
            if entry.actor.idle:
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
                if entry.actor.idle and now_s - entry.used_s > (1.0 if absent else self._idle_s):
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
