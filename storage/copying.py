"""Copies one store into another: checks, writes part by part, compares, and resumes after a crash.

    look       reads every row of the source once: figures, a digest, the largest row; checks that the target has room
    write      part by part, several at a time; claims each on both sides, which deposes a daemon that is still running
    compare    reads the target once: the digests must be equal, or the copy is not complete
    tidy up    removes the rows about the progress of topics; the copy's own row then records that it is done

A copy that was killed continues when it is run again with the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import (
    NAMESPACE,
    SYSTEM,
    metadata_key,
    topic_prefix,
)
from plainsong.protocol.transactions.ledger_rows import AUTHORITY, SERVICE_RANGE, service_key
from storage.base import NAMESPACES_NAME, SERVICE_NAME, Deposed, StoreError, StoreUnusable, read_rows
from storage.copy_parts import (
    COMPARED,
    COPY_KEY,
    DONE,
    OTHERS_NAME,
    WRITING,
    CopyRow,
    Figures,
    Part,
    TopicRow,
    contents_of,
    copy_row,
    parts_of,
    survey,
    topic_key,
    topic_row,
)
from storage.damage import TAIL_BYTES
from storage.gather import gather
from storage.inspect.describe import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.names import TopicName
    from storage.base import Claim, Row, Store
    from storage.copy_parts import Contents, Span


class StoresDiffer(StoreError):
    """The two stores differ: the copy is not complete, or one of them has been written to since."""

    title = "The two stores differ"


@dataclass(frozen=True, slots=True)
class PartComparison:
    """The figures of a part on both sides."""

    part: Part
    source: Figures
    target: Figures

    @property
    def is_same(self) -> bool:
        """True if both sides have the same rows."""
        return self.source.digest == self.target.digest


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """The arguments of a copy."""

    origin: str
    """The source's name, which identifies the copy in a later run."""
    topics: tuple[TopicName, ...] | None = None
    """The topics to copy; None: everything."""

    def row(self) -> CopyRow:
        """Return the row that the target keeps about the copy."""
        return CopyRow(self.origin, None if self.topics is None else tuple(map(str, self.topics)))


