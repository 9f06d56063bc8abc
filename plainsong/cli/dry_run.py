"""Formats the daemon's report of what a change would do (`--dry-run`) or has done."""

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


#: Effects of a change → their past tense.
_VERBS = {"hides": "hid", "returns": "returned", "removes": "removed", "releases": "released"}


def show_dry_run(told: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints what the daemon says a change would do."""
    if as_json:
        echo_json(told)
        return
    lines = [*_changes(told), *effect_lines(told)]
    output.echo_lines([f"would change {told['target']}:", *(f"  {each}" for each in lines or ["nothing"])])


def _changes(told: Mapping[str, Any]) -> list[str]:
    before, after = told["before"], told["after"]
    if not before or not after:
        return []

    def show(name: str, value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "unset" if value is None else show_property(name, str(value))

    return [f"{name}: {show(name, before.get(name))} -> {show(name, after.get(name))}" for name in told["changed"]]


def effect_lines(told: Mapping[str, Any]) -> list[str]:
    """Return lines about a change's effects on readers; empty if the daemon reports none."""
    effect = told.get("effect")
    if not effect:
        return []
    verbs = {name: name if told["dryRun"] else done for name, done in _VERBS.items()}
    lines = []
    for name in ("hides", "returns", "removes"):
        some = effect[name]
        if some["messages"]:
            shown = output.show_messages(some["messages"], estimated=some["estimated"])
            lines.append(f"{verbs[name]} {shown}, {output.show_bytes(some['bytes'])}")
    lines += [f"{verbs['removes']} {output.counted(effect[name], one)}" for name, one in _COUNTS if effect.get(name)]
    if effect.get("unreadable"):
        lines.append(f"{verbs['removes']} {output.counted(effect['unreadable'], 'place')} where nothing can be read")
    if effect.get("undeleteUntilMs"):
        lines.append(f"can be restored until {show_time(effect['undeleteUntilMs'])}")
    for each in effect.get("topics", ()):
        if each.get("messages"):
            lines.append(f"{verbs['removes']} {output.show_messages(each['messages'])} of {one_line(each['topic'])}")
    releases = effect.get("releases")
    if releases and (releases["heldPolls"] or releases["hiddenMessages"]):
        polls = output.counted(releases["heldPolls"], "waiting poll")
        lines.append(f"{verbs['releases']} {output.show_messages(releases['hiddenMessages'])} and {polls}")
    moving = effect.get("moves", {}).get("topicsOpen")
    if moving:
        lines.append(f"moves {output.counted(moving, 'open topic')} to other instances")
    return lines + [f"warning: {one_line(each)}" for each in told["warnings"]]
