"""Writing a commit: all that its rows and cells need at once, then the head, then what follows; and what became of it.

    a put fails, or finds another owner           it did not happen: the head was never moved
    the head was moved by another                 ``Owners.commit`` says whether it happened before
    the answer to that was lost                   nobody knows
    a removal or rollback behind it fails         nobody knows: its puts took place

Rows of the metadata table that no head decides about count as they are put: with one of those nobody knows at once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from protocol.keys import metadata_key
from storage.base import Deposed, NothingWritten, StoreConflict, StoreError
from storage.hbase.batch import parts
from storage.hbase.kinds import kind_of
from storage.hbase.slots import governor
from storage.together import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from protocol.effects import Expect, Operation
    from storage.base import Claim
    from storage.hbase.batch import Batch, Part
    from storage.hbase.cells import Cells
    from storage.hbase.owners import Owners
    from storage.hbase.putting import Putting
    from storage.hbase.removing import Removing


class Committing:
    """Writes commits, each under its claim."""

    def __init__(self, owners: Owners, cells: Cells, putting: Putting, removing: Removing, max_row_bytes: int) -> None:
        self._owners = owners
        self._cells = cells
        self._putting = putting
        self._removing = removing
        self._max_row_bytes = max_row_bytes

    async def write(self, commit: Sequence[Operation], claim: Claim, expect: Sequence[Expect]) -> None:
        """Write it, its parts in their order; what is expected has been found to hold.

        Raises:
          StoreConflict: it does not hold any more; nothing happened.
          Deposed, NothingWritten, StoreError: as ``Store.write`` says.
        """
        writing = _Writing()
        try:
            for part in parts(commit):
                await self._write(part, claim, {wanted.key: wanted for wanted in expect}, writing)
        except Deposed as error:
            if writing.is_open:
                error.happened = None
            raise
        except StoreError as error:
            if writing.is_open:
                raise
            raise NothingWritten(error.detail, hint=error.hint) from error

    async def _write(self, part: Part, claim: Claim, expected: dict[bytes, Expect], writing: _Writing) -> None:
        batch = part.batch
        self._refuse_too_large(batch)
        if not batch.is_empty:
            await self._put_free_cells(batch, claim, expected, writing)
            await together(self._calls(batch, claim))
            await self._commit(claim, writing)
        elif not writing.is_open:
            await self._owners.check(claim)
        if part.removals or part.rollback:
            writing.is_open = True
            await self._follow(part)
            # Still the owner: whoever claims the topic from now on reads what this has left.
            await self._owners.check(claim)

    async def _follow(self, part: Part) -> None:
        for removal in part.removals:
            await self._removing.remove(removal.table, removal.keys)
        if part.rollback is not None:
            await self._removing.roll_back(part.rollback)

    async def _commit(self, claim: Claim, writing: _Writing) -> None:
        """Move the head; from then on something may have taken place, unless it is told that it did not."""
        before, writing.is_open = writing.is_open, True
        try:
            await self._owners.commit(claim)
        except Deposed:
            writing.is_open = before
            raise

    def _refuse_too_large(self, batch: Batch) -> None:
        largest = max((len(value) for value in batch.metadata.values() if value is not None), default=0)
        largest = max((largest, *(max(map(len, put.values), default=0) for put in batch.rows)))
        if largest > self._max_row_bytes:
            raise StoreError(
                f"a row of {largest} bytes is over storage.hbase.max_cell_bytes", hint="nothing was written; raise it"
            )

    async def _put_free_cells(
        self, batch: Batch, claim: Claim, expected: dict[bytes, Expect], writing: _Writing
    ) -> None:
        """Those that no head decides about; one with an expectation first, since what it finds decides about all."""
        free = {key: value for key, value in batch.metadata.items() if governor(key) != metadata_key(claim.name)}
        for key in sorted(free, key=lambda key: key not in expected):
            value, wanted = free[key], expected.get(key)
            kind, other = kind_of(key), governor(key)
            if kind and other:  # a row of a topic that was not claimed, which only tests write
                await self._owners.say_kind(other, kind)
            before, writing.is_open = writing.is_open, True
            if wanted is None:
                await self._cells.put(key, value, claim.epoch)
                continue
            try:
                await self._cells.put_expected(key, wanted.value, value, claim.epoch)
            except StoreConflict as error:
                if before:
                    raise StoreError(error.detail) from error
                raise

    def _calls(self, batch: Batch, claim: Claim) -> Iterator[Callable[[], Awaitable[None]]]:
        for put in batch.rows:
            yield from self._putting.calls(put, claim)
        prefix = metadata_key(claim.name)
        governed = {key: value for key, value in batch.metadata.items() if governor(key) == prefix}
        for kind in self._owners.unsaid(claim, (key for key, value in governed.items() if value is not None)):
            yield partial(self._owners.say_kind, prefix, kind)
        for key, value in governed.items():
            yield partial(self._owners.put, key, value, claim)


class _Writing:
    """How far a commit is."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether something of it may have taken place."""
