"""The manifest: the one file that names the parts of all tables, and the last message of each topic in them.

A new manifest is renamed over the old one after everything that it names is on disk. So a reader always gets all tables
as of the same batch, and replacing the manifest is atomic even if the process is killed. Files that the manifest does
not name are not part of the tables.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.files import LocalFiles

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST: Final = "manifest.json"
VERSION: Final = 1
#: The lock of the writer.
LOCK: Final = "lock"
#: Files that a run leaves if it is killed before it writes the first manifest.
_BEGUN: Final = re.compile(rf"{LOCK}|\.{re.escape(MANIFEST)}\.\d+\.tmp")


class TablesUnreadable(CommandFailed):
    """The folder has no tables, or tables of an unknown version. Nothing was changed."""


class FolderTaken(CommandFailed):
    """The folder contains something other than tables. Nothing was changed."""


@dataclass(frozen=True)
class Part:
    """Some rows of a table: Parquet files in one folder, all paths relative to the tables' folder."""

    table: str
    path: str
    files: tuple[str, ...]
    rows: int
    bytes: int
    #: Number of merges of its rows: parts of one level are merged into one of the next.
    level: int = 0


@dataclass(frozen=True)
class Retired:
    """The folder of a part that was merged, kept for readers with an older manifest."""

    path: str
    at_ms: int


@dataclass(frozen=True)
class TablesManifest:
    """All parts of all tables, and the id (in hex) of the last message of each topic (``namespace:name``) in them."""

    sequence: int = 0
    through: dict[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    retired: tuple[Retired, ...] = ()
    #: The generation of each topic's last message.
    lives: dict[str, int] = field(default_factory=dict)

    def living(self, lives: dict[str, int]) -> TablesManifest:
        """Return the manifest for topics of these generations, without the messages of topics that were created again."""
        again = {topic for topic, life in lives.items() if self.lives.get(topic, life) != life}
        through = {topic: last for topic, last in self.through.items() if topic not in again}
        return replace(self, through=through, lives={**self.lives, **lives})

    def of(self, table: str) -> list[Part]:
        """Return the parts of a table, oldest first."""
        return [part for part in self.parts if part.table == table]

    def rows(self, table: str) -> int:
        """Return the rows in a table's parts: an upper bound if the table has keys, since its parts are subtotals."""
        return sum(part.rows for part in self.of(table))

    def adding(self, parts: list[Part], through: dict[str, str]) -> TablesManifest:
        """Return the manifest after a batch of messages with its rows in ``parts``."""
        return replace(
            self,
            sequence=self.sequence + 1,
            through={**self.through, **through},
            parts=(*self.parts, *parts),
        )

    def merging(self, old: list[Part], new: Part, now_ms: int) -> TablesManifest:
        """Return the manifest after the parts ``old`` were merged into ``new``."""
        gone = {part.path for part in old}
        return replace(
            self,
            sequence=self.sequence + 1,
            parts=(*(part for part in self.parts if part.path not in gone), new),
            retired=(*self.retired, *(Retired(path, now_ms) for path in sorted(gone))),
        )


def load_manifest(root: Path) -> TablesManifest | None:
    """Load the manifest in a folder; None if there are no tables yet. Raises TablesUnreadable."""
    path = root / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise TablesUnreadable(f"{path} is not a manifest of version {VERSION}: {error!r}", code=Exit.STORE) from error


def first_look(root: Path) -> TablesManifest:
    """Load the manifest of a folder for tables; an empty one if there are no tables yet.

    Raises:
      FolderTaken, TablesUnreadable: nothing was changed.
    """
    present = sorted(each.name for each in root.iterdir()) if root.is_dir() else []
    manifest = load_manifest(root)
    others = [name for name in present if not _BEGUN.fullmatch(name)]
    if manifest is None and others:
        raise FolderTaken(
            f"{root} has no {MANIFEST}, but {len(others)} other {'thing' if len(others) == 1 else 'things'} such as "
            f"{others[0]!r}",
            hint="name a new or empty folder; to start over, remove everything from it",
            code=Exit.USAGE,
        )
    return manifest or TablesManifest()


def store_manifest(root: Path, manifest: TablesManifest) -> None:
    """Replace the manifest durably. After an error, either the old or the new one is in place."""
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
