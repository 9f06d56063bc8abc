"""A line on standard error that says how far a long command has come."""

from __future__ import annotations

import time

import click

from plainsong.cli.tables import show_bytes, show_count

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
