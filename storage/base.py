"""The interface of stores: ordered rows of bytes in three tables. The promises are those of the weakest store.

    each row is whole or absent                       even after a crash, at any moment
    a commit is durable when ``write`` returns        until then a prefix of it may be stored, in order
    after an exception the outcome is unknown         the store is reopened before it is used again

Some stores promise more: on LevelDB a commit is one atomic batch. ``docs/stores.md`` lists the promises of each store;
``tests/storage/contract.py`` tests all of them against this page.
"""

from __future__ import annotations

import struct
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from plainsong.protocol.errors import PlainsongError, StorageFailed
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import HAS_POINTER, PlainRows

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Expect, Operation, Table
    from storage.loop import Waker

#: A row: key and value.
Row = tuple[bytes, bytes]
#: Names to claim before writing the rows of the transaction service, and those of namespaces; no topic has an empty
#: namespace.
SERVICE_NAME, NAMESPACES_NAME = TopicName("", "transactions"), TopicName("", "namespaces")


class StoreError(StorageFailed):
    """The store failed. The outcome of a ``write`` is unknown; the store must be reopened."""

    code = "storage_failed"
    title = "The store failed"


class Unreadable(StoreError):
    """A part of the store cannot be read: its bytes are not those that were written. Other parts may be readable."""


class NothingWritten(StoreError):
    """The store had failed before: this commit was not begun. The store must still be reopened."""

    title = "The store has failed before"


class StoreConflict(PlainsongError):
    """An expectation of a commit did not hold. Nothing was written, and the store works."""

    code = "storage_failed"
    title = "A row is not as expected"


