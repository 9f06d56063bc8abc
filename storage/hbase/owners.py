"""Owners of topics: the epochs of claims, and the head of a topic, which decides which of its commits count.

Each topic has one head row, which is changed only by compare-and-set.

    head row   hash:u8 ns:topic:       in the message table, before the topic's messages
    cell h     the head                cell f epoch:u64    a fence, never changed once put
    cells k    the kinds of system rows that the topic may have, see ``layout``

An instance that claims a topic takes an epoch above all earlier ones of the topic, and puts it into the head: from then
on no commit of an earlier owner can take effect, and the head keeps the last one that did. A commit takes effect when
its owner increments the head. This both checks that there is no new owner and makes all rows with the commit's stamp
count. Rows that replaced owners put late have a stamp that the head never reaches.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import SYSTEM, metadata_key
from storage.base import Claim, Deposed, StoreError
from storage.hbase import layout
from storage.hbase.gateway import thrift
from storage.hbase.layout import FAMILY, Head, Stamp, decode_serial, encode_serial, hashed
from storage.hbase.pool import NoConnectionFree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong.protocol.names import TopicName
    from storage.hbase.cells import Slots
    from storage.hbase.pool import Pool
    from storage.hbase.tables import Tables

HEAD = FAMILY + b":h"
FENCE = FAMILY + b":f"
_EPOCH = struct.Struct(">Q")
_ATTEMPTS = 100
#: Heads read in one call.
_HEADS = 500


class Owners:
    """Claims topics for this instance, and completes its commits."""

    def __init__(self, pool: Pool, tables: Tables, slots: Slots) -> None:
        self._pool = pool
        self._epochs = Epochs(pool, tables[Table.METADATA])
        self._table = tables[Table.MESSAGE]
        self._slots = slots
        #: Heads of the topics that this instance owns, by ``ns:topic:``.
        self._heads: dict[bytes, Head] = {}
        #: The kinds of their system rows that HBase records; no entry for a topic without a record.
        self._kinds: dict[bytes, set[bytes]] = {}

    async def claim(self, name: TopicName) -> Claim:
        """Become the owner of a topic. Raises StoreError."""
        prefix = metadata_key(name)
        self._heads.pop(prefix, None)
        epoch = 0
        for _ in range(_ATTEMPTS):
            columns = await self._columns(prefix)
            head = _head_in(columns)
            if epoch <= head.last.epoch:
                epoch = await (self._epochs.above(head.last.epoch) if name.namespace else self._epochs.latest())
            await self._keep_fence(prefix, head)
            recorded = await self._begin_kinds(prefix, head, columns)
            claimed = head.claimed(epoch)
            if await self._swap(prefix, _cell(head), claimed.encode()):
                self._heads[prefix] = claimed
                self._slots.forget(prefix)
                self._kinds.pop(prefix, None)
                if recorded is None:
                    return Claim(name, epoch)
                self._kinds[prefix] = recorded
                return Claim(name, epoch, lacks=layout.ALL_KINDS - recorded)
        raise StoreError(f"too many instances claim topic {name} at once", hint="try again")

    async def _keep_fence(self, prefix: bytes, head: Head) -> None:
        """Save in a fence what the head is about to drop. The fence stays correct whichever instance claims next."""
        if head.last.serial and head.before.epoch:
            column = FENCE + encode_epoch(head.before.epoch)
            mutation = thrift.Mutation(column=column, value=encode_serial(head.before.serial))
            await self._pool.call("mutateRow", self._table, hashed(prefix), [mutation], {})

    async def _begin_kinds(self, prefix: bytes, head: Head, columns: Mapping[bytes, bytes]) -> set[bytes] | None:
        """Return the kinds that the head's row records, None if none. The topic's first claim begins the record."""
        if not layout.are_kinds_recorded(columns):
            if head.last.epoch:
                return None
            await self._put_kind(prefix, b"")
        return layout.kinds_in(columns)

    async def record_kind(self, prefix: bytes, kind: bytes) -> None:
        """Record that the topic may have rows of this kind. Raises StoreError."""
        recorded = self._kinds.get(prefix)
        if recorded is None or kind not in recorded:
            await self._put_kind(prefix, kind)
            self._kinds.get(prefix, set()).add(kind)

    def unrecorded_kinds(self, claim: Claim, keys: Iterable[bytes]) -> set[bytes]:
        """Return the kinds of these rows that must be recorded before a commit with them takes effect."""
        recorded = self._kinds.get(metadata_key(claim.name))
        return set() if recorded is None else {kind for key in keys if (kind := layout.kind_of(key))} - recorded

    async def _put_kind(self, prefix: bytes, kind: bytes) -> None:
        mutation = thrift.Mutation(column=layout.KINDS_COLUMN + kind, value=layout.KIND_PRESENT)
        await self._pool.call("mutateRow", self._table, hashed(prefix), [mutation], {})

    def next_stamp(self, claim: Claim) -> Stamp:
        """Return the stamp for the rows of the owner's next commit. Raises Deposed."""
        return self._own(claim).committed().last

    async def put(self, key: bytes, value: bytes | None, claim: Claim) -> None:
        """Put a row of metadata that the claim's head governs, for the owner's next commit; None removes it."""
        head = self._own(claim)
        await self._slots.put(key, value, head.committed().last, head)

    async def commit(self, claim: Claim) -> None:
        """Make everything with ``next_stamp`` count, if the claim still holds.

        Raises:
          Deposed: another owner has claimed the topic; ``happened`` is the outcome of this commit.
          NoConnectionFree: it did not happen; nothing was sent.
          StoreError: the outcome is unknown.
        """
        prefix = metadata_key(claim.name)
        head = self._own(claim)
        after = head.committed()
        row, mutation = hashed(prefix), thrift.Mutation(column=HEAD, value=after.encode())
        done, attempts = await self._pool.call_counting(
            "checkAndPut", self._table, row, HEAD, head.encode(), mutation, {}
        )
        if not done:
            try:
                now = await self.read(prefix)
            except NoConnectionFree as error:  # only the check did not happen; the commit may have
                raise StoreError(error.detail, hint=error.hint) from error
            if now.last != after.last:  # otherwise an earlier attempt, whose answer was lost, has done it
                self._heads.pop(prefix, None)
                raise _deposed(
                    claim, happened=None if attempts > 1 and now.outcome_of(after.last) is not False else False
                )
        self._heads[prefix] = after

    async def check(self, claim: Claim) -> None:
        """Check that the claim still holds, even during a commit under it. Raises Deposed, StoreError."""
        prefix = metadata_key(claim.name)
        self._own(claim)
        if Head.decode(await self._cell(prefix), {}).last.epoch != claim.epoch:
            self._heads.pop(prefix, None)
            raise _deposed(claim)

    def _own(self, claim: Claim) -> Head:
        head = self._heads.get(metadata_key(claim.name))
        if head is None or head.last.epoch != claim.epoch:
            raise _deposed(claim)
        return head

    def forget(self, prefix: bytes) -> None:
        """Forget the head, because another instance owns the topic."""
        self._heads.pop(prefix, None)

    async def head_of(self, prefix: bytes) -> Head:
        """Return the head of the topic whose keys begin with ``prefix``. For a topic that this instance owns, the cached head."""
        return (await self.heads_of([prefix]))[prefix]

    async def heads_of(self, prefixes: Iterable[bytes]) -> Mapping[bytes, Head]:
        """Return the heads of topics, by ``ns:topic:``."""
        wanted = list(dict.fromkeys(prefixes))
        heads = {prefix: self._heads[prefix] for prefix in wanted if prefix in self._heads}
        unknown = [prefix for prefix in wanted if prefix not in heads]
        for at in range(0, len(unknown), _HEADS):
            some = unknown[at : at + _HEADS]
            rows = await self._pool.call("getRows", self._table, list(map(hashed, some)), {})
            found = {row.row: {column: cell.value for column, cell in row.columns.items()} for row in rows}
            heads.update({prefix: _head_in(found.get(hashed(prefix), {})) for prefix in some})
        return heads

    async def _swap(self, prefix: bytes, before: bytes | None, after: bytes) -> bool:
        """Replace ``before`` with ``after``. Also True if an earlier attempt, whose answer was lost, has done so."""
        mutation = thrift.Mutation(column=HEAD, value=after)
        if await self._pool.call("checkAndPut", self._table, hashed(prefix), HEAD, before, mutation, {}):
            return True
        return await self._cell(prefix) == after

    async def _cell(self, prefix: bytes) -> bytes | None:
        found = await self._pool.call("get", self._table, hashed(prefix), HEAD, {})
        return found[0].value if found else None

    async def read(self, prefix: bytes) -> Head:
        """Read the head from HBase, even for a topic that this instance owns. Raises StoreError."""
        return _head_in(await self._columns(prefix))

    async def _columns(self, prefix: bytes) -> Mapping[bytes, bytes]:
        """Return the columns of the head's row."""
        rows = await self._pool.call("getRow", self._table, hashed(prefix), {})
        return {column: cell.value for column, cell in rows[0].columns.items()} if rows else {}


