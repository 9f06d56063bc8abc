"""The directory of open topics: opens them at first use, restarts their actors, and closes idle ones.

The first caller makes a topic's entry synchronously, so a hundred first callers cause one load. An entry supervises its
actor: when the actor falls it is started again from disk, at once the first time, then with increasing pauses; while
the store does not answer, callers get an error instead of waiting. A closed entry leaves the directory before its actor
ends, and its successor waits for that end, so a topic never has two writers.

The directory opens only topics that this instance owns. When the view of the owners changes it closes the topics that
other instances own now, and asks those instances to open them. If another instance has already claimed a topic, its
actor ends at once, and the topic is not claimed back before a pause is over.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.actor import Supervision
from actors.cache import TopicCache
from actors.mailbox import Mailbox, Ticket
from actors.ownership import Alone, ClaimPauses
from actors.topic import TopicActor, topic_moved
from plainsong.protocol.errors import NoOwner, Overloaded, PlainsongError, Recovering, ShuttingDown, StorageFailed
from plainsong.protocol.plurals import counted
from storage.base import Unreadable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from actors.cache import CacheBudget
    from actors.settings import TopicConfig
    from actors.topic import TopicEnvironment
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import Look, Span
    from plainsong.protocol.topic.core import TopicCore
    from plainsong.protocol.topic.state import TopicState
    from storage.base import Deposed

log = logging.getLogger(__name__)
A = TypeVar("A")
#: Open topics that the sweeper checks before it yields to the event loop.
MANY = 100
#: Rows of a topic that cannot be loaded cannot be set aside: the producers' requests in them are unknown. A restore
#: does not need to know them, since it gives every producer a new epoch.
_DAMAGED_HINT = (
    "the daemon keeps trying; if it does not succeed, back up everything readable with `plainsong backup create DIR "
    "--without-damaged`, and restore that backup"
)


class Directory:
    """All open topics of this daemon."""

    def __init__(
        self,
        nursery: trio.Nursery,
        environment: TopicEnvironment,
        budget: CacheBudget,
        settings: TopicConfig,
    ) -> None:
        self.environment = environment
        self.budget = budget
        self.settings = settings
        self._nursery = nursery
        #: Actors run in this context: in that of a topic's first caller they would keep its request alive.
        self._context = copy_context()
        self._entries: OrderedDict[TopicName, DirectoryEntry] = OrderedDict()
        self._ending: dict[TopicName, DirectoryEntry] = {}
        self._pauses = ClaimPauses()
        self._closed = False
        self._loop_s = trio.lowlevel.current_clock().current_time
        self._handovers = 0
        self._handover_ended = trio.Event()
        #: Asks the next owners to open topics that were handed over; bounded in time, must not raise.
        self.open_at_owners: Callable[[Sequence[TopicName]], Awaitable[None]] | None = None
        environment.ownership.on_change(self._view_changed)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[DirectoryEntry]:
        return iter(list(self._entries.values()))

    @property
    def closing(self) -> int:
        """Closed topics whose actors have not ended yet."""
        return len(self._ending)

    def peek(self, name: TopicName) -> TopicState | None:
        """Return the state of a topic, for reading only; None unless it is loaded. Does not count as use."""
        core = self.core(name)
        return None if core is None else core.state

    def core(self, name: TopicName) -> TopicCore | None:
        """Return the topic's core, for reading only; None unless it is loaded. Does not count as use."""
        entry = self._entries.get(name)
        return None if entry is None else entry.actor.core

    def cache(self, name: TopicName) -> TopicCache | None:
        """Return the topic's scan cache; None unless the topic is open."""
        entry = self._entries.get(name)
        return None if entry is None else entry.cache

    async def ask(self, name: TopicName, ask: Ask[A]) -> A:
        """Ask the topic's actor; open the topic if necessary. Raises what ``entry`` and ``Mailbox.ask`` raise."""
        return await self.entry(name).mailbox.ask(ask)

    def look_now(self, name: TopicName, look: Look) -> Span | None:
        """Return the topic's answer to a look if it is open and has nothing else to do; None: use ``ask``."""
        if name not in self._entries:
            return None
        return self.entry(name).actor.look_now(look)

    def put(
        self,
        name: TopicName,
        ask: Ask[A],
        on_settled: Callable[[A | Exception], object] | None = None,
        prepare: Callable[[A | Exception], object] | None = None,
    ) -> Ticket[A]:
        """Ask without waiting; the ticket gets the answer. The actor receives tickets in the order of these calls.

        Args:
          on_settled, prepare: see ``Ticket``; with ``on_settled``, a server that runs the turns runs this topic's too.
          Raises what ``entry`` and ``Mailbox.put`` raise.
        """
        ticket = Ticket(ask, on_settled, prepare)
        entry = self.entry(name)
        if on_settled is None:
            entry.mailbox.put(ticket)
            return ticket
        run_queue = self.environment.run_queue
        entry.mailbox.put(ticket, wake=not run_queue.has_server)
        if run_queue.has_server:
            run_queue.wake_for(entry.actor)
        return ticket

    def entry(self, name: TopicName) -> DirectoryEntry:
        """Return the topic's entry; make one if there is none.

        Raises:
          NoOwner: this instance does not own the topic, or another instance has just claimed it.
          ShuttingDown: the daemon shuts down.
          Overloaded: the maximum number of topics is open, and none of them is idle.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = self._open(name)
        else:
            self._entries.move_to_end(name)
        entry.used_s = self._loop_s()
        return entry

    def _open(self, name: TopicName) -> DirectoryEntry:
        if self._closed:
            raise ShuttingDown("the daemon is shutting down")
        if not self.environment.ownership.is_mine(name) or self._pauses.holds(name, trio.current_time()):
            raise topic_moved(name)
        if len(self._entries) >= self.settings.max_open and not self._close_idle_one():
            raise Overloaded(
                f"{counted(len(self._entries), 'open topic')}: no more can be opened",
                hint=("raise topic.max_open, or use fewer topics at once"),
            )
        previous = self._ending.get(name)
        entry = DirectoryEntry(name, self, None if previous is None else previous.done)
        self._entries[name] = entry
        self._context.run(self._nursery.start_soon, self._run, entry)
        return entry

    async def _run(self, entry: DirectoryEntry) -> None:
        try:
            await entry.run()
        finally:
            if self._ending.get(entry.name) is entry:
                del self._ending[entry.name]
            if self._entries.get(entry.name) is entry:
                del self._entries[entry.name]
            if entry.deposed and self.environment.ownership.is_mine(entry.name):
                self.environment.ownership.deposed(entry.name)
                self._pauses.begin(entry.name, trio.current_time())

    def _close_entry(self, entry: DirectoryEntry, *, given_away: bool = False) -> None:
        del self._entries[entry.name]
        self._ending[entry.name] = entry
        entry.close(given_away=given_away)

    def _view_changed(self) -> None:
        """Close all topics that this instance no longer owns; their actors still serve the waiting requests."""
        self._pauses.end()
        gone = [entry for entry in self if not self.environment.ownership.is_mine(entry.name)]
        # No instance needs to open a topic that does not exist.
        existing = [entry.name for entry in gone if (state := self.peek(entry.name)) is not None and state.metadata]
        for entry in gone:
            self._close_entry(entry, given_away=True)
        if gone and not self._closed:
            self._handovers += 1
            self._nursery.start_soon(self._hand_over, gone, existing)

    async def _hand_over(self, gone: list[DirectoryEntry], existing: list[TopicName]) -> None:
        begun_s = trio.current_time()
        try:
            for entry in gone:
                await entry.done.wait()
            took_s = trio.current_time() - begun_s
            self.environment.observer.handed_over(len(gone), took_s)
            log.info("topics handed over", extra={"topics": len(gone), "seconds": round(took_s, 3)})
            if self.open_at_owners is not None and existing:
                await self.open_at_owners(existing)
        finally:
            self._handovers -= 1
            self._handover_ended.set()
            self._handover_ended = trio.Event()

    async def handed_over(self) -> None:
        """Wait until the topics that this instance no longer owns are handed over to their next owners."""
        while self._handovers:
            await self._handover_ended.wait()

    def _close_idle_one(self) -> bool:
        """Close the least recently used idle topic; False if there is none."""
        for entry in self._entries.values():
            if entry.actor.is_idle:
                self._close_entry(entry)
                return True
        return False

    async def run_sweeper(self) -> None:
        """Close topics that were not used for ``topic.idle_s``, and much sooner topics that do not exist."""
        while True:
            await trio.sleep(min(5.0, self.settings.idle_s / 4))
            now_s = trio.current_time()
            for number, entry in enumerate(self):
                if number % MANY == MANY - 1:
                    await trio.lowlevel.checkpoint()  # do not block the event loop
                if self._entries.get(entry.name) is not entry:
                    continue  # closed during the checkpoint
                core = entry.actor.core
                absent = core is not None and core.state.metadata is None
                if entry.actor.is_idle and now_s - entry.used_s > (1.0 if absent else self.settings.idle_s):
                    self._close_entry(entry)

    def end_late(self, refusal: Callable[[], PlainsongError]) -> None:
        """Call ``Actor.end_late`` of every actor."""
        for entry in (*self._entries.values(), *self._ending.values()):
            entry.actor.end_late(refusal)

    def close(self) -> None:
        """Refuse new requests; the actors answer those that wait, and parked polls with empty pages."""
        self._closed = True
        for entry in self:
            self._close_entry(entry)

    async def drained(self) -> None:
        """Wait until every actor has ended. Call ``close`` first."""
        while self._ending:
            await next(iter(self._ending.values())).done.wait()
            await trio.lowlevel.checkpoint()


class DirectoryEntry(Supervision):
    """One open topic: its mailbox, its cache, and the supervision of its actor.

    opened ──► loaded ──► serves ──► closed: idle, handed over, or the daemon shuts down
       ▲                    │
       └──── fallen ◄───────┘ deposed by another owner: the end
    """

    def __init__(self, name: TopicName, directory: Directory, predecessor: trio.Event | None) -> None:
        super().__init__(
            Mailbox(directory.settings.mailbox_requests, directory.settings.mailbox_bytes),
            "topic",
            {"topic": str(name)},
        )
        self.name = name
        self.cache = TopicCache(directory.budget)
        self.actor = TopicActor(name, directory.environment, self.mailbox, self.cache)
        self.done = trio.Event()
        self.used_s = trio.current_time()
        self._environment = directory.environment
        self._predecessor = predecessor

    def __repr__(self) -> str:
        return f"<DirectoryEntry {self.name} waiting={len(self.mailbox)} {self.actor!r}>"

    async def run(self) -> None:
        """Keep the actor running until the mailbox is closed and empty. Never raises."""
        try:
            await self._supervise(self.actor.run, self._predecessor)
        finally:
            self.done.set()

    @property
    def _moved(self) -> Callable[[], NoOwner]:
        return partial(topic_moved, self.name)

    def _refuse(self, error: Exception) -> None:
        """Refuse requests after a second fall, since the load may take long; after the first one they wait for it."""
        if self._backoff.failures > 1:
            detail = error.detail if isinstance(error, PlainsongError) else "the topic cannot be loaded"
            hint = _DAMAGED_HINT if isinstance(error, Unreadable) else "the daemon keeps trying"
            self.mailbox.closed_for = lambda: Recovering(detail, hint=hint)
            self.mailbox.drain(lambda: StorageFailed(detail, hint=hint))

    def _report_loaded(self, load_s: float) -> None:
        self._environment.observer.loaded(self.name, load_s)

    def _report_fall(self, error: Exception) -> None:
        self._environment.observer.fell(self.name, error)

    def _report_deposed(self, error: Deposed) -> None:
        if not self.given_away:
            # Without ZooKeeper, another daemon on the same store takes over topics again and again. A single warning
            # about it is logged elsewhere.
            level = logging.DEBUG if isinstance(self._environment.ownership, Alone) else logging.WARNING
            log.log(level, "topic taken over", extra={**self._extra, "why": str(error)})
        self._environment.observer.deposed(self.name)
