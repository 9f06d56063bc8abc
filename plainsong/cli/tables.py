"""Tables, sizes and counts for people, within the width of their terminal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_WIDTH = 40
#: Where nobody says how wide it is: what help is written for.
DEFAULT_WIDTH = 80
#: A column is cut only down to this.
MIN_COLUMN = 8


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int | None = None) -> list[str]:
    """Lines with two spaces between columns; the first column gives way when it is too wide.

    Args:
      headings: one for each column; one that begins with ``>`` is of numbers, set to the right.
      rows: as many texts each.
      columns: of the whole; None: the terminal's.
    """
    names = [heading.removeprefix(">") for heading in headings]
    right = [heading.startswith(">") for heading in headings]
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - (width() if columns is None else columns)
    if over > 0:
        widths[0] = max(MIN_COLUMN, widths[0] - over)
    lines = []
    for row in (names, *rows):
        cells = [_cell(text, size, is_right) for text, size, is_right in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cell(text: str, size: int, is_right: bool) -> str:
    shown = cut(text, size)
    return shown.rjust(size) if is_right else shown.ljust(size)


def cut(text: str, size: int) -> str:
    """``text`` in at most ``size`` characters, with an ellipsis where some are missing."""
    return text if len(text) <= size else text[: max(0, size - 1)] + "…"


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values below each other."""
    longest = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{longest}}  {value}".rstrip() for name, value in pairs]


def show_bytes(count: float | None) -> str:
    """A size: ``512 B``, ``1.5 KiB``, ``20 GiB``; ``-`` for None."""
    if count is None:
        return "-"
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:
            return f"{count:.1f} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    return f"{count / 1024:.1f} TiB"


def show_count(count: float | None, *, estimated: bool = False) -> str:
    """A whole number with thin groups: ``12 345``; ``~`` before an estimate, ``-`` for None."""
    return "-" if count is None else ("~" if estimated else "") + f"{count:,.0f}".replace(",", " ")


def show_rate(per_second: float) -> str:
    """How often in a second: ``0``, ``0.4/s``, ``1 200/s``."""
    if per_second < 0.05:
        return "0"
    return f"{per_second:.1f}/s" if per_second < 10 else f"{show_count(per_second)}/s"


def show_seconds(seconds: float) -> str:
    """A short time to three figures: ``12.3 µs``, ``4.56 ms``, ``1.2 s``."""
    for size, unit in ((1e-3, "µs"), (1, "ms")):
        if seconds < size:
            return f"{seconds / size * 1000:.3g} {unit}"
    return f"{seconds:.3g} s"


def echo_lines(lines: Sequence[str]) -> None:
    """Print them."""
    for line in lines:
        click.echo(line)