class CopyRun:
    """One run of a copy.

    Args:
      on_rows: called with a stage (``look``, ``write``, ``compare``) and the number of rows just done; from any thread.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        request: CopyRequest,
        *,
        on_rows: Callable[[str, int], None] = lambda stage, rows: None,
    ) -> None:
        self._source = source
        self._target = target
        self._request = request
        self._on_rows = on_rows
        self._claims: dict[TopicName, Claim] = {}

    async def look(self) -> dict[Part, Figures]:
        """Return the source's parts with their figures.

        Raises:
          StoreUnusable: a chosen topic does not exist.
          StoreError: it cannot be read.
        """
        return await self._figures(self._source, await self._parts(), "look")

    async def refuse(self, found: dict[Part, Figures]) -> None:
        """Check that the copy is possible. Raises StoreUnusable if not; nothing was changed."""
        refuse_rows_too_large(found, self._target.traits.max_row_bytes)
        if not self._is_ours(await copy_row(self._target)):
            await refuse_without_room(self._source, self._target, found)

    def _is_ours(self, row: CopyRow | None) -> bool:
        """True if the target has begun this copy. Raises StoreUnusable: it has begun a different one."""
        if row is None or (row.state == DONE and not row.is_same(self._request.row())):
            return False
        if not row.is_same(self._request.row()):
            raise StoreUnusable(
                f"a copy of {row.origin} into the target is not complete",
                hint="run that copy again first, or name an empty target",
            )
        return True

    async def run(self, now_ms: Callable[[], int]) -> list[PartComparison] | None:
        """Copy, compare and tidy up. Returns None, without changes, if this copy was completed before.

        Raises:
          StoreUnusable: the copy is impossible; nothing was changed.
          Deposed: a daemon on one of the stores has claimed a part.
          StoresDiffer: the target differs after the copy, so it is not complete.
          StoreError: run it again to continue.
        """
        row = await copy_row(self._target)
        again = self._is_ours(row)
        if row is not None and again and row.state == DONE:
            return None
        found = await self.look()
        await self.refuse(found)
        if row is None or not again:
            service = self._request.topics is None or not await has_service(self._target)
            row = replace(self._request.row(), service=service, begun_ms=now_ms())
            await self._keep(row)
        found = _to_copy(found, row)
        if row.state == WRITING:
            await gather(partial(self._write, part) for part in found)
        compared = await self.compare(found)
        refuse_differences(compared)
        row = replace(row, state=COMPARED, ended_ms=row.ended_ms or now_ms())
        await self._keep(row)
        await gather(partial(self._tidy_up, part.name) for part in found if part.is_topic)
        await self._keep(replace(row, state=DONE))
        return compared

    async def verify(self) -> list[PartComparison]:
        """Compare both sides without changing anything. Raises StoreUnusable, StoreError."""
        found = await self.look()
        row = await copy_row(self._target)
        return await self.compare(found if row is None else _to_copy(found, row))

    async def compare(self, found: dict[Part, Figures]) -> list[PartComparison]:
        """Compare the parts on both sides. Raises StoreError."""
        there = await self._figures(self._target, list(found), "compare")
        for claim in self._claims.values():
            await self._source.check(claim)
        return [PartComparison(part, found[part], there[part]) for part in found]

    async def _parts(self) -> list[Part]:
        """Return the source's parts. Their spans cover every kind of rows that either side has."""
        contents, there = await contents_of(self._source), await contents_of(self._target)
        self._refuse_missing(contents)
        return parts_of(contents, self._request.topics, contents.kinds | there.kinds)

    def _refuse_missing(self, contents: Contents) -> None:
        missing = [name for name in self._request.topics or () if metadata_key(name) not in contents.topics]
        if missing:
            raise StoreUnusable(f"the source has no topic {missing[0]}", hint="`plainsong store explain` lists them")

    async def _figures(self, store: Store, parts: Sequence[Part], stage: str) -> dict[Part, Figures]:
        found: dict[Part, Figures] = {}

        async def look_at(part: Part) -> None:
            found[part] = await survey(store, part, partial(self._on_rows, stage))

        await gather(partial(look_at, part) for part in parts)
        return {part: found[part] for part in parts}

    async def _write(self, part: Part) -> None:
        source = await self._source.claim(part.name)
        target = await self._target.claim(part.name)
        self._claims[part.name] = source
        try:
            await PartWriter(self._source, self._target, part, target, partial(self._on_rows, "write")).run()
            await self._source.check(source)
        except Deposed as error:
            raise Deposed(
                f"a daemon took over {part.label} while it was being copied",
                hint=(
                    "stop the daemons of both stores, and run this again: it continues, unless they changed copied rows"
                ),
            ) from error

    async def _tidy_up(self, name: TopicName) -> None:
        if await topic_row(self._target, name) is not None:
            claim = await self._target.claim(name)
            await self._target.write([Delete(Table.METADATA, [topic_key(name)])], claim=claim)

    async def _keep(self, row: CopyRow) -> None:
        claim = await self._target.claim(OTHERS_NAME)
        await self._target.write([put_one(Table.METADATA, COPY_KEY, row.encode())], claim=claim)


def _to_copy(found: dict[Part, Figures], row: CopyRow) -> dict[Part, Figures]:
    return {part: figures for part, figures in found.items() if row.service or part.name != SERVICE_NAME}


def refuse_differences(compared: Sequence[PartComparison]) -> None:
    """Raise StoresDiffer if any part differs."""
    if different := [each.part.label for each in compared if not each.is_same]:
        shown = ", ".join(different[:MAX_NAMED]) + (" and others" if len(different) > MAX_NAMED else "")
        raise StoresDiffer(
            f"{shown}: the target's rows differ from the source's",
            hint=(
                "one of the two stores was changed after the copy: stop the daemon that writes to it, and copy into "
                "an empty target"
            ),
        )


# --- checks of the target: no row is too large for it, and it has no conflicting rows --------------


#: Maximum number of names in an error about many parts.
MAX_NAMED = 5
#: More than any store has.
_MAX_NAMESPACES = 100_000


def refuse_rows_too_large(found: Mapping[Part, Figures], max_row_bytes: int | None) -> None:
    """Raise StoreUnusable for the largest row if the target cannot hold it."""
    if max_row_bytes is None:
        return
    part, most = max(found.items(), key=lambda each: each[1].largest_bytes)
    if most.largest is not None and most.largest_bytes > max_row_bytes:
        table, key = most.largest
        row = describe(table, key, b"")
        where = row.fields.get("id") or key.hex()
        raise StoreUnusable(
            f"{part.label}: row {where} of the {table.name.lower()} table has {most.largest_bytes} bytes, and the "
            f"target takes at most {max_row_bytes}",
            hint="raise storage.hbase.max_cell_bytes, and hbase.client.keyvalue.maxsize with it",
        )


