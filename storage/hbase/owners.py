"""Who may write a topic, and which rows of those before count: heads, epochs and fences.

    head row   00 'o' ns:topic:   in the metadata table: epoch e, fences f: (epoch, key) …, unfenced u: epochs

Whoever claims a topic takes an epoch above all that were ever given, and puts it into the head. Every row of messages
and payloads says in which epoch it was written. Then the claim looks for the last message row that is there: what owners
before it put later, behind that row, is hidden from everybody by a *fence*. An owner acknowledges a commit only when its
epoch is still in the head after the rows were put: then the rows were there before the next owner looked.

Epochs of owners that died between their claim and their fence have none yet; the next claim sets them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import SYSTEM, DamagedRow, metadata_key, stop_after
from protocol.records import pack_record, unpack_record
from storage.base import Claim, Deposed, StoreError
from storage.hbase.cells import cell_of, epoch_in, value_in
from storage.hbase.packed import CELL, FAMILY, epoch_of
from storage.hbase.scanning import Found, Range, scan
from storage.hbase.tables import hashed

if TYPE_CHECKING:
    from protocol.names import TopicName
    from storage.hbase.cells import Cells
    from storage.hbase.pool import Pool
    from storage.hbase.tables import Tables

HEAD = b"o"
#: Where epochs are counted: one row for all topics, in a column of its own.
EPOCHS_KEY, EPOCHS_COLUMN = SYSTEM + HEAD, FAMILY + b":n"
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Head:
    """The head row of a topic."""

    epoch: int = 0
    fences: tuple[tuple[int, bytes], ...] = ()
    """Rows of the epoch behind the key (of HBase's row, without the hash) count for nothing."""
    unfenced: tuple[int, ...] = ()
    """Epochs before this one that have no fence yet."""

    def encode(self) -> bytes:
        """The row's value."""
        return pack_record({"e": self.epoch, "f": self.fences, "u": self.unfenced})

    @classmethod
    def decode(cls, value: bytes | None) -> Head:
        """Read the row's value; None: the topic was never claimed. Raises DamagedRow."""
        if value is None:
            return cls()
        record = unpack_record(value, "head")
        try:
            fences = tuple((int(epoch), bytes(key)) for epoch, key in record["f"])
            return cls(int(record["e"]), fences, tuple(map(int, record["u"])))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a head row cannot be read: {error!r}") from error

    def hides(self, epoch: int, key: bytes) -> bool:
        """Whether a row of ``epoch`` at ``key`` was put by an owner after it had been replaced."""
        if epoch == self.epoch:
            return False
        return any(fenced == epoch and key > last for fenced, last in self.fences)


def head_key(name: TopicName) -> bytes:
    """The key of a topic's head."""
    return SYSTEM + HEAD + metadata_key(name)


class Owners:
    """Claims topics for this instance, and checks that nobody else has."""

    def __init__(self, pool: Pool, tables: Tables, cells: Cells, *, timeout_s: float) -> None:
        self._pool = pool
        self._tables = tables
        self._cells = cells
        self._timeout_s = timeout_s
        #: Heads as this instance has last seen them, by ``ns:topic:``.
        self._heads: dict[bytes, Head] = {}

    async def claim(self, name: TopicName) -> Claim:
        """Become the owner of a topic. Raises StoreError."""
        key = head_key(name)
        counter = self._tables[Table.METADATA]
        epoch = int(await self._pool.call("atomicIncrement", counter, EPOCHS_KEY, EPOCHS_COLUMN, 1))
        for _ in range(_ATTEMPTS):
            before = await self._cells.get(key)
            head = Head.decode(value_in(before))
            if head.epoch > epoch:
                raise StoreError(f"topic {name} was claimed by another instance at the same time", hint="try again")
            unfenced = (*head.unfenced, head.epoch) if head.epoch else head.unfenced
            claimed = Head(epoch, head.fences, unfenced)
            if await self._cells.swap(key, before, cell_of(epoch, claimed.encode())):
                break
        else:
            raise StoreError(f"topic {name} is being claimed by many instances", hint="try again")
        self._heads[metadata_key(name)] = await self._fence(name, claimed)
        await self._take_over(name, epoch)
        return Claim(name, epoch)

    async def _fence(self, name: TopicName, head: Head) -> Head:
        """Hide what the owners before may still put behind the last row that is there."""
        if not head.unfenced:
            return head
        last = await self._last_row(name, head)
        fenced = replace(head, fences=(*head.fences, *((epoch, last) for epoch in head.unfenced)), unfenced=())
        swapped = await self._cells.swap(
            head_key(name), cell_of(head.epoch, head.encode()), cell_of(head.epoch, fenced.encode())
        )
        if not swapped:
            raise StoreError(f"topic {name} was claimed by another instance meanwhile", hint="try again")
        return fenced

    async def _last_row(self, name: TopicName, head: Head) -> bytes:
        """The key of the topic's last message row that is not hidden, of whatever generation.

        A hidden one may be far behind it; a fence there would let through what the last owner puts in between.
        """
        prefix = hashed(metadata_key(name))
        wanted = Range(self._tables[Table.MESSAGE], prefix, stop_after(prefix), reverse=True)
        last = b""

        async def take(page: list[Found]) -> bool:
            nonlocal last
            for found in page:
                if CELL in found.columns and not head.hides(epoch_of(found.columns[CELL]), found.key[1:]):
                    last = found.key[1:]
                    return False
            return True

        await scan(self._pool, wanted, take, first_page=1, timeout_s=self._timeout_s)
        return last

    async def _take_over(self, name: TopicName, epoch: int) -> None:
        """Put the topic's metadata again, so that no owner before can change it any more."""
        key = metadata_key(name)
        cell = await self._cells.get(key)
        if cell is not None and epoch_in(cell) < epoch:
            await self._cells.put(key, value_in(cell), epoch)

    async def check(self, claim: Claim) -> None:
        """See that the claim still holds.

        Raises:
          Deposed: another one came: what was just written must not be acknowledged.
          StoreError: nobody can say.
        """
        head = Head.decode(value_in(await self._cells.get(head_key(claim.name))))
        if head.epoch != claim.epoch:
            self._heads.pop(metadata_key(claim.name), None)
            raise Deposed(f"topic {claim.name} is owned in epoch {head.epoch}, not {claim.epoch} any more")

    async def head_of(self, prefix: bytes) -> Head:
        """The head of the topic whose keys begin with ``prefix``; as it was at this instance's claim, if it has one."""
        known = self._heads.get(prefix)
        if known is None:
            known = Head.decode(value_in(await self._cells.get(SYSTEM + HEAD + prefix)))
        return known
