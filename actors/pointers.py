"""Undecided write pointers: which topics have rows of each, which readers wait for it, and enlistments.

All topic actors and the transaction service share the index, on one event loop. At startup it is built from the
pointer rows of the metadata table: a topic writes such a row in the commit that first uses a pointer, so the index is
complete. If a crash of the store may leave a commit without that row, the topics are loaded too, which finds such
pointers.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from actors.loading import load_topic
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.keys import POINTER, SYSTEM, DamagedRow, parse_pointer_key, stop_after, topic_of, topic_range
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.publish import NotEnlisted
from plainsong.protocol.topic.state import TopicLimits
from storage.base import pages_of_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.manager import ManagerCore
    from storage.base import Row, Store

    #: ``TransactionService.enlist``, at its owner.
    AskService = Callable[[int, TopicName], Awaitable[tuple[int, ...]]]

A = TypeVar("A")
#: Pointers whose last wake-up is remembered; for others a reader assumes a recent wake-up, and checks again.
REMEMBERED_WAKES = 4096


class PointerIndex:
    """Undecided write pointers and their topics."""

    def __init__(self, max_waiting: int = 10_000) -> None:
        self._topics: dict[int, set[TopicName]] = {}
        self._writing: dict[int, int] = {}
        #: By topic: pointers that it may have rows about, and that were decided since its last ``take_decided``.
        self.decided_topics: dict[TopicName, list[int]] = {}
        #: Waiting polls, by pointer and by topic.
        self._waiting: dict[int | TopicName, set[trio.Event]] = {}
        self._waiters = 0
        self._max_waiting = max_waiting
        self._mark = 0
        self._woken: OrderedDict[int | TopicName, int] = OrderedDict()
        self._forgotten = 0
        #: Tasks that wait for writes to end.
        self._quiet = trio.lowlevel.ParkingLot()
        self._closed = False
        #: Set by the service: its core, for transactions without a row yet. None if it is down, or on another instance.
        self.begins: ManagerCore | None = None

    def __len__(self) -> int:
        return len(self._topics)

    def __repr__(self) -> str:
        return f"<PointerIndex {len(self._topics)} pointers, {self._waiters} waiting>"

    @property
    def mark(self) -> int:
        """The number of the latest wake-up; a reader takes it before reading, and passes it to ``wait``."""
        return self._mark

    @property
    def waiters(self) -> int:
        """Polls that wait for a decision."""
        return self._waiters

    async def load(self, store: Store) -> None:
        """Read every pointer row; on a shared store each topic adds its own pointers when it is opened.

        Raises StoreError.
        """
        if store.traits.shared:
            return
        for pointer, names in (await topics_by_pointer(store)).items():
            self._topics.setdefault(pointer, set()).update(names)
        if not store.traits.whole_commits:
            await self._load_left_behind(store)

    async def _load_left_behind(self, store: Store) -> None:
        async with aclosing(pages_of_rows(store, Table.METADATA, *topic_range(), values=False)) as pages:
            async for rows in pages:
                for key, _ in rows:
                    try:
                        state = await load_topic(topic_of(key)[0], store, TopicLimits())
                    except DamagedRow:
                        continue  # the topic is unusable; its own load reports it
                    changed = transactional_pointers(state.changed)
                    self.begin(state.name, changed)
                    self.end(changed)

    # --- topics -----------------------------------------------------------------------------------

    def begin(self, name: TopicName, pointers: Iterable[int]) -> None:
        """Record that a topic is about to write rows under these pointers."""
        for pointer in pointers:
            self._topics.setdefault(pointer, set()).add(name)
            self._writing[pointer] = self._writing.get(pointer, 0) + 1

    def end(self, pointers: Iterable[int]) -> None:
        """Record that the write has ended, successfully or not."""
        for pointer in pointers:
            left = self._writing[pointer] - 1
            if left:
                self._writing[pointer] = left
            else:
                del self._writing[pointer]
        self._quiet.unpark_all()

    async def no_writes(self) -> None:
        """Wait until no topic is writing rows under any pointer."""
        while self._writing:
            await self._quiet.park()

    def drop(self, name: TopicName, pointers: Iterable[int]) -> None:
        """Record that a topic no longer has rows about these pointers."""
        for pointer in pointers:
            topics = self._topics.get(pointer)
            if topics is not None:
                topics.discard(name)
                if not topics:
                    del self._topics[pointer]

    def leave(self, name: TopicName) -> None:
        """Drop a topic that is no longer open here; its next owner tracks its pointers."""
        self.decided_topics.pop(name, None)
        self.drop(name, [pointer for pointer, names in self._topics.items() if name in names])

    def take_decided(self, name: TopicName) -> list[int]:
        """Return the pointers that the topic may have rows about and that were decided since the last call."""
        return self.decided_topics.pop(name, [])

    # --- the authority ----------------------------------------------------------------------------

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """Return the topics that have, or are about to have, rows under any of these."""
        found: set[TopicName] = set()
        for pointer in pointers:
            found |= self._topics.get(pointer, set())
        return found

    def undecided(self) -> list[int]:
        """Return every undecided pointer that has rows."""
        return list(self._topics)

    def watched(self) -> list[int]:
        """Return the undecided pointers, and those that polls wait for."""
        return [*self._topics, *(each for each in self._waiting if isinstance(each, int))]

    def oldest_by_topic(self) -> dict[TopicName, int]:
        """Return the oldest pointer of each topic that has any."""
        oldest: dict[TopicName, int] = {}
        for pointer, names in self._topics.items():
            for name in names:
                oldest[name] = min(pointer, oldest.get(name, pointer))
        return oldest

    def busy(self, pointers: Iterable[int]) -> bool:
        """Return True if a topic is writing rows under any of these."""
        return any(pointer in self._writing for pointer in pointers)

    async def quiet(self, pointers: Iterable[int]) -> None:
        """Wait until no topic is writing rows under these."""
        wanted = tuple(pointers)
        while self.busy(wanted):
            await self._quiet.park()

    def decided(self, pointers: Iterable[int]) -> None:
        """Record that these are durably committed or aborted: topics may forget them, and waiting polls continue."""
        for pointer in pointers:
            for name in self._topics.pop(pointer, ()):
                self.decided_topics.setdefault(name, []).append(pointer)
            self.wake(pointer)

    # --- polls that an undecided pointer blocks ---------------------------------------------------

    def wake(self, what: int | TopicName) -> None:
        """Wake the polls that wait for a pointer, or the polls of a topic that wait for any pointer.

        Call it when a pointer is decided, invalid or rolled back, and when a topic is changed, deleted, created or
        restored, loses rows, or is closed here.
        """
        self._mark += 1
        self._woken[what] = self._mark
        self._woken.move_to_end(what)
        if len(self._woken) > REMEMBERED_WAKES:
            self._forgotten = self._woken.popitem(last=False)[1]
        for event in self._waiting.get(what, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake all waiting polls."""
        self._mark += 1
        self._woken.clear()
        self._forgotten = self._mark
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, pointer: int, since: int | None = None, name: TopicName | None = None) -> None:
        """Wait for the next ``wake(pointer)``; the caller must check again, as the pointer may still be undecided.

        Args:
          since: the ``mark`` from before the caller read the pointer's state, so that no later wake-up is missed.
          name: the topic that the caller reads; ``wake(name)`` ends the wait too.
        Raises:
          Overloaded: too many polls wait already.
        """
        keys: tuple[int | TopicName, ...] = (pointer,) if name is None else (pointer, name)
        woken = max(self._woken.get(each, 0) for each in keys)
        if self._closed or (since is not None and max(woken, self._forgotten) > since):
            await trio.lowlevel.checkpoint()
            return
        if self._waiters >= self._max_waiting:
            raise Overloaded(f"too many polls wait for transactions to be decided: {self._waiters}")
        event = trio.Event()
        for each in keys:
            self._waiting.setdefault(each, set()).add(event)
        self._waiters += 1
        try:
            await event.wait()
        finally:
            self._waiters -= 1
            for each in keys:
                events = self._waiting[each]
                events.discard(event)
                if not events:
                    del self._waiting[each]

    def waiting(self, what: int | TopicName) -> int:
        """Return the number of polls of this instance that wait for a pointer, or for any pointer in a topic."""
        return len(self._waiting.get(what, ()))

    def close(self) -> None:
        """Wake all polls, and let later ones no longer wait; for the shutdown."""
        self._closed = True
        self.wake_all()


