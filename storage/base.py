"""What every store promises: ordered rows of bytes in three tables, sized to what the weakest store can keep.

    each row is whole or absent                       also after a crash, at any moment
    a commit is durable when ``write`` returns        until then a prefix of it may be there, in order
    after an exception the outcome is unknown         the store is opened again before it is used

Some stores promise more: on LevelDB a commit is one atomic batch. ``docs/stores.md`` says what each store
really promises; ``tests/storage/contract.py`` tests all of them against this page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from plainsong.protocol.errors import PlainsongError, StorageFailed
from plainsong.protocol.rows import HAS_POINTER, PlainRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Expect, Operation, Table
    from plainsong.protocol.names import TopicName
    from storage.loop import Bell

#: A row: key and value.
Row = tuple[bytes, bytes]


class StoreError(StorageFailed):
    """The store failed. For ``write`` the outcome is unknown; the store must be opened again."""

    code = "storage_failed"
    title = "The store failed"


class Unreadable(StoreError):
    """A part of the store cannot be read, for its bytes are not what was written; others may be."""


class NothingWritten(StoreError):
    """The store had failed before: this commit was not begun. The store must still be opened again."""

    title = "The store had failed before"


class StoreConflict(PlainsongError):
    """An expectation of a commit did not hold: nothing was written, and the store is fine."""

    code = "storage_failed"
    title = "A row is not what was expected"


class Deposed(PlainsongError):
    """Another owner has claimed the topic: what was just written must not be acknowledged."""

    code = "storage_failed"
    title = "Another instance owns this topic now"

    def __init__(self, detail: str = "", *, hint: str = "", happened: Literal[False] | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.happened = happened
        """False: nothing of the commit took place, and nothing will; None: unknown."""


class StoreUnusable(PlainsongError):
    """The store cannot be opened; the text says why and what to do. Nothing was changed."""

    code = "storage_failed"
    title = "The store cannot be opened"


class StoreInUse(StoreUnusable):
    """Another process uses the directory."""


class StoreTooNew(StoreUnusable):
    """A newer version of the program wrote the store."""


class StoreDamaged(StoreUnusable):
    """The store's own checks fail."""


class StoreReadOnly(StoreUnusable):
    """The directory or its file system cannot be written."""


class StoreFull(StoreUnusable):
    """There is no room on the disk to open the store."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a topic, from ``Store.claim``; a store with one writer gives epoch 0."""

    name: TopicName
    epoch: int
    lacks: frozenset[bytes] = field(default=frozenset(), compare=False)
    """Kinds of system rows that the topic certainly did not have when it was claimed: loading skips them."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What a store can do and what it promises."""

    kind: str
    """``memory``, ``leveldb``, …"""
    durability: str
    """What an acknowledged message survives, one sentence for the banner."""
    max_row_bytes: int | None
    """The largest value of a row; None where memory is the bound."""
    whole_commits: bool = False
    """True if a crash leaves all or nothing of a commit, or of the part of it before a rollback; removals of messages
    and payloads, which no reader can see any more, may be missing."""
    drops_ranges: bool = False
    """True if ``drop`` costs the same for any number of rows, and reads none of them."""
    in_order: bool = False
    """True if commits take place in the order in which they were begun, those of different claims as well."""
    shared: bool = False
    """True if other instances may claim topics too: before it answers without a write, an owner calls ``check``."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Numbers for metrics, taken without waiting."""

    bytes: int | None
    """Its size on disk; None where the store cannot tell cheaply."""
    free_bytes: int | None
    """Free space on that disk; None where there is no disk, or the store cannot tell."""
    volumes: int | None = None
    """Volumes of messages; None where there are none."""
    open_volumes: int | None = None
    """Those of them whose files are open."""


class RawRow(NamedTuple):
    """A row as the store keeps it, with all its cells; a store may keep several rows of a table in one."""

    key: bytes
    cells: Mapping[bytes, bytes]


