"""The verb `namespace`: lists namespaces, shows and sets the properties that hold for their topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong import calls
from plainsong.cli import output
from plainsong.cli.command import VerbGroup, json_option
from plainsong.cli.connection import run_call, where_options
from plainsong.cli.output import echo_json
from plainsong.cli.producer import show_effective
from plainsong.protocol.errors import InvalidProperty, nearest

if TYPE_CHECKING:
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import NamespaceDescription

#: The properties of a namespace, with their defaults.
_DEFAULTS = {"deduplication": "inherit"}


@click.group(cls=VerbGroup)
def namespace() -> None:
    """List namespaces and set their properties."""


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
    """Show a namespace's properties; default: that of --namespace."""
    with where.client() as client:
        answer = run_call(client, calls.show_namespace(client.namespace if name is None else name))
    _show(answer, as_json=as_json)


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
    """Change properties of a namespace; the others stay unchanged.

    deduplication (enabled, disabled, inherit) takes effect at once for all
    topics that do not set their own.
    """
    changes = _parsed(properties)
    with where.client() as client:
        now = run_call(client, calls.show_namespace(name))["properties"]
        answer = run_call(client, calls.set_namespace(name, {**now, **changes}))
    _show(answer, as_json=as_json)


def _parsed(texts: tuple[str, ...]) -> dict[str, str]:
    """Parses ``NAME=VALUE``. Raises InvalidProperty."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperty(f"{text[:80]!r} has no value", hint="write for example deduplication=disabled")
        if key not in _DEFAULTS:
            raise InvalidProperty(f"unknown property {key[:80]!r}", hint=nearest(key, _DEFAULTS))
        found[key] = _DEFAULTS[key] if value == "default" else value
    return found


def _show(answer: NamespaceDescription, *, as_json: bool) -> None:
    if as_json:
        echo_json(answer)
        return
    pairs = [
        ("namespace", answer["name"]),
        *((name, str(value)) for name, value in sorted(answer["properties"].items())),
        ("in force", show_effective(answer)),
    ]
    output.echo_lines(output.facts(pairs))