# --- pointer locations: where undecided transactions have rows, in the topics of all instances -----
#
# Topics are enlisted before they write, and the service stores the enlistments. Older rows, from a time without
# enlistments (another kind of store, or a single instance), are found through the topics' own rows about pointers,
# which every new owner of the service reads once.


class PointerLocations(Protocol):
    """The topics that have, or are about to have, rows under a pointer; ``PointerIndex`` has those of this instance."""

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """Return the topics that have, or may have, rows under any of these."""
        ...

    def oldest_by_topic(self) -> Mapping[TopicName, int]:
        """Return the oldest pointer of each topic that has any."""
        ...


async def topics_by_pointer(store: Store) -> dict[int, set[TopicName]]:
    """Return the topics with rows about each transaction's pointer. Raises StoreError."""
    found: dict[int, set[TopicName]] = {}

    def take(rows: Sequence[Row]) -> bool:
        for key, _ in rows:
            try:
                name, _, pointer = parse_pointer_key(key)
            except DamagedRow:
                continue  # the topic's own load reports it
            if pointer > 0:  # a negative pointer is a producer's staging, without a transaction
                found.setdefault(pointer, set()).add(name)
        return True

    await store.scan(Table.METADATA, SYSTEM + POINTER, stop_after(SYSTEM + POINTER), take, values=False)
    return found


