"""Output of verbs: JSON for programs, tables and notes for people, questions before something is deleted, progress.

What a verb says: JSON for programs on standard output, notes for people on standard error.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Sequence


def echo_json(value: Any) -> None:
    """One JSON document, on one line."""
    click.echo(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def note(text: str) -> None:
    """A line for the person, when there is one at the terminal."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def confirmed(question: str, *, yes: bool) -> None:
    """Ask before something is taken away.

    Raises:
      CommandFailed: nobody is there to be asked, and ``--yes`` was not given. click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(f"nobody is here to answer: {question}", hint="--yes answers it", code=Exit.USAGE)
    click.confirm(question, abort=True, err=True)


def harmless(text: str) -> str:
    """Somebody else's text on one line: what a terminal would act upon is shown as its code."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def named(names: Sequence[str]) -> str:
    """``a, b and c``; of many the first few, and how many more."""
    if len(names) > 6:
        return ", ".join(names[:5]) + f" and {len(names) - 5} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# --- tables ----------------------------------------------------------------------------------------
#
# Tables, sizes and counts for people, within the width of their terminal.


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


# --- progress --------------------------------------------------------------------------------------
#
# A line on standard error that says how far a long command has come.


#: Progress is shown after this, and so often.
PROGRESS_AFTER_S = 1.0
PROGRESS_EVERY_S = 0.25


class Progress:
    """A line on standard error that says how far it has come; nothing before a second has passed.

    Args:
      total_bytes: of the input, where that is known.
      wanted: whether somebody is there to see it.
    """

    def __init__(self, total_bytes: int | None, *, wanted: bool) -> None:
        self._total = total_bytes
        self._wanted = wanted
        self._began_s = time.monotonic()
        self._shown_s = self._began_s + PROGRESS_AFTER_S - PROGRESS_EVERY_S
        self._is_shown = False

    def show(self, messages: int, read_bytes: int) -> None:
        """Write the line again, if it is time."""
        now_s = time.monotonic()
        if not self._wanted or now_s - self._shown_s < PROGRESS_EVERY_S:
            return
        self._shown_s = now_s
        self._is_shown = True
        part = f" ({min(100, 100 * read_bytes // self._total)} %)" if self._total else ""
        rate = messages / (now_s - self._began_s)
        line = f"{show_count(messages)} messages, {show_bytes(read_bytes)}{part}, {show_count(rate)}/s"
        click.echo(f"\r{line}\x1b[K", err=True, nl=False, color=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
            self._is_shown = False
