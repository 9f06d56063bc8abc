"""What a verb says: JSON for programs on standard output, notes for people on standard error."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.exits import CommandFailed, Exit

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
