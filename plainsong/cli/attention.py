"""`doctor --attention`: what an operator should look at, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.command import one_line
from plainsong.cli.connection import run_call
from plainsong.cli.options import show_length
from plainsong.cli.output import echo_json
from plainsong.positions import now_ms

if TYPE_CHECKING:
    from plainsong.cli.connection import Where


def show_attention(where: Where, *, as_json: bool) -> None:
    """Print what needs attention at all instances of a cluster, in topics of all namespaces. Raises PlainsongError."""
    with where.client() as client:
        found = run_call(client, calls.attention())
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo("nothing needs attention")
        return
    now = now_ms()
    rows = [
        (
            each["severity"],
            each["kind"],
            one_line(each["subject"] or "-"),
            "-" if each["sinceMs"] is None else show_length(max(0, now - each["sinceMs"])),
            one_line(each["text"]),
        )
        for each in found
    ]
    output.echo_lines(output.table(("SEVERITY", "KIND", "ABOUT", ">SINCE", "WHAT"), rows))
