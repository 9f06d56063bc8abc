"""A copy from one store into another: looked at, refused or written, compared, and tidied up.

    look       every row of the source read once: figures, a digest, the largest row; is there room in the target?
    write      part by part, some at a time; each claimed on both sides, so that whoever forgot to leave is deposed
    compare    the target read once: the same digests, or the copy is not complete
    tidy up    the rows that said how far topics had come go; the copy's own says that it is done

Killed anywhere, it is run again with the same words, and goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from protocol.effects import Delete, Table, put_one
from protocol.keys import metadata_key
from storage.base import Deposed, StoreError, StoreUnusable
from storage.copying.parts import OTHERS_NAME, SERVICE_NAME, Part, contents_of, parts_of
from storage.copying.progress import COMPARED, COPY_KEY, DONE, WRITING, CopyRow, copy_row, topic_key, topic_row
from storage.copying.room import MAX_NAMED, has_service, refuse_rows_too_large, refuse_without_room
from storage.copying.surveying import Figures, survey
from storage.copying.writing import Writing
from storage.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.names import TopicName
    from storage.base import Claim, Store
    from storage.copying.parts import Contents


class NotTheSame(StoreError):
    """The two stores differ: the copy is not complete, or one of them was written since."""

    title = "The two stores differ"


@dataclass(frozen=True, slots=True)
class Compared:
    """A part on both sides."""

    part: Part
    source: Figures
    target: Figures

    @property
    def is_same(self) -> bool:
        """Whether every row of it is."""
        return self.source.digest == self.target.digest


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted."""

    origin: str
    """The source's name, by which the same copy is known again."""
    topics: tuple[TopicName, ...] | None = None
    """Those to copy; None: everything."""

    def row(self) -> CopyRow:
        """As the target remembers it."""
        return CopyRow(self.origin, None if self.topics is None else tuple(map(str, self.topics)))


class Copying:
    """One run of a copy.

    Args:
      tell: how many rows of which stage (``look``, ``write``, ``compare``) were just done; called from any thread.
    """

    def __init__(
        self, source: Store, target: Store, asked: Asked, *, tell: Callable[[str, int], None] = lambda stage, rows: None
    ) -> None:
        self._source = source
        self._target = target
        self._asked = asked
        self._tell = tell
        self._claims: dict[TopicName, Claim] = {}

    async def look(self) -> dict[Part, Figures]:
        """Every part of the source, and what it has.

        Raises:
          StoreUnusable: a chosen topic is not there.
          StoreError: it cannot be read.
        """
        return await self._figures(self._source, await self._parts(), "look")

    async def refuse(self, found: dict[Part, Figures]) -> None:
        """See that the copy can be made. Raises StoreUnusable: it cannot, and why; nothing was changed."""
        refuse_rows_too_large(found, self._target.traits.max_row_bytes)
        if not self._is_ours(await copy_row(self._target)):
            await refuse_without_room(self._source, self._target, found)

    def _is_ours(self, row: CopyRow | None) -> bool:
        """Whether the target has begun with this very copy. Raises StoreUnusable: with another one."""
        if row is None or (row.state == DONE and not row.is_same(self._asked.row())):
            return False
        if not row.is_same(self._asked.row()):
            raise StoreUnusable(
                f"a copy of {row.origin} into the target is not complete",
                hint="run that one again first, or name an empty target",
            )
        return True

    async def run(self, now_ms: Callable[[], int]) -> list[Compared] | None:
        """Copy, compare and tidy up; None: this copy was done before, and nothing was changed.

        Raises:
          StoreUnusable: it cannot be done; nothing was changed.
          Deposed: somebody else owns a part: a daemon runs on one of the stores.
          NotTheSame: it was copied and differs, so it is not complete.
          StoreError: run it again, and it goes on.
        """
        row = await copy_row(self._target)
        again = self._is_ours(row)
        if row is not None and again and row.state == DONE:
            return None
        found = await self.look()
        await self.refuse(found)
        if row is None or not again:
            service = self._asked.topics is None or not await has_service(self._target)
            row = replace(self._asked.row(), service=service, begun_ms=now_ms())
            await self._keep(row)
        found = _to_copy(found, row)
        if row.state == WRITING:
            await together(partial(self._write, part) for part in found)
        compared = await self.compare(found)
        refuse_differences(compared)
        row = replace(row, state=COMPARED, ended_ms=row.ended_ms or now_ms())
        await self._keep(row)
        await together(partial(self._tidy_up, part.name) for part in found if part.is_topic)
        await self._keep(replace(row, state=DONE))
        return compared

    async def verify(self) -> list[Compared]:
        """Compare both sides as they are, and change nothing. Raises StoreUnusable, StoreError."""
        found = await self.look()
        row = await copy_row(self._target)
        return await self.compare(found if row is None else _to_copy(found, row))

    async def compare(self, found: dict[Part, Figures]) -> list[Compared]:
        """The parts of both sides. Raises StoreError."""
        there = await self._figures(self._target, list(found), "compare")
        for claim in self._claims.values():
            await self._source.check(claim)
        return [Compared(part, found[part], there[part]) for part in found]

    async def _parts(self) -> list[Part]:
        """Of the source; their spans have room for every kind of rows that either side has."""
        contents, there = await contents_of(self._source), await contents_of(self._target)
        self._refuse_missing(contents)
        return parts_of(contents, self._asked.topics, contents.kinds | there.kinds)

    def _refuse_missing(self, contents: Contents) -> None:
        missing = [name for name in self._asked.topics or () if metadata_key(name) not in contents.topics]
        if missing:
            raise StoreUnusable(f"the source has no topic {missing[0]}", hint="`plainsong store explain` lists them")

    async def _figures(self, store: Store, parts: Sequence[Part], stage: str) -> dict[Part, Figures]:
        found: dict[Part, Figures] = {}

        async def look_at(part: Part) -> None:
            found[part] = await survey(store, part, partial(self._tell, stage))

        await together(partial(look_at, part) for part in parts)
        return {part: found[part] for part in parts}

    async def _write(self, part: Part) -> None:
        source = await self._source.claim(part.name)
        target = await self._target.claim(part.name)
        self._claims[part.name] = source
        try:
            await Writing(self._source, self._target, part, target, partial(self._tell, "write")).run()
            await self._source.check(source)
        except Deposed as error:
            raise Deposed(
                f"{part.label} was taken over by a daemon while it was copied",
                hint="stop the daemons of both stores, and run this again: it goes on, unless they wrote what was copied",
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


def refuse_differences(compared: Sequence[Compared]) -> None:
    """Raise NotTheSame when any part differs."""
    if different := [each.part.label for each in compared if not each.is_same]:
        shown = ", ".join(different[:MAX_NAMED]) + (" and others" if len(different) > MAX_NAMED else "")
        raise NotTheSame(
            f"{shown}: the target has other rows than the source",
            hint="one of them was written since it was copied: stop what writes there, and copy into an empty target",
        )
