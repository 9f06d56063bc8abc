"""``plainsong topic apply``: topics as a file declares them, with what would change shown first."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.properties import checked, differences, merged, show_property
from plainsong.cli.say import confirmed, echo_json, named
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import where_options
from protocol.errors import InvalidProperty, PlainsongError, nearest
from protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plainsong import Client
    from plainsong.cli.where import Where

_EXAMPLE = 'write a table for each topic: [topics.orders] and below it ttl = "30d"'


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one topic."""

    topic: str
    action: str
    """``create``, ``change``, ``delete``, ``keep`` (as the file says), ``leave`` (not in the file)."""
    properties: Mapping[str, tuple[str | None, str]]
    """Name → (what it is, what it will be)."""
    send: Mapping[str, str]
    """All properties of the topic afterwards, as they are sent."""

    def shown(self) -> str:
        """One line: a sign, the topic, what changes."""
        sign = {"create": "+", "change": "~", "delete": "-", "keep": "=", "leave": " "}[self.action]
        says = "  ".join(self._property(name, *pair) for name, pair in self.properties.items())
        if self.action == "leave":
            says = "(not in the file)"
        return f"{sign} {self.topic:<24} {says}".rstrip()

    def _property(self, name: str, has: str | None, will: str) -> str:
        value = show_property(name, will)
        return f"{name} {value}" if self.action == "create" else f"{name} {show_property(name, has)} -> {value}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        changed = {name: {"from": has, "to": will} for name, (has, will) in self.properties.items()}
        return {"topic": self.topic, "action": self.action, "properties": changed}


@click.command(
    cls=Verb,
    examples=[
        "plainsong topic apply -f topics.toml --dry-run",
        "plainsong topic apply -f topics.toml",
        "plainsong topic apply -f topics.json --prune --yes",
    ],
)
@click.option(
    "-f", "--file", required=True, type=click.Path(dir_okay=False, allow_dash=True), help="TOML or JSON; - reads stdin."
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option("--prune", is_flag=True, help="Delete topics that are not in the file.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before deleting.")
@json_option
@where_options
def apply(file: str, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where) -> None:
    """Make the topics what a file says they are.

    The file has a table for each topic, in TOML or the same in JSON:

    \b
      [topics.orders]
      ttl = "30d"
      max_bytes = "10GiB"
      [topics.audit]

    Properties that the file does not name stay as they are; "default" sets one
    back. Topics that it does not name stay too, unless --prune is given. Doing
    it twice changes nothing more. Lines begin with + for a new topic, ~ for a
    changed one, - for one that is deleted.
    """
    wanted = load_declarations(file)
    with where.client() as client:
        changes = plan(client, wanted, prune=prune)
        doomed = [change.topic for change in changes if change.action == "delete"]
        if not as_json:
            for change in changes:
                click.echo(change.shown())
        if not dry_run:
            if doomed:
                confirmed(f"Delete {named(doomed)} with all messages?", yes=yes)
            _carry_out(client, changes)
    if as_json:
        echo_json({"applied": not dry_run, "topics": [change.as_json() for change in changes]})
        return
    todo = sum(change.action in ("create", "change", "delete") for change in changes)
    click.echo(f"{_topics(todo)} would change" if dry_run else f"{_topics(todo)} changed" if todo else "nothing to do")


def _topics(count: int) -> str:
    return "1 topic" if count == 1 else f"{count} topics"


def load_declarations(file: str) -> dict[str, dict[str, str]]:
    """Topic → properties, checked. Raises CommandFailed, InvalidProperty, InvalidName."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} cannot be read: {error}", code=Exit.USAGE) from error
    try:
        told = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:
        raise CommandFailed(f"{file}: {error}", hint=_EXAMPLE, code=Exit.USAGE) from error
    topics = told.get("topics") if isinstance(told, dict) else None
    unknown = next((key for key in told if key != "topics"), None)
    if unknown is not None:
        hint = nearest(unknown, ("topics",))
        raise CommandFailed(f"{file}: there is no place for {unknown!r}", hint=hint, code=Exit.USAGE)
    if not isinstance(topics, dict) or not all(isinstance(each, dict) for each in topics.values()):
        raise CommandFailed(f"{file} declares no topics", hint=_EXAMPLE, code=Exit.USAGE)
    return {name: _declared(file, name, properties) for name, properties in topics.items()}


def _declared(file: str, name: str, properties: dict[str, object]) -> dict[str, str]:
    topic_name("default", name)
    try:
        return checked(properties)
    except InvalidProperty as error:
        raise InvalidProperty(f"{file}: topic {name}: {error.detail}", hint=error.hint) from error


def plan(client: Client, wanted: Mapping[str, Mapping[str, str]], *, prune: bool) -> list[Change]:
    """What has to change, topic by topic, in the order of their names."""
    there = client.topics()
    changes = []
    for name in sorted({*there, *wanted}):
        if name not in there:
            new: dict[str, tuple[str | None, str]] = {key: (None, value) for key, value in wanted[name].items()}
            changes.append(Change(name, "create", new, merged({}, wanted[name])))
        elif name in wanted:
            current = client.properties(name)
            different = differences(current, wanted[name])
            changes.append(Change(name, "change" if different else "keep", different, merged(current, wanted[name])))
        else:
            changes.append(Change(name, "delete" if prune else "leave", {}, {}))
    return changes


def _carry_out(client: Client, changes: Sequence[Change]) -> None:
    """Deletions last. Raises CommandFailed, saying how far it came."""
    steps: dict[str, Callable[..., object]] = {
        "create": client.create_topic,
        "change": client.set_properties,
        "delete": client.delete_topic,
    }
    todo = sorted((change for change in changes if change.action in steps), key=lambda each: each.action == "delete")
    for done, change in enumerate(todo):
        try:
            steps[change.action](change.topic, **change.send)
        except PlainsongError as error:
            error.detail = f"{error.detail} ({change.action} {change.topic}; {done} of {len(todo)} were done before)"
            raise
