"""What every store promises: ordered rows of bytes in three tables, sized to what the weakest store can honour.

What every store promises: ordered rows of bytes in three tables, sized to what the weakest can honour.

    each row is whole or absent                       also after a crash, at any moment
    a commit is durable when ``write`` returns        and until then may be partly there, in order
    after an exception nobody knows                   the store is opened again before it is used

The strong are strong in silence: on LevelDB a commit is one atomic batch. ``docs/stores.md`` says what
each store really promises; ``tests/storage/contract.py`` holds all of them to this page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

from plainsong.protocol.errors import PlainsongError, StorageFailed
from plainsong.protocol.rows import HAS_POINTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from plainsong.protocol.effects import Expect, Operation, Table
    from plainsong.protocol.names import TopicName

#: A row: key and value.
Row = tuple[bytes, bytes]


class StoreError(StorageFailed):
    """The store failed. For ``write`` the outcome is unknown; the store must be opened again."""

    code = "storage_failed"
    title = "The store failed"


class NothingWritten(StoreError):
    """The store had failed before: this commit was not begun. It must be opened again all the same."""

    title = "The store had failed before"


class StoreConflict(PlainsongError):
    """An expectation of a commit did not hold: nothing was written, and the store is fine."""

    code = "storage_failed"
    title = "A row is not what was expected"


class Deposed(PlainsongError):
    """Another owner has claimed the topic since: what was just written must not be acknowledged."""

    code = "storage_failed"
    title = "Another instance owns this topic now"

    def __init__(self, detail: str = "", *, hint: str = "", happened: Literal[False] | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.happened = happened
        """False: nothing of the commit took place, and nothing will; None: nobody can say."""


class StoreUnusable(PlainsongError):
    """The store cannot be opened as it is; the text says why and what to do. Nothing was changed."""

    code = "storage_failed"
    title = "The store cannot be opened"


class StoreInUse(StoreUnusable):
    """Another process holds the directory."""


class StoreTooNew(StoreUnusable):
    """A newer version wrote this store."""


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
    """Kinds of system rows of which the topic certainly had none when it was claimed: they need not be looked for."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What a store can do and what it promises."""

    kind: str
    """``memory``, ``leveldb``, …"""
    durability: str
    """What an acknowledged message survives, in one sentence for the banner."""
    max_row_bytes: int | None
    """The largest value a row may have; None where memory is the bound."""
    whole_commits: bool = False
    """Whether a crash leaves all or nothing of a commit, or of the part of it before a rollback; removals of messages
    and payloads, which nobody can see any more, may be missing."""
    shared: bool = False
    """Whether others may claim topics too: an owner that answers without having written asks ``check`` first."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Numbers for metrics, taken without waiting."""

    bytes: int | None
    """What the store occupies on its disk; None where it cannot tell cheaply."""
    free_bytes: int | None
    """What is left on that disk; None where there is no disk, or it cannot tell."""