class Reads(Protocol):
    """What may be read of the tables: of a store as it is, or of a view of it."""

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """A row's value, None if there is no such row. Raises StoreError."""
        ...

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """Feed the rows with ``start <= key < stop``, in key order, to ``feed`` until it says False.

        ``feed`` runs off the event loop where the store has threads, so it must not touch what the loop
        owns. It gets lists of one to a thousand rows, of a few MiB at most; one larger row comes alone. The scan
        may or may not see rows written since it began. An exception of ``feed`` passes through.

        Args:
          reverse: from the last row down.
          first_chunk: about how many rows are wanted: so many are in the first list, or as many as a list may have.
          values: False: every value is ``b""``, which is cheaper.
        Raises:
          StoreError: the rows fed so far were good.
        """
        ...


class StoreView(Reads, Protocol):
    """The store as it was in one moment; ``aclose`` it, or it ends by itself, and reading raises StoreError."""

    exact: bool
    """True if it is of one moment, between two commits; otherwise later commits are seen."""

    def renew(self, max_s: float) -> None:
        """It ends ``max_s`` from now at the latest, instead of when it was to end; nothing once it has ended."""
        ...

    async def aclose(self) -> None:
        """Let go of it. Idempotent."""
        ...


class Store(Reads, Protocol):
    """Three ordered tables. One task at a time writes a topic; any task may read."""

    traits: StoreTraits

    @property
    def bell(self) -> Bell | None:
        """What the store's threads wake the event loop with; None: it has no such threads."""
        ...

    @property
    def topics_number(self) -> int | None:
        """Changes whenever a topic's row of the metadata table has changed, before that is acknowledged; never waits.

        While the number stays the same, so do these rows. None: unknown, because the store is being opened again, or
        because other processes write to it as well.
        """
        ...

    async def claim(self, name: TopicName) -> Claim:
        """Become the one writer of a topic; a later claim deposes an earlier one.

        Every owner calls this before it reads the topic's state, also after a fall: if a failed write
        left the store unusable, this opens it again.

        Raises:
          StoreError: the store cannot be reached or opened.
        """
        ...

    async def check(self, claim: Claim) -> None:
        """Check that the claim still holds: what its owner read before this call returned is current.

        Raises:
          Deposed: another owner has claimed the topic.
          StoreError: unknown.
        """
        ...

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """Make ``commit`` durable, in order.

        When this returns all of the commit survives a power cut (as far as ``traits.durability`` says), and
        every later read sees it. A crash leaves a prefix, row by row, never a hole. Cancellation does not
        interrupt it once begun.

        Args:
          commit: kept by reference until this returns.
          claim: from ``claim``.
          expect: compared before anything is written.
        Raises:
          StoreConflict: an expectation did not hold; nothing happened.
          Deposed: another owner has claimed the topic; nothing of the commit may be acknowledged. ``happened`` says
            whether it is certain that it does not count.
          NothingWritten: it did not happen; claim the topic again before anything else.
          StoreError: any other kind: the outcome is unknown; claim the topic again before anything else.
        """
        ...

    def begin(
        self,
        commit: Sequence[Operation],
        completed: Callable[[Exception | None], object],
        *,
        claim: Claim,
        while_syncing: Callable[[], object] | None = None,
    ) -> None:
        """As ``write``, without waiting: ``completed`` is called once, on the event loop, with what ``write`` would raise.

        Args:
          commit: kept by reference until ``completed`` is called.
          completed: may be called before this returns only between ``gather_writes`` and ``write_gathered``.
          while_syncing: the caller's work that does not depend on the outcome. It may be called on the event loop before
            ``completed``, once, or never; it does not raise, and its effects stay hidden until ``completed``.
        Raises:
          StoreError: nothing was begun, and ``completed`` is not called.
        """
        ...

    @property
    def writes_inline(self) -> bool:
        """True while the event loop itself would write a small commit, because that is quicker than to wake a thread.

        A store that needs tasks or threads for every commit never does.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """True if no read and no commit is under way in the store's threads; False also where it cannot be known."""
        ...

    def gather_writes(self) -> None:
        """Gather the commits that are begun from now on, as far as the event loop would write them; the others begin."""

    def write_gathered(self) -> None:
        """Write what was gathered as one, and call each ``completed``, before this returns."""

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """Remove rows that no reader can see any more.

        A crash may bring some back, but never those removed before a ``write`` that returned later.

        Raises:
          StoreError: some may have been removed.
        """
        ...

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """Remove all rows of ranges that no reader can see any more, and to which nothing will be written again.

        A crash may bring rows back, but never those removed before a ``write`` that returned later.

        Args:
          ranges: ``[start, stop)`` each.
        Returns:
          How many rows; an estimate where ``traits.drops_ranges``.
        Raises:
          StoreError: some may have been removed.
        """
        ...

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """True if there may be rows in a range; never waits. False is certain."""
        ...

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """Return where the row with this key would be: a file or folder, relative to the store's directory.

        None: nowhere, or the store does not keep its rows in files of its own. Raises StoreError.
        """
        ...

    async def begin_files(self) -> None:
        """Write rows to new files from now on, so that damage in those there are cannot hide later rows.

        Does nothing in a store where damage never hides other rows. Raises StoreError.
        """
        ...

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """Give ``take`` the bytes of the rows that are ``Unreadable`` and end in ``[start, stop)`` of a topic.

        ``take`` may run off the event loop. It is not called if the store has no such bytes. Where it is called, ``drop``
        removes these rows too. Raises StoreError.
        """
        ...

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """Give the space of removed rows in a range back to the disk, as far as the store can.

        May take long, in a thread of its own; readers and writers continue. Raises StoreError.
        """
        ...

    async def tidy(self) -> int:
        """Remove some of what the store itself keeps of removed rows, in one bounded step; how many entries.

        The daemon calls it periodically. Raises StoreError.
        """
        ...

    async def pin(self, max_s: float) -> StoreView:
        """A view of all tables between two commits. Readers and writers continue; space comes back once it has ended.

        Args:
          max_s: when it ends at the latest.
        Raises:
          StoreError: there is none.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """Numbers for metrics; never waits, never raises."""
        ...

    async def aclose(self) -> None:
        """Wait for what is under way, then close. Idempotent."""
        ...


async def read_rows(
    store: Reads, table: Table, start: bytes, stop: bytes, *, limit: int, reverse: bool = False, values: bool = True
) -> list[Row]:
    """At most ``limit`` rows of a range, as a list."""
    rows: list[Row] = []

    def take(chunk: Sequence[Row]) -> bool:
        rows.extend(chunk[: limit - len(rows)])
        return len(rows) < limit

    await store.scan(table, start, stop, take, reverse=reverse, first_chunk=min(limit, 1000), values=values)
    return rows


#: Rows that ``drop_rows`` removes at a time.
_DROP_ROWS = 1000


async def drop_rows(store: Store, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
    """``Store.drop`` for stores that remove row by row."""
    removed = 0
    for start, stop in ranges:
        while True:
            rows = await read_rows(store, table, start, stop, limit=_DROP_ROWS, values=False)
            await store.discard(table, [key for key, _ in rows])
            removed += len(rows)
            if len(rows) < _DROP_ROWS:
                break
            start = rows[-1][0] + b"\x00"
    return removed


# --- chunks of a scan: few rows first, then many, and never many MiB at once ----------------------


#: Lists do not grow beyond this: longer ones save nothing, and a cancelled reader waits for its list.
MAX_CHUNK_ROWS = 1000
_VALUE = itemgetter(1)
#: Bytes of values in a list, unless it is a single row.
MAX_CHUNK_BYTES = 1 << 20
#: How many times longer the next list may be.
GROWTH = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows that come some at a time, of some ten KiB of values together unless it is one or a few."""

    lists: Iterable[Sequence[Row]]

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.lists)


