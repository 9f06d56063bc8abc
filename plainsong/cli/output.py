"""Output of verbs: JSON for programs, tables and notes for people, questions before something is deleted, progress."""

from __future__ import annotations

import json
import os
import select
import shutil
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.plurals import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def echo_json(value: Any) -> None:
    """Prints one JSON document on one line of standard output."""
    encoding = sys.stdout.encoding or ""
    # Characters outside the terminal's encoding become JSON escapes.
    click.echo(json.dumps(value, ensure_ascii=encoding.lower() not in ("utf-8", "utf8"), separators=(",", ":")))


def note(text: str) -> None:
    """Prints a line for a person on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def report(text: str) -> None:
    """Prints a line on standard error, terminal or not: for lines that belong in a script's log, such as a warning."""
    word, colon, rest = text.partition(":")
    click.echo(coloured(word + colon, word, err=True) + rest, err=True)


def confirmed(question: str, *, yes: bool) -> None:
    """Asks before something is deleted.

    Raises:
      CommandFailed: stdin is not a terminal, and ``--yes`` was not given; or the answer is no. click.Abort: Ctrl-C.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(
            f"confirmation needed, but stdin is not a terminal: {question}", hint="--yes confirms it", code=Exit.USAGE
        )
    if not click.confirm(question, err=True):
        raise CommandFailed("not confirmed: nothing was changed")


#: The colours of important words on a terminal.
COLOURS = {"error": "red", "BAD": "red", "critical": "red", "WARN": "yellow", "warning": "yellow", "hint": "cyan"}


def coloured(text: str, word: str, *, err: bool = False) -> str:
    """Returns ``text`` in the colour of a word of ``COLOURS``, if it goes to a terminal and NO_COLOR is not set."""
    stream = sys.stderr if err else sys.stdout
    if word not in COLOURS or os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return click.style(text, fg=COLOURS[word], bold=word != "hint")


def escaped(text: str) -> str:
    """Returns ``text`` on one line, with characters that would control a terminal written as codes."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def named(names: Sequence[str]) -> str:
    """``a, b and c``; of more than six names the first five, and how many more."""
    if len(names) > 6:
        return ", ".join(names[:5]) + f" and {len(names) - 5} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class Reader:
    """The program that reads standard output, if that is a pipe. A verb that follows something ends with this program."""

    def __init__(self) -> None:
        self.has_left = False

    @contextmanager
    def watched(self, stop: Callable[[], object]) -> Iterator[None]:
        """Calls ``stop`` as soon as the reader leaves, from another thread."""
        try:
            number = sys.stdout.fileno()
            is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)
        except (OSError, ValueError):
            is_pipe = False
        if is_pipe:
            with suppress(RuntimeError):  # the system refuses a thread: printing the next line will fail instead
                threading.Thread(target=self._watch, args=(number, stop), daemon=True).start()
        yield

    def _watch(self, number: int, stop: Callable[[], object]) -> None:
        poll = select.poll()
        poll.register(number, 0)  # poll always reports that the other end is closed
        poll.poll()
        self.has_left = True
        stop()


# --- tables and numbers ----------------------------------------------------------------------------


MIN_WIDTH = 40
#: The width if it is unknown; help is written for it.
DEFAULT_WIDTH = 80
#: No column is cut to less than this width.
MIN_COLUMN = 8


