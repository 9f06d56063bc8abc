"""Undecided write pointers: the topics with rows of each, waiting readers, and enlistments.

All topic actors and the transaction service share the index, on one event loop. It is built from the pointer rows of
the metadata table at the start: a topic writes such a row in the commit that first uses a pointer, so the index misses
nothing. Where a store may cut a commit off before that row, the start reads the topics for pointers that were left
behind, as their own load does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from actors.loading import load_topic
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.keys import POINTER, SYSTEM, DamagedRow, parse_pointer_key, stop_after, topic_of, topic_range
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.publish import NotEnlisted
from plainsong.protocol.topic.state import TopicLimits
from storage.base import read_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.manager import ManagerCore
    from storage.base import Row, Store

    #: ``TransactionService.enlist``, at its owner.
    AskService = Callable[[int, TopicName], Awaitable[tuple[int, ...]]]

A = TypeVar("A")
_LIST_ROWS = 500
#: Pointers whose last wake-up is remembered; for older ones a reader assumes a recent wake-up, and looks again.
REMEMBERED_WAKES = 4096


class PointerIndex:
    """Undecided write pointers and their topics."""

    def __init__(self, max_waiting: int = 10_000) -> None:
        self._topics: dict[int, set[TopicName]] = {}
        self._writing: dict[int, int] = {}
        #: Topics that may have rows about pointers that were decided since they were last asked.
        self.decided_topics: dict[TopicName, list[int]] = {}
        #: By pointer, and by topic.
        self._waiting: dict[int | TopicName, set[trio.Event]] = {}
        self._waiters = 0
        self._max_waiting = max_waiting
        self._mark = 0
        self._woken: OrderedDict[int | TopicName, int] = OrderedDict()
        self._forgotten = 0
        self._quiet = trio.Event()
        self._closed = False
        #: The service's, which sets it: its transactions that have no row yet. None: it is away, or elsewhere.
        self.begins: ManagerCore | None = None

    def __len__(self) -> int:
        return len(self._topics)

    def __repr__(self) -> str:
        return f"<PointerIndex {len(self._topics)} pointers, {self._waiters} waiting>"

    @property
    def mark(self) -> int:
        """The number of the latest wake-up; a reader takes it before it reads, and passes it to ``wait``."""
        return self._mark

    @property
    def waiters(self) -> int:
        """Polls that wait for a decision."""
        return self._waiters

    async def load(self, store: Store) -> None:
        """Read every pointer row; on a store that other instances share, each topic adds its own when it is opened.

        Raises StoreError.
        """
        if store.traits.shared:
            return
        for pointer, names in (await topics_by_pointer(store)).items():
            self._topics.setdefault(pointer, set()).update(names)
        if not store.traits.whole_commits:
            await self._load_left_behind(store)

    async def _load_left_behind(self, store: Store) -> None:
        start, stop = topic_range()
        while True:
            rows = await read_rows(store, Table.METADATA, start, stop, limit=_LIST_ROWS, values=False)
            for key, _ in rows:
                try:
                    state = await load_topic(topic_of(key)[0], store, TopicLimits())
                except DamagedRow:
                    continue  # that topic cannot be used, and its own load says so
                changed = transactional_pointers(state.changed)
                self.begin(state.name, changed)
                self.end(changed)
            if len(rows) < _LIST_ROWS:
                return
            start = rows[-1][0] + b"\x00"

    # --- topics -----------------------------------------------------------------------------------

    def begin(self, name: TopicName, pointers: Iterable[int]) -> None:
        """Note that a topic is about to write rows of these pointers."""
        for pointer in pointers:
            self._topics.setdefault(pointer, set()).add(name)
            self._writing[pointer] = self._writing.get(pointer, 0) + 1

    def end(self, pointers: Iterable[int]) -> None:
        """Note that the write has ended, however it ended."""
        for pointer in pointers:
            left = self._writing[pointer] - 1
            if left:
                self._writing[pointer] = left
            else:
                del self._writing[pointer]
        self._quiet.set()
        self._quiet = trio.Event()

    async def no_writes(self) -> None:
        """Wait until no write that ``begin`` announced is in progress."""
        while self._writing:
            await self._quiet.wait()

    def drop(self, name: TopicName, pointers: Iterable[int]) -> None:
        """Note that a topic has removed its rows about these pointers."""
        for pointer in pointers:
            topics = self._topics.get(pointer)
            if topics is not None:
                topics.discard(name)
                if not topics:
                    del self._topics[pointer]

    def leave(self, name: TopicName) -> None:
        """Drop a topic that is no longer open here: its next owner knows its pointers."""
        self.decided_topics.pop(name, None)
        self.drop(name, [pointer for pointer, names in self._topics.items() if name in names])

    def take_decided(self, name: TopicName) -> list[int]:
        """Pointers decided since the last call that the topic may have rows about."""
        return self.decided_topics.pop(name, [])

    # --- the authority ----------------------------------------------------------------------------

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """The topics that have, or are about to have, rows of any of these."""
        found: set[TopicName] = set()
        for pointer in pointers:
            found |= self._topics.get(pointer, set())
        return found

    def undecided(self) -> list[int]:
        """Every pointer that an open topic has rows of."""
        return list(self._topics)

    def watched(self) -> list[int]:
        """The undecided pointers, and those that polls wait for."""
        return [*self._topics, *(each for each in self._waiting if isinstance(each, int))]

    def oldest_by_topic(self) -> dict[TopicName, int]:
        """The oldest pointer of each topic that has any."""
        oldest: dict[TopicName, int] = {}
        for pointer, names in self._topics.items():
            for name in names:
                oldest[name] = min(pointer, oldest.get(name, pointer))
        return oldest

    def busy(self, pointers: Iterable[int]) -> bool:
        """Whether a topic is writing rows of any of these now."""
        return any(pointer in self._writing for pointer in pointers)

    async def quiet(self, pointers: Iterable[int]) -> None:
        """Wait until no topic is writing rows of these."""
        wanted = tuple(pointers)
        while self.busy(wanted):
            await self._quiet.wait()

    def decided(self, pointers: Iterable[int]) -> None:
        """Note that these are committed or aborted, durably: topics may forget them, and waiting polls go on."""
        for pointer in pointers:
            for name in self._topics.pop(pointer, ()):
                self.decided_topics.setdefault(name, []).append(pointer)
            self.wake(pointer)

    # --- polls that an undecided pointer blocks ---------------------------------------------------

    def wake(self, what: int | TopicName) -> None:
        """Have the polls look again that wait at this pointer, or in this topic.

        A pointer was decided, became invalid, or was rolled back. A topic was changed, deleted, created or restored,
        lost rows, or is no longer open here.
        """
        self._mark += 1
        self._woken[what] = self._mark
        self._woken.move_to_end(what)
        if len(self._woken) > REMEMBERED_WAKES:
            self._forgotten = self._woken.popitem(last=False)[1]
        for event in self._waiting.get(what, ()):
            event.set()

    def wake_all(self) -> None:
        """Have all waiting polls look again."""
        self._mark += 1
        self._woken.clear()
        self._forgotten = self._mark
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, pointer: int, since: int | None = None, name: TopicName | None = None) -> None:
        """Wait until ``pointer`` is woken; the caller looks again, and may find it still undecided.

        Args:
          since: the ``mark`` from before the caller read that the pointer is undecided: no later wake-up is missed.
          name: the topic that the caller reads; its wake-ups count too.
        Raises:
          Overloaded: too many polls wait already.
        """
        keys: tuple[int | TopicName, ...] = (pointer,) if name is None else (pointer, name)
        woken = max(self._woken.get(each, 0) for each in keys)
        if self._closed or (since is not None and max(woken, self._forgotten) > since):
            await trio.lowlevel.checkpoint()
            return
        if self._waiters >= self._max_waiting:
            raise Overloaded(f"{self._waiters} polls wait for transactions to be decided")
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
        """Polls of this instance that wait at a pointer, or in a topic."""
        return len(self._waiting.get(what, ()))

    def close(self) -> None:
        """Let all polls go on, now and later: the daemon shuts down."""
        self._closed = True
        self.wake_all()


# --- pointer locations: where undecided transactions have rows, over the topics of all instances ---
#
# Topics are enlisted before they write, and the service keeps the enlistments. Rows from before topics were enlisted,
# when this was another kind of store or had a single instance, are found by the topics' own rows about pointers, which
# every new owner of the service reads once.


class PointerLocations(Protocol):
    """The topics that have, or are about to have, rows of a pointer; ``PointerIndex`` knows those of its own topics."""

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """The topics that have, or may have, rows of any of these."""
        ...

    def oldest_by_topic(self) -> Mapping[TopicName, int]:
        """The oldest pointer of each topic that has any."""
        ...


async def topics_by_pointer(store: Store) -> dict[int, set[TopicName]]:
    """The topics with rows about each transaction's pointer. Raises StoreError."""
    found: dict[int, set[TopicName]] = {}

    def take(rows: Sequence[Row]) -> bool:
        for key, _ in rows:
            try:
                name, _, pointer = parse_pointer_key(key)
            except DamagedRow:
                continue  # the topic's own load says so
            if pointer > 0:  # below 0 it is a producer's staging, and belongs to no transaction
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
        """Begin with the service's enlistments, and the rows about its undecided pointers. Raises StoreError."""
        found = await topics_by_pointer(store)
        self._core = core
        self._found = {each: names for each, names in found.items() if core.is_unsettled(each)}

    async def find(self, store: Store) -> None:
        """Read all rows about pointers. Raises StoreError."""
        self._found = await topics_by_pointer(store)

    def dropped(self, pointers: Iterable[int]) -> None:
        """Drop pointers that are decided, or off the invalid list: their rows need not be found any more."""
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
# The topics of this instance, enlisted with the transaction service, each as long as this instance owns it.
#
#     term      one owner of one topic, from its claim to its end; the next term begins without enlistments
#     enlist    a request to the service within a term; the answer counts for that term alone, and only if the topic has
#               not closed the pointer meanwhile
#     close     the service asks for it before it decides: the topic drops the pointer, and no answer under way counts
#
# Once a topic has answered a close, one of two is certain: this owner is still in its term, and writes nothing more
# under the pointer; or another instance has claimed the topic, and its term has no such enlistment.