def chunks(rows: Iterator[Row], first_chunk: int) -> Iterator[list[Row]]:
    """``rows`` as lists: ``first_chunk`` rows, then four times as many each, within the bounds above.

    It counts sizes row by row: an average of earlier rows would let a thousand large rows through after a
    thousand small ones.
    """
    wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
    carried: list[Row] = []
    while True:
        chunk = carried
        carried = []
        size = len(chunk[0][1]) if chunk else 0
        for row in islice(rows, wanted - len(chunk)):
            size += len(row[1])
            if size > MAX_CHUNK_BYTES and chunk:
                carried = [row]
                break
            chunk.append(row)
        if not chunk:
            return
        yield chunk
        wanted = min(wanted * GROWTH, MAX_CHUNK_ROWS)


def chunks_of_runs(runs: Iterable[Iterable[Row]], first_chunk: int) -> Iterator[Sequence[Row]]:
    """As ``chunks``, of rows that come in runs, some of which are ``Blocks``; ``PlainRows`` are lists by themselves."""
    wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
    chunk: list[Row] = []
    size = 0
    for run in runs:
        for rows in run.lists if isinstance(run, Blocks) else chunks(iter(run), wanted):
            at = 0
            if isinstance(rows, PlainRows):
                # They stay together, for readers that want their wire form.
                if chunk and rows:
                    yield chunk
                    chunk, size, wanted = [], 0, min(wanted * GROWTH, MAX_CHUNK_ROWS)
                while at < len(rows):
                    yield rows if not at and len(rows) <= wanted else rows[at : at + wanted]
                    at, wanted = at + wanted, min(wanted * GROWTH, MAX_CHUNK_ROWS)
                continue
            while at < len(rows):
                some = rows if not at and len(rows) <= wanted - len(chunk) else rows[at : at + wanted - len(chunk)]
                added = sum(map(len, map(_VALUE, some)))
                if size + added > MAX_CHUNK_BYTES and (chunk or len(some) > 1):
                    some, added = _what_fits(some, MAX_CHUNK_BYTES - size, is_first=not chunk)
                    is_full = True
                else:
                    is_full = len(chunk) + len(some) >= wanted
                chunk += some
                size += added
                at += len(some)
                if is_full:
                    yield chunk
                    chunk, size = [], 0
                    wanted = min(wanted * GROWTH, MAX_CHUNK_ROWS)
    if chunk:
        yield chunk