class ClusterPointerLocations:
    """Implements ``PointerLocations`` from the service's enlistments and the topics' rows about pointers."""

    def __init__(self) -> None:
        self._found: dict[int, set[TopicName]] = {}
        self._core: ManagerCore | None = None

    def __len__(self) -> int:
        return len(self._found)

    async def load(self, store: Store, core: ManagerCore) -> None:
        """Use the service's enlistments, and read the rows about its undecided pointers. Raises StoreError."""
        found = await topics_by_pointer(store)
        self._core = core
        self._found = {each: names for each, names in found.items() if core.is_unsettled(each)}

    async def find(self, store: Store) -> None:
        """Read all rows about pointers. Raises StoreError."""
        self._found = await topics_by_pointer(store)

    def dropped(self, pointers: Iterable[int]) -> None:
        """Drop pointers that are decided, or no longer on the invalid list."""
        for pointer in pointers:
            self._found.pop(pointer, None)

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """See ``PointerLocations.topics_of``."""
        found: set[TopicName] = set()
        for pointer in pointers:
            found |= self._found.get(pointer, set())
            if self._core is not None:
                found |= self._core.enlisted(pointer)
        return found

    def oldest_by_topic(self) -> dict[TopicName, int]:
        """See ``PointerLocations.oldest_by_topic``."""
        oldest: dict[TopicName, int] = {}
        for pointer in sorted({*self._found, *(() if self._core is None else self._core.unsettled())}):
            for name in self.topics_of((pointer,)):
                oldest.setdefault(name, pointer)
        return oldest


# --- enlistments -----------------------------------------------------------------------------------
#
# Topics of this instance are enlisted with the transaction service, each for as long as this instance owns it.
#
#     term      the time from a claim of a topic to its end; the next term begins without enlistments
#     enlist    a request to the service within a term; the answer is valid only for that term, and only if the topic
#               has not closed the pointer since the request
#     close     requested by the service before it decides: the topic drops the pointer, and ignores answers in flight
#
# Once a topic has answered a close, either this owner is still in its term, and writes nothing more under the pointer;
# or another instance has claimed the topic, and its term has no such enlistment.


