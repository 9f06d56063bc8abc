"""The verb `namespace`: lists namespaces, shows and sets what they say for their topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.output import echo_json
from plainsong.cli.producer import show_effective
from plainsong.cli.verb import VerbGroup, json_option
from plainsong.cli.where import run_call, where_options
from plainsong.protocol.errors import InvalidProperty, nearest

if TYPE_CHECKING:
    from plainsong.cli.where import Where

#: What a namespace may say, and what it says when nobody set it.
_DEFAULTS = {"deduplication": "inherit"}


@click.group(cls=VerbGroup)
def namespace() -> None:
    """Namespaces, and what they say for their topics."""


@namespace.command(name="list", examples=["plainsong namespace list", "plainsong namespace list --json"])
@json_option
@where_options
def list_namespaces(as_json: bool, where: Where) -> None:
    """List the namespaces that have topics or properties."""
    with where.client() as client:
        names = run_call(client, calls.list_namespaces())
    if as_json:
        echo_json(names)
    else:
        output.echo_lines(names)


@namespace.command(examples=["plainsong namespace show", "plainsong namespace show team_a"])
@click.argument("name", required=False)
@json_option
@where_options
def show(name: str | None, as_json: bool, where: Where) -> None:
    """Show a namespace's properties; --namespace's own by default."""
    with where.client() as client:
        told = run_call(client, calls.show_namespace(client.namespace if name is None else name))
    _say(told, as_json=as_json)


@namespace.command(
    name="set",
    examples=[
        "plainsong namespace set team_a deduplication=disabled",
        "plainsong namespace set team_a deduplication=default",
    ],
)
@click.argument("name")
@click.argument("properties", nargs=-1, required=True, metavar="NAME=VALUE...")
@json_option
@where_options
def set_properties(name: str, properties: tuple[str, ...], as_json: bool, where: Where) -> None:
    """Change properties of a namespace; the others stay.

    deduplication (enabled, disabled, inherit) holds for all topics that do not
    say otherwise, at once.
    """
    changes = _parsed(properties)
    with where.client() as client:
        now = run_call(client, calls.show_namespace(name))["properties"]
        told = run_call(client, calls.set_namespace(name, {**now, **changes}))
    _say(told, as_json=as_json)


def _parsed(texts: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` of a command line. Raises InvalidProperty."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperty(f"{text[:80]!r} has no value", hint="write for example deduplication=disabled")
        if key not in _DEFAULTS:
            raise InvalidProperty(f"unknown property {key[:80]!r}", hint=nearest(key, _DEFAULTS))
        found[key] = _DEFAULTS[key] if value == "default" else value
    return found


def _say(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        echo_json(told)
        return
    pairs = [("namespace", told["name"]), *sorted(told["properties"].items()), ("in force", show_effective(told))]
    output.echo_lines(output.facts(pairs))