class Deposed(PlainsongError):
    """Another owner has claimed the topic: the last write must not be acknowledged."""

    code = "storage_failed"
    title = "Another instance owns this topic now"

    def __init__(self, detail: str = "", *, hint: str = "", happened: Literal[False] | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.happened = happened
        """False: nothing of the commit happened or will happen; None: unknown."""


class StoreUnusable(PlainsongError):
    """The store cannot be opened; the message says why and what to do. Nothing was changed."""

    code = "storage_failed"
    title = "The store cannot be opened"


class StoreInUse(StoreUnusable):
    """Another process uses the directory."""


class StoreTooNew(StoreUnusable):
    """A newer version of the program wrote the store."""


class StoreDamaged(StoreUnusable):
    """The store's checks fail."""


class StoreReadOnly(StoreUnusable):
    """The directory or its file system cannot be written."""


class StoreFull(StoreUnusable):
    """There is not enough space on the disk to open the store."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a topic, from ``Store.claim``. The epoch is 0 in stores with one writer."""

    name: TopicName
    epoch: int
    lacks: frozenset[bytes] = field(default=frozenset(), compare=False)
    """Kinds of system rows that the topic did not have when it was claimed: loading skips them."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Capabilities and promises of a store."""

    kind: str
    """``memory``, ``leveldb``, …"""
    durability: str
    """One sentence for the banner: the failures that an acknowledged message survives."""
    max_row_bytes: int | None
    """The largest value of a row; None if only memory limits it."""
    whole_commits: bool = False
    """True if a crash leaves all or nothing of a commit, or of its part before a rollback. Removals of messages and
    payloads that no reader can see any longer may be missing."""
    drops_ranges: bool = False
    """True if ``drop`` costs the same for any number of rows, and reads none."""
    ordered_commits: bool = False
    """True if whole commits, of all claims and of everything that writes to the store, take effect in the order in which
    they were begun: a crash leaves the first ones, and nothing of the others."""
    answers_late: bool = False
    """True if a commit may take much longer than a sync: polls are answered, and wait, while one is under way. ``begin``
    does not call ``while_syncing``."""
    shared: bool = False
    """True if other instances may claim topics too: an owner must call ``check`` before it answers without a write."""

    def __post_init__(self) -> None:
        if self.ordered_commits and (self.shared or not self.whole_commits):
            raise ValueError("only whole commits of one writer are ordered")


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Numbers for metrics, available without waiting."""

    bytes: int | None
    """Size on disk; None if it is unknown or expensive."""
    free_bytes: int | None
    """Free space on that disk; None if there is no disk or it is unknown."""
    volumes: int | None = None
    """Number of volumes of messages; None if the store has none."""
    open_volumes: int | None = None
    """Number of volumes whose files are open."""


class RawRow(NamedTuple):
    """A row as the store keeps it, with all its cells. A store may keep several rows of a table in one."""

    key: bytes
    cells: Mapping[bytes, bytes]


class Reads(Protocol):
    """Reads of the tables, current or in a view."""

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """Return a row's value, None if there is none. Raises StoreError."""
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
        """Feed the rows with ``start <= key < stop``, in key order, to ``feed`` until it returns False.

        ``feed`` runs off the event loop if the store has threads, so it must not touch the loop's data. It gets lists
        of one to a thousand rows, of a few MiB at most; a larger row is alone in its list. Rows written after the scan
        began may or may not be seen. Exceptions of ``feed`` propagate.

        Args:
          reverse: from the last row down.
          first_chunk: about how many rows are wanted. The first list has this many, or as many as a list may have.
          values: False: every value is ``b""``, which is cheaper.
        Raises:
          StoreError: the rows fed so far are valid.
        """
        ...


class StoreView(Reads, Protocol):
    """The store at one moment. Close it with ``aclose``; otherwise it expires, and reading raises StoreError."""

    exact: bool
    """True if it is of one moment, between two commits; otherwise later commits are visible."""

    def renew(self, max_s: float) -> None:
        """Let it expire ``max_s`` from now. No effect once it has expired."""
        ...

    async def aclose(self) -> None:
        """Release it. Idempotent."""
        ...


class Store(Reads, Protocol):
    """Three ordered tables. One task at a time writes a topic; any task may read."""

    traits: StoreTraits

    @property
    def waker(self) -> Waker | None:
        """Wakes the event loop from the store's threads; None if it has no such threads."""
        ...

    @property
    def topics_number(self) -> int | None:
        """Changes whenever a topic's row of the metadata table has changed, before that is acknowledged. Never waits.

        Equal numbers mean that these rows are the same. None: unknown, because the store is being reopened or because
        other processes write to it too.
        """
        ...

    async def claim(self, name: TopicName) -> Claim:
        """Become the only writer of a topic; a later claim deposes an earlier one.

        Every owner calls this before it reads the topic's state, even after a failure: if a failed write left the store
        unusable, this reopens it.

        Raises:
          StoreError: the store cannot be reached or opened.
        """
        ...

    async def check(self, claim: Claim) -> None:
        """Check that the claim still holds: all that its owner read before this call returned is current.

        Raises:
          Deposed: another owner has claimed the topic.
          StoreError: it is unknown whether the claim holds.
        """
        ...

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """Make ``commit`` durable, in order.

        When this returns, all of the commit survives a power cut (within ``traits.durability``), and every later read
        sees it. A crash leaves a prefix, row by row, never a hole. Once begun, cancellation does not interrupt it.

        Args:
          commit: kept by reference until this returns.
          claim: from ``claim``. No other commit may be under way under it, unless ``traits.ordered_commits``.
          expect: compared before anything is written.
        Raises:
          StoreConflict: an expectation did not hold; nothing happened.
          Deposed: another owner has claimed the topic; nothing of the commit may be acknowledged. ``happened`` is
            False if it certainly has no effect.
          NothingWritten: it did not happen; claim the topic again before anything else.
          StoreError: any other: the outcome is unknown; claim the topic again before anything else.
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
        """Like ``write``, without waiting. ``completed`` is called once, on the event loop, with the error or None.

        Args:
          commit: kept by reference until ``completed`` is called.
          completed: may be called before this returns only between ``gather_writes`` and ``write_gathered``.
          while_syncing: work of the caller that does not depend on the outcome. It may be called on the event loop
            before ``completed``, once, or never. It must not raise, and its effects must stay hidden until
            ``completed``.
        Raises:
          StoreError: nothing was begun, and ``completed`` is not called.
        """
        ...

    @property
    def writes_inline(self) -> bool:
        """True while the event loop itself would write a small commit, because that is faster than waking a thread.

        Always False for a store that needs tasks or threads for every commit.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """True if no read and no commit is in progress in the store's threads; False if that is unknown."""
        ...

    def gather_writes(self) -> None:
        """Start to collect commits that the event loop would write itself; others begin at once."""

    def write_gathered(self) -> None:
        """Write the collected commits as one, and call each ``completed`` before this returns."""

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """Remove rows that no reader can see any longer.

        A crash may bring some back, but never rows removed before the last ``write`` that returned.

        Raises:
          StoreError: some may have been removed.
        """
        ...

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """Remove all rows of ranges that no reader can see any longer, and to which nothing will be written again.

        A crash may bring some back, but never rows removed before the last ``write`` that returned.

        Args:
          ranges: ``[start, stop)`` each.
        Returns:
          The number of rows; an estimate if ``traits.drops_ranges``.
        Raises:
          StoreError: some may have been removed.
        """
        ...

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """True if there may be rows in a range; False is certain. Never waits."""
        ...

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """Return where the row with this key would be: a file or folder, relative to the store's directory.

        None: nowhere, or the store has no files of its own. Raises StoreError.
        """
        ...

    async def begin_files(self) -> None:
        """Write later rows to new files, so that damage in existing ones cannot hide them.

        Does nothing in a store where damage never hides other rows. Raises StoreError.
        """
        ...

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """Give ``take`` the raw rows that are ``Unreadable`` and end in ``[start, stop)`` of a topic.

        ``take`` may run off the event loop. It is not called if the store has no such bytes. If it is called, ``drop``
        removes these rows too. Raises StoreError.
        """
        ...

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """Return the space of removed rows in a range to the disk, as far as the store can.

        May take long, in a separate thread; readers and writers continue. Raises StoreError.
        """
        ...

    async def tidy(self) -> int:
        """Clean up after removed rows inside the store, in one bounded step. Returns the number of entries.

        The daemon calls it periodically. Raises StoreError.
        """
        ...

    async def pin(self, max_s: float) -> StoreView:
        """Open a view of all tables between two commits. Others continue, but no space is freed while it is open.

        Args:
          max_s: seconds until it expires.
        Raises:
          StoreError: no view was opened.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """Return numbers for metrics. Never waits, never raises."""
        ...

    async def aclose(self) -> None:
        """Wait for calls in progress, then close. Idempotent."""
        ...


async def read_rows(
    store: Reads, table: Table, start: bytes, stop: bytes, *, limit: int, reverse: bool = False, values: bool = True
) -> list[Row]:
    """Return the rows of a range as a list, ``limit`` at most."""
    rows: list[Row] = []

    def take(chunk: Sequence[Row]) -> bool:
        rows.extend(chunk[: limit - len(rows)])
        return len(rows) < limit

    await store.scan(table, start, stop, take, reverse=reverse, first_chunk=min(limit, 1000), values=values)
    return rows


#: Rows that ``pages_of_rows`` reads at a time.
PAGE_ROWS = 1000


async def pages_of_rows(
    store: Reads, table: Table, start: bytes, stop: bytes, *, values: bool = True
) -> AsyncGenerator[list[Row], None]:
    """Yield the rows of a range page by page; the caller may remove those of a page. Raises StoreError."""
    while rows := await read_rows(store, table, start, stop, limit=PAGE_ROWS, values=values):
        yield rows
        if len(rows) < PAGE_ROWS:
            return
        start = rows[-1][0] + b"\x00"


#: Above every key of every table.
AFTER_ALL = b"\xff" * 64


async def drop_rows(store: Store, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
    """Implement ``Store.drop`` for a store that removes row by row."""
    removed = 0
    for start, stop in ranges:
        async with aclosing(pages_of_rows(store, table, start, stop, values=False)) as pages:
            async for rows in pages:
                await store.discard(table, [key for key, _ in rows])
                removed += len(rows)
    return removed


# --- chunks of a scan: few rows first, then many, but never many MiB at once ----------------------


#: The longest list. Longer ones save nothing, and a cancelled reader waits for its list.
MAX_CHUNK_ROWS = 1000
_VALUE = itemgetter(1)
#: Bytes of values in a list, unless it is a single row.
MAX_CHUNK_BYTES = 1 << 20
#: Factor by which the next list may be longer.
GROWTH = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows in lists, each of about ten KiB of values unless it has only one or a few rows."""

    lists: Iterable[Sequence[Row]]

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.lists)