def width() -> int:
    """Columns of the terminal; 80 without one."""
    return max(MIN_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def is_bounded() -> bool:
    """True if standard output is a terminal, or COLUMNS says how wide it is."""
    return sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int | None = None) -> list[str]:
    """Aligns columns with two spaces between them; cuts the first column when the table is too wide for a terminal.

    Args:
      headings: one for each column; ``>`` in front aligns the column to the right.
      rows: each with one text for each column.
      columns: the total width; None: that of the terminal or of COLUMNS. Without either nothing is cut.
    """
    names = [heading.removeprefix(">") for heading in headings]
    right = [heading.startswith(">") for heading in headings]
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    if columns is None and is_bounded():
        columns = width()
    over = 0 if columns is None else sum(widths) + 2 * (len(widths) - 1) - columns
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
    """Cuts ``text`` to ``size`` characters, with an ellipsis at the end if it was longer."""
    return text if len(text) <= size else text[: max(0, size - 1)] + "…"


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Aligns names and values, a pair on each line."""
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


def show_count(count: float | None, *, estimated: bool = False, grouped: bool | None = None) -> str:
    """A whole number: ``12 345``; ``~`` before an estimate, ``-`` for None.

    Args:
      grouped: by thousands; None: if standard output is a terminal.
    """
    if count is None:
        return "-"
    grouped = sys.stdout.isatty() if grouped is None else grouped
    shown = f"{count:,.0f}".replace(",", " ") if grouped else f"{count:.0f}"
    return f"~{shown}" if estimated else shown


def show_messages(count: float | None, *, estimated: bool = False, more: bool = False) -> str:
    """``1 message``, ``12 345 messages``; ``1 000+ messages`` when there are more than were counted."""
    return f"{show_count(count, estimated=estimated)}{'+' if more else ''} {plural('message', 2 if more else count)}"


def counted(count: float, thing: str) -> str:
    """``1 topic``, ``12 topics``."""
    return f"{show_count(count)} {plural(thing, count)}"


def show_rate(per_second: float, *, grouped: bool | None = None) -> str:
    """``0``, ``0.4/s``, ``1 200/s``."""
    if per_second < 0.05:
        return "0"
    return f"{per_second:.1f}/s" if per_second < 10 else f"{show_count(per_second, grouped=grouped)}/s"


def show_seconds(seconds: float) -> str:
    """A short time to three figures: ``12.3 µs``, ``4.56 ms``, ``1.2 s``."""
    for size, unit in ((1e-3, "µs"), (1, "ms")):
        if seconds < size:
            return f"{seconds / size * 1000:.3g} {unit}"
    return f"{seconds:.3g} s"


def echo_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


# --- progress --------------------------------------------------------------------------------------


PROGRESS_AFTER_S = 1.0
PROGRESS_EVERY_S = 0.25


class ProgressLine:
    """A line on standard error that is rewritten four times a second at most.

    Args:
      due_s: when it may first be shown, on the caller's clock.
    """

    def __init__(self, due_s: float = 0.0) -> None:
        self._due_s = due_s
        self._is_shown = False

    def is_due(self, now_s: float, *, at_once: bool = False) -> bool:
        """True if the line may be rewritten now; then it is due again after ``PROGRESS_EVERY_S``."""
        if now_s < self._due_s and not at_once:
            return False
        self._due_s = now_s + PROGRESS_EVERY_S
        return True

    def rewrite(self, text: str, *, color: bool | None = True) -> None:
        """Shows ``text`` instead of the last one. With ``color`` None, a file does not get the code that clears the rest."""
        self._is_shown = True
        click.echo(f"\r{text}\x1b[K", err=True, nl=False, color=color)

    def clear(self) -> None:
        """Removes the line, if it is shown."""
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
            self._is_shown = False


class Progress(ProgressLine):
    """The progress of a publish, not shown in the first second.

    Args:
      total_bytes: size of the input, if it is known.
      wanted: True if standard error is a terminal.
    """

    def __init__(self, total_bytes: int | None, *, wanted: bool) -> None:
        self._total = total_bytes
        self._wanted = wanted
        self._began_s = time.monotonic()
        super().__init__(self._began_s + PROGRESS_AFTER_S)

    def show(self, messages: int, read_bytes: int) -> None:
        """Rewrites the line if it is due."""
        now_s = time.monotonic()
        if not (self._wanted and self.is_due(now_s)):
            return
        part = f" ({min(100, 100 * read_bytes // self._total)} %)" if self._total else ""
        rate = messages / (now_s - self._began_s)
        count = f"{show_count(messages, grouped=True)} {plural('message', messages)}"
        self.rewrite(f"{count}, {show_bytes(read_bytes)}{part}, {show_count(rate, grouped=True)}/s")
