"""How rows of the tables are shown: a table for people, one event a row for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from plainsong.cli import output
from plainsong.cli.options import show_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.job import Run


class Folder(click.Path):
    """A folder that this machine reaches as such: a path, or one as ``file:``."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As a path; fails for any other URL."""
        text = str(value)
        if text.startswith("file:"):
            text = "/" + text.removeprefix("file:").lstrip("/")
        elif "://" in text:
            self.fail(f"{text[:80]!r} is no folder; tables need one on a disk, local or mounted", param, ctx)
        return super().convert(text, param, ctx)


root_option: Final = click.option(
    "--root",
    required=True,
    metavar="DIR",
    type=Folder(),
    help="Where the tables are: a folder on a disk that all of Spark sees.",
)
limit_option: Final = click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, metavar="N", help="Rows at most."
)


def moment(place: object, option: str) -> datetime | None:
    """A time given on the command line. Raises click.BadParameter: it is no time."""
    if place is None:
        return None
    if not isinstance(place, int):
        raise click.BadParameter("a time is needed here, such as 2026-01-31 or 2h", param_hint=option)
    return datetime.fromtimestamp(place / 1000, UTC)


def show_rows(run: Run, event: str, headings: Sequence[str], rows: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Rows, by the columns of `headings` (``>`` before one of numbers), then whether there may be more.

    As many columns wide as they need where no terminal shows them: others search in them.
    """
    names = [heading.removeprefix(">") for heading in headings]
    if run.as_json:
        for row in rows:
            run.progress.event(event, row={_camel(name): _plain(value) for name, value in row.items()})
    elif rows:
        cells = [_cells(row, names) for row in rows]
        columns = None if sys.stdout.isatty() else sys.maxsize
        lines = output.table([each.replace("_", " ") for each in headings], cells, columns=columns)
        output.echo_lines(lines)
    if len(rows) >= limit:
        run.warn(f"only {limit} rows are shown, there may be more", "limited", limit=limit)


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return ["" if row[name] is None else str(_plain(row[name])) for name in names]


def _plain(value: Any) -> Any:
    """For JSON and people alike: times in UTC, ids in hex, payloads as text where they are."""
    if isinstance(value, datetime):
        return show_time(round(value.timestamp() * 1000))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _properties(inner) if name == "properties" else inner for name, inner in value.items()}
    return value


def _properties(pairs: Any) -> Any:
    """Maps come as lists of pairs out of Arrow."""
    return dict(pairs) if isinstance(pairs, list) else pairs


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)