def _what_fits(rows: Sequence[Row], max_bytes: int, *, is_first: bool) -> tuple[Sequence[Row], int]:
    """The first of some rows whose values take so many bytes at most, and one at least where they are the first."""
    size = 0
    for index, (_, value) in enumerate(rows):
        if size + len(value) > max_bytes and (index or not is_first):
            return rows[:index], size
        size += len(value)
    return rows, size


# --- rollbacks: the same bytes with the sign of the write pointer inverted, in every store alike ---


_I64 = struct.Struct(">q")
_AFTER_POINTER = 1 + _I64.size


def rolled_back(rows: Iterable[Row], pointer: int) -> Iterator[Row]:
    """The rows that carry ``pointer``, rolled back; other rows and those already rolled back are left out.

    Only the first nine bytes of a row decide: a row that cannot be decoded must not become visible either.

    Raises:
      ValueError: ``pointer`` is not above 0.
    """
    if pointer <= 0:
        raise ValueError(f"write pointer {pointer} cannot be rolled back")
    wanted, turned = _I64.pack(pointer), _I64.pack(-pointer)
    for key, value in rows:
        if value[1:_AFTER_POINTER] == wanted and value[0] & HAS_POINTER:
            yield key, value[:1] + turned + value[_AFTER_POINTER:]