def encode_epoch(epoch: int) -> bytes:
    """Return the part of a fence's column name that follows ``FENCE``."""
    return _EPOCH.pack(epoch)


def _deposed(claim: Claim, *, happened: Literal[False] | None = False) -> Deposed:
    return Deposed(f"topic {claim.name} is no longer owned in epoch {claim.epoch}", happened=happened)


def _cell(head: Head) -> bytes | None:
    return head.encode() if head.last.epoch else None


def _head_in(columns: Mapping[bytes, bytes]) -> Head:
    fences = {
        int.from_bytes(column[len(FENCE) :], "big"): decode_serial(value)
        for column, value in columns.items()
        if column.startswith(FENCE)
    }
    return Head.decode(columns.get(HEAD), fences)


# --- epochs ----------------------------------------------------------------------------------------
#
# Instances take epochs from one counter in blocks, so that a thousand claims do not contend for one row.
# An epoch is used for only one claim. A claim needs an epoch above all earlier ones of its topic, the last of which is
# in the head: an instance drops the rest of a block that others have overtaken. Claims of names without a namespace
# (the services) take theirs from the counter itself, because their writes to ``cells.Cells`` are ordered by epochs
# alone.


#: The counter for all topics: the last epoch issued.
EPOCHS_KEY, EPOCHS_COLUMN = SYSTEM + b"o", FAMILY + b":n"
#: Epochs that an instance takes at a time; unused ones are never returned.
BLOCK = 100


class Epochs:
    """The epochs of one instance."""

    def __init__(self, pool: Pool, counter: bytes) -> None:
        """``counter`` is the table that has the counter."""
        self._pool = pool
        self._counter = counter
        self._block = range(0)
        self._taking = trio.Lock()

    async def above(self, epoch: int) -> int:
        """Return a new epoch above ``epoch``, which was issued before. Raises StoreError."""
        async with self._taking:
            if not self._block or self._block[-1] <= epoch:
                last = await self._count(BLOCK)
                self._block = range(last - BLOCK + 1, last + 1)
            self._block = range(max(self._block.start, epoch + 1), self._block.stop)
            taken, self._block = self._block[0], self._block[1:]
            return taken

    async def latest(self) -> int:
        """Return a new epoch above all that were issued to any instance. Raises StoreError."""
        return await self._count(1)

    async def _count(self, step: int) -> int:
        return int(await self._pool.call("atomicIncrement", self._counter, EPOCHS_KEY, EPOCHS_COLUMN, step))
