"""What is known of all topics of the service without opening one: their figures, for lists that are sorted and paged.

A topic that is open says what it has; of the others the rows of the metadata table do: their properties, high-water
marks and undecided pointers. These are read at most once a second, less often of many topics, and what they decode to is
kept by their bytes. Then other instances are asked for the figures of the topics that are open there.

A read is a task of the daemon's, and all who ask for its topics wait for it, also who comes while it is under way. On a
store that is far away it may take longer than any of them waits: were it made by one of them, it would be given up with
that one, and made again for the next, so that nobody were ever answered. And if each waited for a read that begins behind
its question, who asks again after a time-out would always come too late. What it shows to one who has come meanwhile is
no older than what it shows to one who comes behind it. A topic that was created since it read the row is open, here or
at its owner, which is asked after the rows.
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
    from plainsong.protocol.topic.core import TopicCore
    from storage.base import Row, Store

log = logging.getLogger(__name__)
T = TypeVar("T")
#: For how long a read of the rows of closed topics, and of the figures of other instances, serves who comes behind it.
FRESH_S = 1.0
#: So much longer for each topic, so that reading a hundred thousand of them again and again does not fill a core; and the
#: longest.
FRESH_S_EACH = 0.0002
MAX_FRESH_S = 10.0
#: How long other instances are waited for.
ASK_TIMEOUT_S = 1.0
#: The call that asks another instance for its open topics.
FIGURES = "topic_figures"
#: Open topics that are looked at in one turn of the event loop.
MANY = 100
#: A thread that reads rows works for this long and sleeps for that long, in turns: an event loop that wants the interpreter
#: lock would otherwise wait 5 ms for it, and after each of its system calls again.
WORK_S = 0.0005
NAP_S = 0.0001
#: Rows whose decoded form is kept.
MAX_KEPT = 200_000


class Figures(NamedTuple):
    """What a list of topics shows of one."""

    messages: int
    bytes: int
    estimated: bool
    """Whether a part of a slice has expired, so that the two numbers are a little too high."""
    oldest_ms: int
    """Publish time of the oldest message, to within a slice; 0: there is none."""
    ttl_s: int
    open_transactions: int = 0
    hidden_messages: int = 0
    parked_polls: int = 0
    publish_per_s: float = 0.0
    poll_per_s: float = 0.0

    def shown(self, name: TopicName, owner: str | None, now_ms: int) -> dict[str, Any]:
        """One topic as the API shows it."""
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
    """A high-water mark, decoded."""

    usage: Usage
    time_ms: int
    appended: int

    @classmethod
    def decode(cls, value: bytes) -> _Mark:
        mark = HighWater.decode(value)
        return cls(Usage(mark.buckets), mark.time_ms, mark.appended)


_NO_MARK = _Mark(Usage(), 0, 0)


class _Reading:
    """A read of all topics that is under way."""

    def __init__(self) -> None:
        self.over = trio.Event()
        #: Why it has failed; None: it has not. Until it is over that is the end of the daemon.
        self.error: Exception | None = ShuttingDown("the daemon is shutting down")


class Catalogue:
    """All topics of the service.

    Args:
      nursery: where topics are read, for whoever waits; it outlives them.
      ownership: None: this instance is alone.
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
        #: A read belongs to no request, and so has none in its context.
        self._context = copy_context()

    async def has(self, name: TopicName) -> bool:
        """Whether the topic lived when the rows were last read. Raises StoreError, ShuttingDown."""
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
        """How long a read serves requests: longer the more topics there are."""
        return min(MAX_FRESH_S, FRESH_S + FRESH_S_EACH * max(len(self._stored), len(self._elsewhere)))

    async def figures(self) -> dict[TopicName, Figures]:
        """Of every living topic. Raises StoreError, ShuttingDown."""
        await self._be_fresh()
        # No other task sees these dictionaries before they are complete, and a read makes new ones.
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
        """Of those of these topics that live. Looks at no other topic if all are open here. Raises StoreError, ShuttingDown."""
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
        """The core of a topic that is open here, exists or existed, and is this instance's."""
        if self._ownership is not None and not self._ownership.is_mine(name):
            return None
        core = self._directory.core(name)
        return None if core is None or core.state.metadata is None else core

    def _figures_here(self, name: TopicName, core: TopicCore, now_ms: int) -> Figures | None:
        """None: it was deleted."""
        metadata = core.state.metadata
        return None if metadata is None or metadata.deleted_ms is not None else self._open(name, core, now_ms)

    def now_ms(self) -> int:
        """The time by which ages are told."""
        return self._clock.now_ms()

    def owner(self, name: TopicName) -> str | None:
        """The address of the topic's owner; None: this instance is alone, or there is none just now."""
        owner = None if self._ownership is None else self._ownership.owner(name)
        return None if owner is None else owner.address

    async def _open_here(self) -> dict[TopicName, Figures | None]:
        """The topics that are open here and this instance's; None: it was deleted."""
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
        """With how many transactions are undecided, and the messages from the first undecided one on."""
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
        """Read for all who wait, and to the end also when they have left. Raises nothing but what cancels it."""
        try:
            await self._read_rows()
            await self._ask_others()
            self._read_s, reading.error = trio.current_time(), None
        except Exception as error:  # it is raised again, for each who waits
            reading.error = error
            if not reading.over.statistics().tasks_waiting:
                log.warning("topics not read, and nobody waits for them any more", exc_info=error)
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
                    continue  # asking for the topic says what is wrong with it
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
        """The deleted topics of a namespace, or of all, by name; cleaned ones for as long as they could come back.

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

    async def shown_deleted(self, name: TopicName, metadata: Metadata, grace_ms: int) -> dict[str, Any]:
        """A deleted topic, with what it held. Raises StoreError."""
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
        """How many living topics a name has created or brought back, in the whole store. Raises StoreError."""
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
                log.debug("figures of topics not known", extra={"instance": address}, exc_info=error)

        if ownership is not None and links is not None:
            async with trio.open_nursery() as nursery:
                for instance in ownership.instances:
                    if instance.name != ownership.me.name:
                        nursery.start_soon(ask, instance.address)
        self._elsewhere = found

    async def figures_handler(self, call: Call) -> Reply:
        """Answers another instance that lists topics."""
        del call
        here = await self._open_here()
        return Reply([[*name, *figures] for name, figures in here.items() if figures is not None])


def _with_naps(rows: Sequence[Row]) -> Iterator[Row]:
    """``rows``, for a loop in a thread of the store, with naps in which the event loop gets the interpreter lock.

    Rows whose decoded form is kept take time as well, if there are many.
    """
    until_s = thread_time() + WORK_S
    for row in rows:
        yield row
        if thread_time() >= until_s:
            nap(NAP_S)
            until_s = thread_time() + WORK_S


async def in_pieces(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """``items`` in lists of ``MANY``, with a turn of the event loop for other tasks between two."""
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
    """What lives at ``now_ms``; nothing is changed."""
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