#: Maximum number of pointers that a topic is enlisted for; beyond it, the least recently used are dropped.
MAX_ENLISTMENTS = 65_536
#: Attempts at a request whose pointer is closed again after its enlistment, before the topic handles the request.
ENLIST_ATTEMPTS = 5


class Term:
    """Implements ``plainsong.protocol.topic.state.Enlistment`` for one owner of one topic."""

    def __init__(self, max_pointers: int = MAX_ENLISTMENTS) -> None:
        self._max_pointers = max_pointers
        #: Enlisted pointers, each with all pointers of its transaction.
        self._pointers: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._requests: dict[int, set[object]] = {}

    def __len__(self) -> int:
        return len(self._pointers)

    def holds(self, pointer: int) -> bool:
        """Return True if the topic may write under a pointer."""
        if pointer not in self._pointers:
            return False
        self._pointers.move_to_end(pointer)
        return True

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return the pointers that the transaction of an enlisted pointer had at the enlistment."""
        return self._pointers.get(pointer, (pointer,))

    def close(self, pointers: Iterable[int]) -> None:
        """Withdraw enlistments; answers in flight are ignored."""
        for pointer in pointers:
            self._pointers.pop(pointer, None)
            self._requests.pop(pointer, None)

    async def enlist(self, pointer: int, name: TopicName, ask: AskService) -> None:
        """Enlist the topic; without effect if the pointer is closed before the answer. Raises what ``ask`` raises."""
        request = object()
        self._requests.setdefault(pointer, set()).add(request)
        try:
            pointers = await ask(pointer, name)
            if request in self._requests.get(pointer, ()):
                self._pointers[pointer] = pointers
                if len(self._pointers) > self._max_pointers:
                    self._pointers.popitem(last=False)
        finally:
            requests = self._requests.get(pointer)
            if requests is not None:
                requests.discard(request)
                if not requests:
                    del self._requests[pointer]


class Enlistments:
    """The terms of all open topics."""

    def __init__(self, ask: AskService) -> None:
        self._ask = ask
        self._terms: dict[TopicName, Term] = {}

    def __len__(self) -> int:
        return sum(map(len, self._terms.values()))

    def begin(self, name: TopicName) -> Term:
        """Begin a term for a topic that has just been claimed; earlier enlistments are void."""
        term = self._terms[name] = Term()
        return term

    def end(self, name: TopicName, term: Term) -> None:
        """End a term."""
        if self._terms.get(name) is term:
            del self._terms[name]

    def is_open(self, name: TopicName) -> bool:
        """Return True if a topic is open here, so that it can be enlisted."""
        return name in self._terms

    def is_enlisted(self, name: TopicName, pointer: int) -> bool:
        """Return True if a topic is open here and enlisted for a pointer."""
        term = self._terms.get(name)
        return term is not None and term.holds(pointer)

    async def enlist(self, name: TopicName, pointer: int) -> None:
        """Enlist an open topic for a pointer, if necessary; a topic that is not open is skipped, and refuses the write.

        Raises:
          TransactionNotInProgress, TransactionsUnavailable, Overloaded: nothing happened.
        """
        term = self._terms.get(name)
        if term is not None and not term.holds(pointer):
            await term.enlist(pointer, name, self._ask)

    async def enlisted(self, name: TopicName, pointer: int, ask: Callable[[], Awaitable[A]]) -> A:
        """Enlist the topic for the pointer, and return the result of ``ask``. Raises what either of them raises."""
        for _ in range(ENLIST_ATTEMPTS - 1):
            await self.enlist(name, pointer)
            try:
                return await ask()
            except NotEnlisted:
                continue  # nothing happened: the topic was not open yet, its pointer was closed, or its owner changed
        await self.enlist(name, pointer)
        return await ask()