#: Pointers that a topic is enlisted for at most; beyond, the least recently used one must be enlisted again.
MAX_ENLISTMENTS = 65_536
#: How often a request is tried whose pointer is closed again between its enlistment and its turn.
ENLIST_ATTEMPTS = 5


class Term:
    """Implements ``plainsong.protocol.topic.state.Enlistment`` for one owner of one topic."""

    def __init__(self, max_pointers: int = MAX_ENLISTMENTS) -> None:
        self._max_pointers = max_pointers
        #: With the pointers of the same transaction.
        self._pointers: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._requests: dict[int, set[object]] = {}

    def __len__(self) -> int:
        return len(self._pointers)

    def holds(self, pointer: int) -> bool:
        """Whether the topic may write under a pointer."""
        if pointer not in self._pointers:
            return False
        self._pointers.move_to_end(pointer)
        return True

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """The pointers that the transaction of an enlisted pointer had at the enlistment."""
        return self._pointers.get(pointer, (pointer,))

    def close(self, pointers: Iterable[int]) -> None:
        """Withdraw enlistments; answers that are under way do not count."""
        for pointer in pointers:
            self._pointers.pop(pointer, None)
            self._requests.pop(pointer, None)

    async def enlist(self, pointer: int, name: TopicName, ask: AskService) -> None:
        """Enlist the topic, unless the pointer is closed meanwhile. Raises what ``ask`` does."""
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
        """Begin a term: the topic has just been claimed, and earlier enlistments are void."""
        term = self._terms[name] = Term()
        return term

    def end(self, name: TopicName, term: Term) -> None:
        """End a term."""
        if self._terms.get(name) is term:
            del self._terms[name]

    def is_open(self, name: TopicName) -> bool:
        """Whether a topic is open here, so that it can be enlisted."""
        return name in self._terms

    def is_enlisted(self, name: TopicName, pointer: int) -> bool:
        """Whether a topic is open here and enlisted for a pointer."""
        term = self._terms.get(name)
        return term is not None and term.holds(pointer)

    async def enlist(self, name: TopicName, pointer: int) -> None:
        """Enlist an open topic for a pointer, unless it is; a topic that is not open refuses the write itself.

        Raises:
          TransactionNotInProgress, TransactionsUnavailable, Overloaded: nothing happened.
        """
        term = self._terms.get(name)
        if term is not None and not term.holds(pointer):
            await term.enlist(pointer, name, self._ask)

    async def enlisted(self, name: TopicName, pointer: int, ask: Callable[[], Awaitable[A]]) -> A:
        """The topic's answer to ``ask``, once it is enlisted for the pointer. Raises as ``enlist`` and ``ask`` do."""
        for _ in range(ENLIST_ATTEMPTS - 1):
            await self.enlist(name, pointer)
            try:
                return await ask()
            except NotEnlisted:
                continue  # the topic was not open yet, its pointer was closed, or its owner changed: nothing happened
        await self.enlist(name, pointer)
        return await ask()
