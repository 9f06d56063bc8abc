"""The verb `definitions`: namespaces, topics and pins as a file that people keep, and bring to another daemon."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plainsong.calls import Call, Request, as_json, json_of
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import run_call, where_options
from plainsong.cli.output import confirmed, counted, echo_json, escaped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong import Client
    from plainsong.cli.connection import Where

_PATH = "/v1/definitions"
_VERDICTS = ("created", "changed", "deleted", "unchanged")
_FILE = click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))


@click.group(cls=VerbGroup)
def definitions() -> None:
    """Export and import namespaces, topics and pins.

    A file of definitions is TOML, or JSON where its name ends in .json. It has
    no messages and no secrets; grants have a file of their own.
    """


@definitions.command(
    name="export", cls=Verb, examples=["plainsong definitions export plainsong.defs", "plainsong definitions export -"]
)
@_FILE
@json_option
@where_options
def export(file: Path, as_json: bool, where: Where) -> None:
    """Write the definitions of a daemon to FILE; - is standard output."""
    with where.client() as client:
        found = run_call(client, Call(Request("GET", _PATH), json_of))
    text = json.dumps(found, indent=2) + "\n" if as_json or file.suffix == ".json" else "\n".join(_toml(found)) + "\n"
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from error
    if not as_json:
        click.echo(f"{counted(len(found['topics']), 'topic')}, {counted(len(found['namespaces']), 'namespace')}")


@definitions.command(
    name="import",
    cls=Verb,
    examples=[
        "plainsong definitions import plainsong.defs --dry-run",
        "plainsong definitions import plainsong.defs --prune --yes",
    ],
)
@_FILE
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@click.option("--prune", is_flag=True, help="Delete what FILE does not name.")
@click.option("--yes", is_flag=True, help="Do not ask before topics are deleted, or messages hidden.")
@json_option
@where_options
def import_(file: Path, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where) -> None:
    """Create namespaces, topics and pins from FILE; - is standard input.

    The file is checked as a whole before anything changes. Importing it again
    changes nothing more, so a failed import can be repeated.
    """
    given = _read(file)
    with where.client() as client:
        would = _put(client, given, prune=prune, dry_run=True)
        if dry_run:
            _show(would["effect"], would["warnings"], as_json=as_json, whole=would)
            return
        if would["warnings"]:
            lines = [escaped(each) for each in would["warnings"]]
            confirmed("\n".join([*lines[:10], *(["…"] if len(lines) > 10 else []), "Continue?"]), yes=yes)
        done = _put(client, given, prune=prune, dry_run=False)
    _show(done, [], as_json=as_json, whole=done)


def _put(client: Client, given: Mapping[str, Any], *, prune: bool, dry_run: bool) -> dict[str, Any]:
    query = "&".join(name + "=true" for name, on in (("dryRun", dry_run), ("prune", prune)) if on)
    request = Request(
        "PUT", _PATH + ("?" + query if query else ""), (("Content-Type", "application/json"),), as_json(given)
    )
    return dict(run_call(client, Call(request, json_of, "harmless", wait_s=60.0)))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} cannot be read: {error}", code=Exit.USAGE) from error
    try:
        text = text.removeprefix("\ufeff")  # some editors begin a file with a mark
        return dict(json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text))
    except ValueError as error:
        raise CommandFailed(f"{file} is neither TOML nor JSON: {error}", code=Exit.USAGE) from error


def _show(lists: Mapping[str, Any], warnings: list[str], *, as_json: bool, whole: dict[str, Any]) -> None:
    if as_json:
        echo_json(whole)
        return
    lines = [f"{verdict}  {escaped(path)}" for verdict in _VERDICTS[:3] for path in lists[verdict]]
    lines += [f"warning: {escaped(each)}" for each in warnings]
    figures = ", ".join(f"{len(lists[verdict])} {verdict}" for verdict in _VERDICTS)
    output.echo_lines([*lines, figures])


def _toml(found: Mapping[str, Any]) -> Iterator[str]:
    """The definitions as TOML; names and texts are written as JSON strings, which TOML reads alike."""
    yield f"format = {found['format']}"
    for part in ("namespaces", "topics"):
        for name, properties in found[part].items():
            yield ""
            yield f"[{part}.{json.dumps(name)}]"
            yield from (f"{key} = {json.dumps(value)}" for key, value in properties.items())
    if found["pins"]:
        yield ""
        yield "[pins]"
        yield from (f"{json.dumps(name)} = {json.dumps(instance)}" for name, instance in found["pins"].items())
