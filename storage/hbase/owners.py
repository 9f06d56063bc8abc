"""Owners of topics: epochs for claims, and the head of a topic, which says which of its commits count.

Who may write a topic, and which of its commits took place: one row a topic, changed by compare-and-set alone.

    head row   hash:u8 ns:topic:       in the message table, before the topic's messages
    cell h     the head                cell f epoch:u64    a fence: never changed once it is there
    cells k    ``kinds.py``

Whoever claims a topic takes an epoch above all that it ever had, and puts it into the head: from then on no commit
of an owner before can take place, and what had taken place until then stands in the head as it was replaced. A commit
takes place when its owner moves the head by one: that is at once the check that nobody else has come, and the record
that all rows with this stamp count. Rows that are put late, by owners that were replaced, have a stamp that the head
never reached.
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
#: Heads asked for in one call.
_HEADS = 500


class Owners:
    """Claims topics for this instance, and lets its commits take place."""

    def __init__(self, pool: Pool, tables: Tables, slots: Slots) -> None:
        self._pool = pool
        self._epochs = Epochs(pool, tables[Table.METADATA])
        self._table = tables[Table.MESSAGE]
        self._slots = slots
        #: Heads of the topics that this instance owns, by ``ns:topic:``.
        self._heads: dict[bytes, Head] = {}
        #: Of which kinds they may have system rows, as is said in HBase; none for a topic of which nothing is said.
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
            said = await self._begin_kinds(prefix, head, columns)
            claimed = head.claimed(epoch)
            if await self._swap(prefix, _cell(head), claimed.encode()):
                self._heads[prefix] = claimed
                self._slots.forget(prefix)
                self._kinds.pop(prefix, None)
                if said is None:
                    return Claim(name, epoch)
                self._kinds[prefix] = said
                return Claim(name, epoch, lacks=layout.ALL_KINDS - said)
        raise StoreError(f"topic {name} is being claimed by many instances", hint="try again")

    async def _keep_fence(self, prefix: bytes, head: Head) -> None:
        """What the head is about to lose goes into a cell of its own: it is true already, whoever claims next."""
        if head.last.serial and head.before.epoch:
            column = FENCE + encode_epoch(head.before.epoch)
            mutation = thrift.Mutation(column=column, value=encode_serial(head.before.serial))
            await self._pool.call("mutateRow", self._table, hashed(prefix), [mutation], {})

    async def _begin_kinds(self, prefix: bytes, head: Head, columns: Mapping[bytes, bytes]) -> set[bytes] | None:
        """The kinds that are said in the head's row, from the topic's first claim on; None: they are not."""
        if not layout.are_kinds_recorded(columns):
            if head.last.epoch:
                return None
            await self._say(prefix, b"")
        return layout.kinds_in(columns)

    async def say_kind(self, prefix: bytes, kind: bytes) -> None:
        """Say that the topic may have rows of this kind. Raises StoreError."""
        said = self._kinds.get(prefix)
        if said is None or kind not in said:
            await self._say(prefix, kind)
            self._kinds.get(prefix, set()).add(kind)

    def unsaid(self, claim: Claim, keys: Iterable[bytes]) -> set[bytes]:
        """The kinds of these rows, the claimed topic's, that are to be said before a commit with them takes place."""
        said = self._kinds.get(metadata_key(claim.name))
        return set() if said is None else {kind for key in keys if (kind := layout.kind_of(key))} - said

    async def _say(self, prefix: bytes, kind: bytes) -> None:
        mutation = thrift.Mutation(column=layout.KINDS_COLUMN + kind, value=layout.KIND_PRESENT)
        await self._pool.call("mutateRow", self._table, hashed(prefix), [mutation], {})

    def next_stamp(self, claim: Claim) -> Stamp:
        """What the rows of the owner's next commit carry. Raises Deposed."""
        return self._own(claim).committed().last

    async def put(self, key: bytes, value: bytes | None, claim: Claim) -> None:
        """Put a row of metadata that the claim's head governs (None: remove it), for the owner's next commit."""
        head = self._own(claim)
        await self._slots.put(key, value, head.committed().last, head)

    async def commit(self, claim: Claim) -> None:
        """Let everything that carries ``next_stamp`` count, if the claim still holds.

        Raises:
          Deposed: another one came; ``happened`` says what became of this commit.
          StoreError: nobody can say.
        """
        prefix = metadata_key(claim.name)
        head = self._own(claim)
        after = head.committed()
        row, mutation = hashed(prefix), thrift.Mutation(column=HEAD, value=after.encode())
        done, attempts = await self._pool.call_counting(
            "checkAndPut", self._table, row, HEAD, head.encode(), mutation, {}
        )
        if not done:
            now = await self.read(prefix)
            if now.last != after.last:  # else an attempt whose answer was lost has done it
                self._heads.pop(prefix, None)
                raise _deposed(claim, happened=None if attempts > 1 and now.tells(after.last) is not False else False)
        self._heads[prefix] = after

    async def check(self, claim: Claim) -> None:
        """See that the claim still holds, also while a commit of it is under way. Raises Deposed, StoreError."""
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
        """Another instance was seen to own the topic."""
        self._heads.pop(prefix, None)

    async def head_of(self, prefix: bytes) -> Head:
        """The head of the topic whose keys begin with ``prefix``; a topic of this instance's: as it knows it."""
        return (await self.heads_of([prefix]))[prefix]

    async def heads_of(self, prefixes: Iterable[bytes]) -> Mapping[bytes, Head]:
        """The heads of topics, by ``ns:topic:``."""
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
        """Put ``after`` where ``before`` is; True also when an attempt whose answer was lost has done it."""
        mutation = thrift.Mutation(column=HEAD, value=after)
        if await self._pool.call("checkAndPut", self._table, hashed(prefix), HEAD, before, mutation, {}):
            return True
        return await self._cell(prefix) == after

    async def _cell(self, prefix: bytes) -> bytes | None:
        found = await self._pool.call("get", self._table, hashed(prefix), HEAD, {})
        return found[0].value if found else None

    async def read(self, prefix: bytes) -> Head:
        """The head as HBase has it now, also of a topic of this instance's. Raises StoreError."""
        return _head_in(await self._columns(prefix))

    async def _columns(self, prefix: bytes) -> Mapping[bytes, bytes]:
        """The head's row."""
        rows = await self._pool.call("getRow", self._table, hashed(prefix), {})
        return {column: cell.value for column, cell in rows[0].columns.items()} if rows else {}


