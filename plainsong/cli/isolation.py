"""``--isolation``: whether a reader gets everything, or only what is committed; and what it is told when it is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli.times import now_ms, show_length

if TYPE_CHECKING:
    from plainsong.messages import Held

isolation_option = click.option(
    "--isolation",
    type=click.Choice(("uncommitted", "committed")),
    help="committed: only what is, up to the first that is undecided.",
)


def why_held(topic: str, held: Held | None) -> str:
    """What keeps a committed reader from going on, and how to look closer."""
    if held is None:
        return f"a transaction holds {topic} up: plainsong tx blame {topic}"
    since = "" if held.since_ms is None else f" since {show_length(max(0, now_ms() - held.since_ms))}"
    return f"transaction {held.write_pointer} holds {topic} up{since}: plainsong tx blame {topic}"
