"""The manifest: the one file that names the parts of all tables, and the last message that they tell of.

A new manifest is renamed over the old one, after everything that it names is on disk. So a reader has all tables as they
were after one batch of messages, whenever it reads; and a process that is killed has either replaced the manifest or not.
Files in the folder that the manifest does not name are not part of the tables.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from plainsong.cli.verb import CommandFailed, Exit
from pyspark_plainsong.pipeline.files import LocalFiles

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
#: Held by the one that keeps the tables.
LOCK: Final = "lock"
#: All that a first run leaves that is killed before its manifest is there.
_BEGUN: Final = re.compile(rf"{LOCK}|\.{re.escape(MANIFEST)}\.\d+\.tmp")


class TablesUnreadable(CommandFailed):
    """The folder holds no tables, or tables of a form that this version does not know. Nothing was changed."""


class FolderTaken(CommandFailed):
    """The folder holds other things than tables. Nothing was changed."""


@dataclass(frozen=True)
class Part:
    """Some rows of a table: Parquet files in one folder, `path`, both relative to the tables' folder."""

    table: str
    path: str
    files: tuple[str, ...]
    rows: int
    bytes: int
    #: How often its rows were merged: parts of one level are merged into one of the next.
    level: int = 0


@dataclass(frozen=True)
class Retired:
    """A part's folder that was merged into another, kept for those who read by an older manifest."""

    path: str
    at_ms: int


@dataclass(frozen=True)
class TablesManifest:
    """All parts of all tables; the last message of each topic (`namespace:name` → hex of its id) that they tell of."""

    sequence: int = 0
    through: dict[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    retired: tuple[Retired, ...] = ()
    #: Which life of a topic's name (its generation) the last message is of.
    lives: dict[str, int] = field(default_factory=dict)

    def living(self, lives: dict[str, int]) -> TablesManifest:
        """What follows when topics are in these lives: of a topic that was made again nothing is known yet."""
        again = {topic for topic, life in lives.items() if self.lives.get(topic, life) != life}
        through = {topic: last for topic, last in self.through.items() if topic not in again}
        return replace(self, through=through, lives={**self.lives, **lives})

    def of(self, table: str) -> list[Part]:
        """The parts of a table, oldest first."""
        return [part for part in self.parts if part.table == table]

    def rows(self, table: str) -> int:
        """Rows in a table's parts: the table's own number, or for one of totals at least that."""
        return sum(part.rows for part in self.of(table))

    def adding(self, parts: list[Part], through: dict[str, str]) -> TablesManifest:
        """What follows when a batch of messages is in `parts`."""
        return replace(
            self,
            sequence=self.sequence + 1,
            through={**self.through, **through},
            parts=(*self.parts, *parts),
        )

    def merging(self, old: list[Part], new: Part, now_ms: int) -> TablesManifest:
        """What follows when `old` have become `new`."""
        gone = {part.path for part in old}
        return replace(
            self,
            sequence=self.sequence + 1,
            parts=(*(part for part in self.parts if part.path not in gone), new),
            retired=(*self.retired, *(Retired(path, now_ms) for path in sorted(gone))),
        )


def load_manifest(root: Path) -> TablesManifest | None:
    """The manifest of the tables in a folder; None where there are none yet. Raises TablesUnreadable."""
    path = root / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise TablesUnreadable(f"{path} is no manifest of version {VERSION}: {error!r}", code=Exit.STORE) from error


def first_look(root: Path) -> TablesManifest:
    """The manifest of a folder that tables are kept in, or are to be; an empty one where there are none yet.

    Raises FolderTaken, and TablesUnreadable.
    """
    present = sorted(each.name for each in root.iterdir()) if root.is_dir() else []
    manifest = load_manifest(root)
    others = [name for name in present if not _BEGUN.fullmatch(name)]
    if manifest is None and others:
        raise FolderTaken(
            f"{root} has no {MANIFEST}, but {len(others)} other {'thing' if len(others) == 1 else 'things'} such as "
            f"{others[0]!r}",
            hint="name a new folder, or an empty one; to begin anew, take everything out of it",
            code=Exit.USAGE,
        )
    return manifest or TablesManifest()


def store_manifest(root: Path, manifest: TablesManifest) -> None:
    """Replace the manifest. When this returns, power may fail; when it raises, either one may be there."""
    text = json.dumps({"version": VERSION, **asdict(manifest)}, indent=1)
    LocalFiles(root).write(MANIFEST, text.encode())


def _parse(fields: dict[str, Any]) -> TablesManifest:
    if fields["version"] != VERSION:
        raise ValueError(f"version {fields['version']}")
    return TablesManifest(
        sequence=fields["sequence"],
        through=dict(fields["through"]),
        parts=tuple(Part(**{**each, "files": tuple(each["files"])}) for each in fields["parts"]),
        retired=tuple(Retired(**each) for each in fields["retired"]),
        lives=dict(fields["lives"]),
    )