async def refuse_without_room(source: Store, target: Store, found: Mapping[Part, Figures]) -> None:
    """Raise StoreUnusable if the target already has rows of a part to copy."""
    there = await contents_of(target)
    taken = [part.label for part in found if part.is_topic and metadata_key(part.name) in there.topics]
    if taken:
        shown = ", ".join(taken[:MAX_NAMED]) + (f" and {len(taken) - MAX_NAMED} more" if len(taken) > MAX_NAMED else "")
        raise StoreUnusable(
            f"the target has topics of the same names: {shown}",
            hint="name an empty target: another directory, or another table prefix. The name of a deleted topic "
            "counts too, so that no id is assigned twice; `backup restore --as` renames one topic",
        )
    for part in found:
        if part.name == NAMESPACES_NAME:
            await _refuse_other_namespaces(source, target, part)
    if await has_service(target):
        _refuse_other_service(found)


async def has_service(store: Store) -> bool:
    """True if transactions have begun on this store. A row that only names the authority does not count."""
    rows = await read_rows(store, Table.METADATA, *SERVICE_RANGE, limit=2, values=False)
    return any(key != service_key(AUTHORITY) for key, _ in rows)


async def _refuse_other_namespaces(source: Store, target: Store, part: Part) -> None:
    for span in part.spans:
        for key, value in await read_rows(target, span.table, span.start, span.stop, limit=_MAX_NAMESPACES):
            if await source.get(span.table, key) != value:
                name = key.removeprefix(SYSTEM + NAMESPACE).decode("ascii", "replace").rstrip(":")
                raise StoreUnusable(
                    f"namespace {name} has other properties in the target",
                    hint=("set the same values on both sides"),
                )


def _refuse_other_service(found: Mapping[Part, Figures]) -> None:
    """Raise StoreUnusable: the target's transaction service lacks the transactions of the source's messages."""
    transactional = [part.label for part, figures in found.items() if part.is_topic and figures.transactional]
    if transactional:
        raise StoreUnusable(
            "the target has its own transaction service, which does not know the transactions of messages in "
            f"{transactional[0]}",
            hint="name an empty target, or wait until those messages have expired",
        )


# --- writing one part, step by step ----------------------------------------------------------------
#
# The rows of a step are in one commit with the topic's progress row, so no step is written twice. Rows of metadata are
# few, and writing them again is harmless.


#: Bounds of a step. A larger row is a separate step.
STEP_ROWS = 10_000
STEP_BYTES = 4 << 20


class PartWriter:
    """Writes one part, claimed on both sides."""

    def __init__(self, source: Store, target: Store, part: Part, claim: Claim, on_rows: Callable[[int], None]) -> None:
        """``claim`` is a claim of the part's name on the target."""
        self._source = source
        self._target = target
        self._part = part
        self._claim = claim
        self._on_rows = on_rows

    async def run(self) -> None:
        """Write the rows that are still missing.

        Raises:
          Deposed: a daemon has claimed the part.
          StoreError: reading or writing failed; rows already written stay, and are not written again.
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
            elif span.table is not Table.PAYLOAD:  # payloads are written first, so they are complete
                await self._steps(span, span.start, marked=True)
        await self._write([self._mark(TopicRow(Table.METADATA, complete=True))])

    async def _remove_what_is_not_there(self) -> None:
        """Remove rows that the source lacks: the target may name an authority while the source names none."""
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
            self._on_rows(len(rows))
            start = last + b"\x00"

    async def _write(self, commit: Sequence[Operation]) -> None:
        await self._target.write(commit, claim=self._claim)

    def _mark(self, row: TopicRow) -> Operation:
        return put_one(Table.METADATA, topic_key(self._part.name), row.encode())


async def step_of(store: Store, span: Span, start: bytes) -> tuple[list[Row], bool]:
    """Return the rows of a step from ``start`` on, and True if more may follow. Raises StoreError."""
    rows: list[Row] = []
    size = 0
    more = False

    def take(chunk: Sequence[Row]) -> bool:
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
    """Yield the puts for the rows, one for each generation or write pointer, as the daemon writes them.

    A store packs the rows of a put, so no later row may belong between two of them.
    """
    for prefix, found in groupby(rows, key=lambda row: _prefix(table, row[0])):
        together = list(found)
        at = len(prefix)
        yield Put(table, prefix, [key[at:] for key, _ in together], [value for _, value in together])


def _prefix(table: Table, key: bytes) -> bytes:
    topic = topic_prefix(key)
    placed = topic and len(key) - len(topic) == TAIL_BYTES.get(table)
    return key[:-POSITION_BYTES] if placed else key
