"""One part written into the target, step by step; what a step has written is never written again.

The rows of a step are one commit with the row that says how far the topic has come. Rows of metadata are few, and are
put as they are to be however often.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, Table, put_one
from protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES, topic_prefix
from storage.copying.parts import SERVICE_NAME
from storage.copying.progress import TopicRow, topic_key, topic_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol.effects import Operation
    from storage.base import Claim, Row, Store
    from storage.copying.parts import Part, Span

#: What a step has at most; a larger row is a step of its own.
STEP_ROWS = 10_000
STEP_BYTES = 4 << 20
_TAIL_BYTES = {Table.MESSAGE: MESSAGE_TAIL_BYTES, Table.PAYLOAD: PAYLOAD_TAIL_BYTES}
#: Of time and sequence id, with which both kinds of keys end.
_POSITION_BYTES = 10


class Writing:
    """Writes one part, claimed on both sides."""

    def __init__(self, source: Store, target: Store, part: Part, claim: Claim, tell: Callable[[int], None]) -> None:
        """``claim``: of the part's name, at the target."""
        self._source = source
        self._target = target
        self._part = part
        self._claim = claim
        self._tell = tell

    async def run(self) -> None:
        """Write what is not there yet.

        Raises:
          Deposed: somebody else has claimed the part.
          StoreError: reading or writing failed; what was written stays, and is not written again.
        """
        if not self._part.is_topic:
            if self._part.name == SERVICE_NAME:
                await self._remove_what_is_not_there()
            for span in self._part.spans:
                await self._steps(span, span.start, marked=False)
            return
        begun = await topic_row(self._target, self._part.name) or TopicRow()
        if begun.complete:
            return
        for span in self._part.spans:
            if span.table is Table.METADATA:
                await self._steps(span, span.start, marked=False)
            elif span.table is begun.table:
                await self._steps(span, max(span.start, begun.key + b"\x00"), marked=True)
            elif span.table is not Table.PAYLOAD:  # payloads go first: they are complete
                await self._steps(span, span.start, marked=True)
        await self._write([self._mark(TopicRow(Table.METADATA, complete=True))])

    async def _remove_what_is_not_there(self) -> None:
        """The target may say who decides about transactions, and the source nothing."""
        for span in self._part.spans:
            there, _ = await step_of(self._target, span, span.start)
            wanted = {key for key, _ in (await step_of(self._source, span, span.start))[0]}
            gone = [key for key, _ in there if key not in wanted]
            if gone:
                await self._write([Delete(Table.METADATA, gone)])

    async def _steps(self, span: Span, start: bytes, *, marked: bool) -> None:
        more = True
        while more:
            rows, more = await step_of(self._source, span, start)
            if not rows:
                return
            last = rows[-1][0]
            mark = [self._mark(TopicRow(span.table, last))] if marked else []
            await self._write([*puts(span.table, rows), *mark])
            self._tell(len(rows))
            start = last + b"\x00"

    async def _write(self, commit: Sequence[Operation]) -> None:
        await self._target.write(commit, claim=self._claim)

    def _mark(self, row: TopicRow) -> Operation:
        return put_one(Table.METADATA, topic_key(self._part.name), row.encode())


async def step_of(store: Store, span: Span, start: bytes) -> tuple[list[Row], bool]:
    """The rows of a step from ``start`` on, and whether there may be more behind them. Raises StoreError."""
    rows: list[Row] = []
    size = 0
    more = False

    def take(chunk: list[Row]) -> bool:
        nonlocal size, more
        for row in chunk:
            size += len(row[1])
            if rows and (len(rows) == STEP_ROWS or size > STEP_BYTES):
                more = True
                return False
            rows.append(row)
        return True

    await store.scan(span.table, start, span.stop, take, first_chunk=1000)
    return rows, more


def puts(table: Table, rows: Sequence[Row]) -> Iterator[Put]:
    """What stores the rows; those of one generation, or of one write pointer, together, as the daemon writes them.

    A store that packs the rows of a put must find nothing between two of them later on.
    """
    for prefix, found in groupby(rows, key=lambda row: _prefix(table, row[0])):
        together = list(found)
        at = len(prefix)
        yield Put(table, prefix, [key[at:] for key, _ in together], [value for _, value in together])


def _prefix(table: Table, key: bytes) -> bytes:
    topic = topic_prefix(key)
    placed = topic and len(key) - len(topic) == _TAIL_BYTES.get(table)
    return key[:-_POSITION_BYTES] if placed else key
