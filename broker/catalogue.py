"""Figures of all topics of the service, without opening any of them, for lists that are sorted and paged.

Figures of open topics come from memory; those of the others from the metadata table: properties, high-water marks and
undecided pointers. The table is read at most once a second, less often with many topics, and decoded rows are cached by
their bytes. Other instances are then asked for the figures of the topics open there.

A read is a task of the daemon, shared by all callers, including those that arrive while it runs. On a remote store it
may take longer than any caller waits. If a caller owned the read, its time-out would cancel it and the next caller
would start over, forever. If each caller needed a read that begins after its request, a caller that retries after a
time-out would always miss the result. Joining a running read is safe: a topic created since its row was read is open,
here or at its owner, which is asked after the rows.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from contextvars import copy_context
from itertools import islice
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError, ShuttingDown, TransactionsUnavailable
from plainsong.protocol.keys import (
    HIGH_WATER,
    POINTER,
    SYSTEM,
    DamagedRow,
    namespace_range,
    parse_pointer_key,
    parse_system_key,
    stop_after,
    system_key,
    topic_of,
    topic_range,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.usage import Usage
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from actors.directory import Directory
    from actors.observe import Clock
    from actors.ownership import Ownership
    from broker.authority import Transactions
    from broker.link.client import Links
    from broker.link.server import Call
    from broker.metrics import Rates
    from plainsong.protocol.answers.topics import DeletedTopic, TopicRow
    from plainsong.protocol.topic.core import TopicCore
    from storage.base import Row, Store

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Time for which rows of closed topics, and figures of other instances, are reused.
FRESH_S = 1.0
#: Added to that for each topic, so that rereading a hundred thousand topics does not occupy a core; and the maximum.
FRESH_S_EACH = 0.0002
MAX_FRESH_S = 10.0
#: Time limit for answers of other instances.
ASK_TIMEOUT_S = 1.0
#: The call that returns the figures of an instance's open topics.
FIGURES = "topic_figures"
#: Open topics handled in one turn of the event loop.
MANY = 100
#: A thread that reads rows alternately works and sleeps for these times. Without the sleeps the event loop would wait 5
#: ms for the interpreter lock, after each of its system calls.
WORK_S = 0.0005
NAP_S = 0.0001
#: Maximum number of decoded rows that are cached.
MAX_KEPT = 200_000


class Figures(NamedTuple):
    """The figures of one topic in a list."""

    messages: int
    bytes: int
    estimated: bool
    """True if a part of a slice has expired, so that messages and bytes are slightly too high."""
    oldest_ms: int
    """Publish time of the oldest message, to within a slice; 0 if there is none."""
    ttl_s: int
    open_transactions: int = 0
    hidden_messages: int = 0
    parked_polls: int = 0
    publish_per_s: float = 0.0
    poll_per_s: float = 0.0

    def shown(self, name: TopicName, owner: str | None, now_ms: int) -> TopicRow:
        """Return the topic as the API shows it."""
        return {
            "namespace": name.namespace,
            "name": name.topic,
            "messages": self.messages,
            "bytes": self.bytes,
            "estimated": self.estimated,
            "oldestAgeMs": max(0, now_ms - self.oldest_ms) if self.oldest_ms else None,
            "publishPerSecond": round(self.publish_per_s, 3),
            "pollPerSecond": round(self.poll_per_s, 3),
            "openTransactions": self.open_transactions,
            "hiddenMessages": self.hidden_messages,
            "parkedPolls": self.parked_polls,
            "ttl": self.ttl_s,
            "owner": owner,
        }


class _Mark(NamedTuple):
    """A decoded high-water mark."""

    usage: Usage
    time_ms: int
    appended: int

    @classmethod
    def decode(cls, value: bytes) -> _Mark:
        mark = HighWater.decode(value)
        return cls(Usage(mark.buckets), mark.time_ms, mark.appended)


_NO_MARK = _Mark(Usage(), 0, 0)


class _Reading:
    """A running read of all topics."""

    def __init__(self) -> None:
        self.over = trio.Event()
        #: The failure; None after a success. Initially the error for callers when the daemon shuts down during the read.
        self.error: Exception | None = ShuttingDown("the daemon is shutting down")


class Catalogue:
    """All topics of the service.

    Args:
      nursery: runs the reads; it outlives all callers.
      ownership: None if there is only this instance.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        directory: Directory,
        store: Store,
        clock: Clock,
        transactions: Transactions,
        rates: Rates,
        ownership: Ownership | None,
        links: Links | None,
    ) -> None:
        self._nursery = nursery
        self._directory = directory
        self._store = store
        self._clock = clock
        self._transactions = transactions
        self._rates = rates
        self._ownership = ownership
        self._links = links
        self._stored: dict[TopicName, Figures] = {}
        self._decoded: dict[bytes, Any] = {}
        self._read_s = float("-inf")
        self._elsewhere: dict[TopicName, Figures] = {}
        self._reading: _Reading | None = None
        #: A read belongs to no request, so it runs in a context that was copied before any request.
        self._context = copy_context()

    async def has(self, name: TopicName) -> bool:
        """True if the topic existed when the rows were last read. Raises StoreError, ShuttingDown."""
        await self._be_fresh()
        return name in self._stored

    async def _be_fresh(self) -> None:
        if trio.current_time() - self._read_s < self.fresh_s:
            return
        reading = self._reading
        if reading is None:
            reading = _Reading()
            self._context.run(self._nursery.start_soon, self._read, reading)
            self._reading = reading
        await reading.over.wait()
        if reading.error is not None:
            raise reading.error.with_traceback(None)

    @property
    def fresh_s(self) -> float:
        """The time for which a read is reused: longer with more topics."""
        return min(MAX_FRESH_S, FRESH_S + FRESH_S_EACH * max(len(self._stored), len(self._elsewhere)))

    async def figures(self) -> dict[TopicName, Figures]:
        """Return the figures of every existing topic. Raises StoreError, ShuttingDown."""
        await self._be_fresh()
        # Each read makes new dictionaries, and publishes them when complete: no other task changes these.
        stored, elsewhere = self._stored, self._elsewhere
        here = await self._open_here()
        found: dict[TopicName, Figures] = {}
        async for piece in in_pieces(stored.items()):
            found.update(piece)
        async for opened in in_pieces(here.items()):
            for name, figures in opened:
                if figures is None:
                    found.pop(name, None)
                else:
                    found[name] = figures
        async for piece in in_pieces(elsewhere.items()):
            found.update(piece)
        return found

    async def figures_of(self, names: Sequence[TopicName]) -> dict[TopicName, Figures]:
        """Return figures of existing topics; reads no rows if all are open here. Raises StoreError, ShuttingDown."""
        now_ms = self._clock.now_ms()
        found: dict[TopicName, Figures] = {}
        others = []
        for name in names:
            core = self._core_here(name)
            if core is None:
                others.append(name)
            elif (here := self._figures_here(name, core, now_ms)) is not None:
                found[name] = here
        if others:
            await self._be_fresh()
            for name in others:
                known = self._elsewhere.get(name) or self._stored.get(name)
                if known is not None:
                    found[name] = known
        return found

    def _core_here(self, name: TopicName) -> TopicCore | None:
        """Return the core of a topic, even a deleted one, that is open here and owned by this instance, or None."""
        if self._ownership is not None and not self._ownership.is_mine(name):
            return None
        core = self._directory.core(name)
        return None if core is None or core.state.metadata is None else core

    def _figures_here(self, name: TopicName, core: TopicCore, now_ms: int) -> Figures | None:
        """Return the topic's figures; None if it was deleted."""
        metadata = core.state.metadata
        return None if metadata is None or metadata.deleted_ms is not None else self._open(name, core, now_ms)

    def now_ms(self) -> int:
        """Return the time from which ages are computed."""
        return self._clock.now_ms()

    def owner(self, name: TopicName) -> str | None:
        """Return the address of the topic's owner; None if there is only this instance, or currently no owner."""
        owner = None if self._ownership is None else self._ownership.owner(name)
        return None if owner is None else owner.address

    async def _open_here(self) -> dict[TopicName, Figures | None]:
        """Return the figures of topics that are open here and owned by this instance; None for deleted ones."""
        found: dict[TopicName, Figures | None] = {}
        now_ms = self._clock.now_ms()
        async for piece in in_pieces(self._directory):
            for entry in piece:
                core = entry.actor.core
                if core is None or core.state.metadata is None:
                    continue
                if self._ownership is not None and not self._ownership.is_mine(entry.name):
                    continue
                found[entry.name] = self._figures_here(entry.name, core, now_ms)
        return found

    def _open(self, name: TopicName, core: TopicCore, now_ms: int) -> Figures:
        state, now_s = core.state, trio.current_time()
        known = _counted(
            state.usage,
            state.living(),
            max(now_ms, state.time_ms),
            len(core.parking),
            self._rates.publishing.per_second(name, now_s),
            self._rates.polling.per_second(name, now_s),
        )
        return self._with_undecided(known, state.pending.values(), state.appended) if state.pending else known

    def _with_undecided(self, known: Figures, pointers: Iterable[Pending], appended: int) -> Figures:
        """Add the number of undecided transactions, and the messages from the first undecided one on."""
        opened = [each for each in pointers if each.pointer > 0 and not (each.decided or each.rolled_back)]
        holders = [each for each in opened if each.runs and not self._is_over(each.pointer)]
        hidden = max((each.hidden(appended) for each in holders), default=0)
        return known._replace(open_transactions=len(opened), hidden_messages=min(hidden, known.messages))

    def _is_over(self, pointer: int) -> bool:
        try:
            return self._transactions.standing(pointer) in ("committed", "aborted", "invalid")
        except TransactionsUnavailable:
            return False

    # --- closed topics, from the metadata table ---------------------------------------------------

    async def _read(self, reading: _Reading) -> None:
        """Read for all waiting callers, and finish even if they have left. Raises nothing but cancellation."""
        try:
            await self._read_rows()
            await self._ask_others()
            self._read_s, reading.error = trio.current_time(), None
        except Exception as error:  # raised again in each waiting caller
            reading.error = error
            if not reading.over.statistics().tasks_waiting:
                log.warning("topics not read, and no request waits for them any more", exc_info=error)
        finally:
            self._reading = None
            reading.over.set()

    async def _read_rows(self) -> None:
        before, decoded = self._decoded, dict[bytes, Any]()
        living: dict[TopicName, Metadata] = {}
        marks: dict[TopicName, _Mark] = {}
        pointers: dict[TopicName, list[Pending]] = {}

        def decode(value: bytes, how: Callable[[bytes], Any]) -> Any:
            found = before.get(value)
            if found is None:
                found = how(value)
            if len(decoded) < MAX_KEPT:
                decoded[value] = found
            return found

        def take_metadata(rows: Sequence[Row]) -> bool:
            for key, value in _with_naps(rows):
                try:
                    metadata: Metadata = decode(value, Metadata.decode)
                    if metadata.deleted_ms is None:
                        living[topic_of(key)[0]] = metadata
                except DamagedRow:
                    continue  # a request for the topic reports the damage
            return True

        def take_marks(rows: Sequence[Row]) -> bool:
            for key, value in _with_naps(rows):
                try:
                    parsed = parse_system_key(key)
                    metadata = living.get(parsed.name)
                    if metadata is not None and metadata.generation == parsed.generation:
                        marks[parsed.name] = decode(value, _Mark.decode)
                except DamagedRow:
                    continue
            return True

        def take_pointers(rows: Sequence[Row]) -> bool:
            for key, value in _with_naps(rows):
                try:
                    name, generation, pointer = parse_pointer_key(key)
                    if pointer > 0 and name in living and living[name].generation == generation:
                        pointers.setdefault(name, []).append(Pending.decode(pointer, value))
                except DamagedRow:
                    continue
            return True

        scan = self._store.scan
        await scan(Table.METADATA, *topic_range(), take_metadata, first_chunk=1000)
        for kind, take in ((HIGH_WATER, take_marks), (POINTER, take_pointers)):
            await scan(Table.METADATA, SYSTEM + kind, stop_after(SYSTEM + kind), take, first_chunk=1000)
        now_ms = self._clock.now_ms()
        stored: dict[TopicName, Figures] = {}
        async for piece in in_pieces(living.items()):
            for name, metadata in piece:
                mark = marks.get(name, _NO_MARK)
                stored[name] = _counted(mark.usage, metadata, max(now_ms, mark.time_ms))
        for name, some in pointers.items():
            stored[name] = self._with_undecided(stored[name], some, marks.get(name, _NO_MARK).appended)
        self._decoded, self._stored = decoded, stored

    # --- deleted topics ---------------------------------------------------------------------------

    async def deleted(self, namespace: str | None, grace_ms: int) -> list[tuple[TopicName, Metadata]]:
        """Return deleted topics of one or all namespaces, sorted. Cleaned ones are included for twice the grace period.

        Raises StoreError.
        """
        found: dict[TopicName, Metadata] = {}
        now_ms = self._clock.now_ms()

        def take(rows: Sequence[Row]) -> bool:
            for key, value in rows:
                try:
                    metadata = Metadata.decode(value)
                except DamagedRow:
                    continue
                gone_ms = metadata.deleted_ms
                if gone_ms is not None and not (metadata.partly_cleaned and now_ms > gone_ms + 2 * grace_ms):
                    found[topic_of(key)[0]] = metadata
            return True

        span = topic_range() if namespace is None else namespace_range(namespace)
        await self._store.scan(Table.METADATA, *span, take, first_chunk=1000)
        return sorted(found.items())

    async def shown_deleted(self, name: TopicName, metadata: Metadata, grace_ms: int) -> DeletedTopic:
        """Return a deleted topic and its contents as the API shows it. Raises StoreError."""
        row = await self._store.get(Table.METADATA, system_key(HIGH_WATER, name, metadata.generation))
        mark = _NO_MARK if row is None else _Mark.decode(row)
        held = _counted(mark.usage, metadata, max(self._clock.now_ms(), mark.time_ms))
        deleted_ms = metadata.deleted_ms or 0
        return {
            "name": name.topic,
            "generation": metadata.generation,
            "deletedMs": deleted_ms,
            "undeleteUntilMs": deleted_ms + grace_ms,
            "state": "partly-cleaned" if metadata.partly_cleaned else "kept",
            "messages": held.messages,
            "bytes": held.bytes,
        }

    async def count_created_by(self, name: str) -> int:
        """Return how many existing topics a name created or undeleted, in the whole store. Raises StoreError."""
        found, marker = 0, name.encode()

        def take(rows: Sequence[Row]) -> bool:
            nonlocal found
            for _, value in rows:
                if marker in value:  # most rows need no decoding
                    with suppress(DamagedRow):
                        metadata = Metadata.decode(value)
                        found += metadata.creator == name and metadata.deleted_ms is None
            return True

        await self._store.scan(Table.METADATA, *topic_range(), take, first_chunk=1000)
        return found

    # --- topics of other instances ----------------------------------------------------------------

    async def _ask_others(self) -> None:
        ownership, links = self._ownership, self._links
        found: dict[TopicName, Figures] = {}

        async def ask(address: str) -> None:
            assert links is not None
            try:
                with trio.move_on_after(ASK_TIMEOUT_S):
                    link = await links.to(address)
                    for namespace, topic, *figures in (await link.call(FIGURES, None)).value:
                        found[TopicName(namespace, topic)] = Figures(*figures)
            except (LinkBroken, PlainsongError) as error:
                log.debug("statistics of topics not known", extra={"instance": address}, exc_info=error)

        if ownership is not None and links is not None:
            async with trio.open_nursery() as nursery:
                for instance in ownership.instances:
                    if instance.name != ownership.me.name:
                        nursery.start_soon(ask, instance.address)
        self._elsewhere = found

    async def figures_handler(self, call: Call) -> Reply:
        """Answer another instance's call for figures."""
        del call
        here = await self._open_here()
        return Reply([[*name, *figures] for name, figures in here.items() if figures is not None])