class Store(Protocol):
    """Three ordered tables. One task at a time writes a topic; anybody may read."""

    traits: StoreTraits

    async def claim(self, name: TopicName) -> Claim:
        """Become the one writer of a topic; a later claim deposes an earlier one.

        Every owner calls this before it reads the topic's state, also after a fall: where a failed
        write left the store unusable, this opens it again.

        Raises:
          StoreError: the store cannot be reached or opened.
        """
        ...

    async def check(self, claim: Claim) -> None:
        """See that the claim still holds: whoever read before this call answered read what is true.

        Raises:
          Deposed: another owner has claimed the topic.
          StoreError: nobody can say.
        """
        ...

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """Make ``commit`` durable, in order.

        When this returns all of it survives a power cut (as far as ``traits.durability`` says), and is
        seen by every later read. After a crash a prefix is there, row by row, never a hole. Not
        interrupted by cancellation once begun.

        Args:
          commit: kept by reference until this returns.
          claim: from ``claim``.
          expect: compared before anything is written.
        Raises:
          StoreConflict: an expectation did not hold; nothing happened.
          Deposed: another owner claimed the topic; what was written is not to be acknowledged. ``happened`` says
            whether it is certain that it does not count.
          NothingWritten: it did not happen; claim the topic again before anything else.
          StoreError: any other one: outcome unknown; claim the topic again before anything else.
        """
        ...

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """Remove rows that nobody can see any more, without waiting for the disk.

        A crash may bring some back. Never lost: their order against later ``write`` calls.

        Raises:
          StoreError: some may be removed.
        """
        ...

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """A row's value, None if there is no such row. Raises StoreError."""
        ...

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[list[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """Feed the rows with ``start <= key < stop``, in key order, to ``feed`` until it says False.

        ``feed`` runs off the event loop where the store has threads, so it must not touch what the loop
        owns; it gets lists of one to some thousand rows, of a few MiB at most (one larger row comes
        alone). Rows written meanwhile may or may not be seen. An exception of ``feed`` passes through.

        Args:
          reverse: from the last row down.
          first_chunk: rows in the first list, for readers that want few.
          values: False: every value is ``b""``, which is cheaper.
        Raises:
          StoreError: the rows fed so far were good.
        """
        ...

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """Give the space of removed rows in a range back to the disk, as far as the store can.

        May take long, in its own thread; readers and writers go on. Raises StoreError.
        """
        ...

    async def tidy(self) -> int:
        """Remove some of what the store itself keeps of rows that are gone: one bounded step; how much that was.

        Called once in a while, for ever. Raises StoreError.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """Numbers for metrics; never waits, never raises."""
        ...

    async def aclose(self) -> None:
        """Wait for what is under way, then close. Idempotent."""
        ...


async def read_rows(
    store: Store, table: Table, start: bytes, stop: bytes, *, limit: int, reverse: bool = False, values: bool = True
) -> list[Row]:
    """At most ``limit`` rows of a range, as a list."""
    rows: list[Row] = []

    def take(chunk: list[Row]) -> bool:
        rows.extend(chunk[: limit - len(rows)])
        return len(rows) < limit

    await store.scan(table, start, stop, take, reverse=reverse, first_chunk=min(limit, 1000), values=values)
    return rows


# --- chunks ----------------------------------------------------------------------------------------
#
# How a scan is cut into lists: few rows first, then many, and never many MiB at once.


#: Where lists stop growing: longer ones save nothing any more, and a cancelled reader waits for its list.
MAX_CHUNK_ROWS = 1000
#: Bytes of values in a list, unless it is a single row.
MAX_CHUNK_BYTES = 4 << 20
#: How many times as long as the list before the next one may be.
GROWTH = 4


def chunks(rows: Iterator[Row], first_chunk: int) -> Iterator[list[Row]]:
    """``rows`` as lists: ``first_chunk`` rows, then four times as many each, within the bounds above.

    Sizes are counted row by row: how large the next row is, nobody knows before it is read, and an
    average of the earlier ones would let a thousand large rows through after a thousand small ones.
    """
    wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
    held: list[Row] = []
    while True:
        chunk = held
        held = []
        size = len(chunk[0][1]) if chunk else 0
        for row in islice(rows, wanted - len(chunk)):
            size += len(row[1])
            if size > MAX_CHUNK_BYTES and chunk:
                held = [row]
                break
            chunk.append(row)
        if not chunk:
            return
        yield chunk
        wanted = min(wanted * GROWTH, MAX_CHUNK_ROWS)


# --- rolled ----------------------------------------------------------------------------------------
#
# What a rollback makes of a row: the same bytes with the sign of the write pointer turned, for every store alike.


_I64 = struct.Struct(">q")
_AFTER_POINTER = 1 + _I64.size


def rolled_back(rows: Iterable[Row], pointer: int) -> Iterator[Row]:
    """Those of ``rows`` that carry ``pointer``, rolled back; others and those already rolled back are left out.

    Rows are told by their first nine bytes alone: also one that cannot be read otherwise must not become visible.

    Raises:
      ValueError: ``pointer`` is not above 0.
    """
    if pointer <= 0:
        raise ValueError(f"write pointer {pointer} cannot be rolled back")
    wanted, turned = _I64.pack(pointer), _I64.pack(-pointer)
    for key, value in rows:
        if value[1:_AFTER_POINTER] == wanted and value[0] & HAS_POINTER:
            yield key, value[:1] + turned + value[_AFTER_POINTER:]
