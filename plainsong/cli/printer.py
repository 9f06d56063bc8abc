"""Messages on standard output: in a shape or as JSON, made harmless for a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plainsong.cli.shapes import Shape, ShapeType, harmless, json_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.cli.shapes import Printable

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS = (
    click.option(
        "-f",
        "--format",
        "shape",
        type=ShapeType(),
        metavar="FORMAT",
        help="How each is printed: %p payload, %t topic, %i id, %T time, %m the same in ms, %s size, %a attributes, %%, \\n \\t \\x00.",
    ),
    click.option(
        "-0", "--null", is_flag=True, help="End each with a NUL instead of a newline, as xargs -0 reads them."
    ),
)


def printing_options(command: F) -> F:
    """Adds ``--format`` and ``--null``; they arrive as ``shape`` and ``null``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Printer:
    """Writes messages, one after the other.

    Args:
      shape: of a line; None: as JSON, when ``as_json``, else the payload.
      null: end each with a NUL.
    """

    def __init__(self, shape: Shape | None, *, null: bool, as_json: bool, default: str = "%p") -> None:
        if shape is not None and as_json:
            raise click.UsageError("--format and --json exclude each other")
        self._line: Callable[[Printable], bytes] = json_line
        if not as_json:
            self._line = shape or Shape(default)
        self._end = b"\0" if null else b"\n"
        self._harmless = sys.stdout.isatty() and not null
        self._out = sys.stdout.buffer
        self.count = 0

    def write(self, messages: Iterable[Printable]) -> None:
        """Write them, and flush: whoever reads has all of them now."""
        lines = [self._line(message) for message in messages]
        if not lines:
            return
        if self._harmless:
            lines = [harmless(line) for line in lines]
        left = memoryview(self._end.join(lines) + self._end)
        while left:  # with PYTHONUNBUFFERED a write to a pipe may be a part
            left = left[self._out.write(left) :]
        self._out.flush()
        self.count += len(lines)