def _with_naps(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield ``rows`` in a thread of the store, with short sleeps that give the event loop the interpreter lock.

    Cached rows take time too, if there are many.
    """
    until_s = thread_time() + WORK_S
    for row in rows:
        yield row
        if thread_time() >= until_s:
            nap(NAP_S)
            until_s = thread_time() + WORK_S


async def in_pieces(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield ``items`` in lists of ``MANY``, with a checkpoint between every two lists."""
    rest = iter(items)
    piece = list(islice(rest, MANY))
    while piece:
        yield piece
        piece = list(islice(rest, MANY))
        if piece:
            await trio.lowlevel.checkpoint()


def _counted(
    usage: Usage,
    metadata: Metadata,
    now_ms: int,
    parked_polls: int = 0,
    publish_per_s: float = 0.0,
    poll_per_s: float = 0.0,
) -> Figures:
    """Return the figures of messages alive at ``now_ms``; changes nothing."""
    oldest_ms = max(0, metadata.floor_ms, now_ms - metadata.properties.ttl_ms)
    messages, size = usage.messages, usage.bytes
    for bucket in usage.buckets:
        if bucket.last_ms >= oldest_ms and (messages or size):
            estimated = bucket.first_ms < oldest_ms or 0 < usage.own_expiry_ms() < now_ms
            first_ms = max(bucket.first_ms, oldest_ms)
            break
        messages -= bucket.messages
        size -= bucket.bytes
    else:
        messages = size = first_ms = 0
        estimated = False
    ttl_s = metadata.properties.ttl_s
    return Figures(messages, size, estimated, first_ms, ttl_s, 0, 0, parked_polls, publish_per_s, poll_per_s)