def chunks(rows: Iterator[Row], first_chunk: int) -> Iterator[list[Row]]:
    """Split ``rows`` into lists: ``first_chunk`` rows, then four times as many each, within the bounds above.

    Sizes are counted row by row: an average of earlier rows would let a thousand large rows through after a thousand
    small ones.
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
    """Split runs of rows into lists as ``chunks`` does. Some are ``Blocks``; ``PlainRows`` remain separate."""
    wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
    chunk: list[Row] = []
    size = 0
    for run in runs:
        for rows in run.lists if isinstance(run, Blocks) else chunks(iter(run), wanted):
            at = 0
            if isinstance(rows, PlainRows):
                # Not joined with others, for readers that want their wire form.
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
    """Return the first rows whose values fit ``max_bytes``, and their size; at least one row if ``is_first``."""
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
    """Yield the rows that carry ``pointer``, rolled back. Other rows and those already rolled back are left out.

    Only the first nine bytes of a row decide, because a row that cannot be decoded must not become visible either.

    Raises:
      ValueError: ``pointer`` is not above 0.
    """
    if pointer <= 0:
        raise ValueError(f"write pointer {pointer} cannot be rolled back")
    wanted, turned = _I64.pack(pointer), _I64.pack(-pointer)
    for key, value in rows:
        if value[1:_AFTER_POINTER] == wanted and value[0] & HAS_POINTER:
            yield key, value[:1] + turned + value[_AFTER_POINTER:]