def encode_epoch(epoch: int) -> bytes:
    """As it stands in a fence's column."""
    return _EPOCH.pack(epoch)


def _deposed(claim: Claim, *, happened: Literal[False] | None = False) -> Deposed:
    return Deposed(f"topic {claim.name} is not owned in epoch {claim.epoch} any more", happened=happened)


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
# Epochs for claims: taken from one counter in blocks, so that a thousand claims are not a thousand turns at one
# row.
#
# An epoch is given once, and to one claim. A claim needs one above all that its topic ever had, which its head
# tells: of a block that others have overtaken nothing is used any more. Claims of names without a namespace, the
# services, take theirs from the counter itself: what they write where no head decides (``cells.py``) is ordered by
# epochs alone.


#: Where epochs are counted, for all topics: the last one that was given.
EPOCHS_KEY, EPOCHS_COLUMN = SYSTEM + b"o", FAMILY + b":n"
#: What an instance takes at a time; those that it does not use are nobody's.
BLOCK = 100


class Epochs:
    """Those of one instance."""

    def __init__(self, pool: Pool, counter: bytes) -> None:
        """``counter``: the table that it is in."""
        self._pool = pool
        self._counter = counter
        self._block = range(0)
        self._taking = trio.Lock()

    async def above(self, epoch: int) -> int:
        """One that is above ``epoch``, which was given before. Raises StoreError."""
        async with self._taking:
            if not self._block or self._block[-1] <= epoch:
                last = await self._count(BLOCK)
                self._block = range(last - BLOCK + 1, last + 1)
            self._block = range(max(self._block.start, epoch + 1), self._block.stop)
            taken, self._block = self._block[0], self._block[1:]
            return taken

    async def latest(self) -> int:
        """One above all that were given to whomever. Raises StoreError."""
        return await self._count(1)

    async def _count(self, step: int) -> int:
        return int(await self._pool.call("atomicIncrement", self._counter, EPOCHS_KEY, EPOCHS_COLUMN, step))
