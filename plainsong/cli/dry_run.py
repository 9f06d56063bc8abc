"""The option `--dry-run`: what a change would do, as the daemon says it, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import output
from plainsong.cli.command import one_line
from plainsong.cli.options import show_property, show_time
from plainsong.cli.output import echo_json

if TYPE_CHECKING:
    from collections.abc import Mapping

dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would happen; change nothing.")
_COUNTS = (("readers", "reader"), ("producers", "producer"), ("openTransactions", "open transaction"))


def show_dry_run(told: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints what the daemon says a change would do."""
    if as_json:
        echo_json(told)
        return
    lines = [*_changes(told), *_effects(told["effect"])]
    lines += [f"warning: {one_line(each)}" for each in told["warnings"]]
    output.echo_lines([f"would change {told['target']}:", *(f"  {each}" for each in lines or ["nothing"])])


def _changes(told: Mapping[str, Any]) -> list[str]:
    before, after = told["before"], told["after"]
    if not before or not after:
        return []

    def show(name: str, value: object) -> str:
        return "unset" if value is None else show_property(name, str(value))

    return [f"{name}: {show(name, before.get(name))} -> {show(name, after.get(name))}" for name in told["changed"]]


def _effects(effect: Mapping[str, Any]) -> list[str]:
    lines = []
    for verb in ("hides", "returns", "removes"):
        some = effect[verb]
        if some["messages"]:
            shown = output.show_messages(some["messages"], estimated=some["estimated"])
            lines.append(f"{verb} {shown}, {output.show_bytes(some['bytes'])}")
    lines += [f"removes {output.counted(effect[name], one)}" for name, one in _COUNTS if effect.get(name)]
    if effect.get("undeleteUntilMs"):
        lines.append(f"can be restored until {show_time(effect['undeleteUntilMs'])}")
    for each in effect.get("topics", ()):
        lines.append(f"removes {output.show_messages(each['messages'])} of {one_line(each['topic'])}")
    releases = effect.get("releases")
    if releases and (releases["heldPolls"] or releases["hiddenMessages"]):
        polls = output.counted(releases["heldPolls"], "waiting poll")
        lines.append(f"releases {output.show_messages(releases['hiddenMessages'])} and {polls}")
    return lines
