"""The verb `definitions`: topics, namespaces and pins as a file that people write, keep, and bring to another daemon."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from plainsong.calls import Call, Request, as_json, describe_topic, json_of, object_of
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import run_call, where_options
from plainsong.cli.options import checked, merged, show_property
from plainsong.cli.output import confirmed, counted, echo_json, escaped
from plainsong.protocol.answers.service import DEFINITION_PARTS
from plainsong.protocol.errors import InvalidProperty, TopicNotFound, nearest
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong import Client
    from plainsong.cli.connection import Where
    from plainsong.protocol.answers.topics import ImportReport

_PATH = "/v1/definitions"
#: The mark of each change in the output.
_SIGNS = {"created": "+", "changed": "~", "deleted": "-"}
_EXAMPLE = 'write a table for each topic: [topics.orders] and below it ttl = "30d"'
_FILE = click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))


@click.group(cls=VerbGroup)
def definitions() -> None:
    """Declare topics, namespaces and pins in a file.

    A file of definitions is TOML or JSON. It has no messages and no secrets;
    grants have a file of their own.
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
        "plainsong definitions import topics.toml --dry-run",
        "plainsong definitions import topics.toml",
        "plainsong definitions import plainsong.defs --prune --yes",
    ],
)
@_FILE
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@click.option("--prune", is_flag=True, help="Delete everything that FILE does not name.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before deleting topics or hiding messages.")
@json_option
@where_options
def import_(file: Path, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where) -> None:
    """Create and change namespaces, topics and pins as FILE says; - is stdin.

    The file has a table for each topic, in TOML or as JSON:

    \b
      [topics.orders]
      ttl = "30d"
      max_bytes = "10GiB"
      [topics."shop:audit"]

    A name without a namespace is in that of --namespace. Properties that the
    file does not name get the daemon's default. The file is checked as a whole
    before anything changes, and importing it again changes nothing.

    --prune deletes topics that the file does not name: of the namespace, if it
    has only names without one; otherwise of all namespaces, with the namespaces'
    properties and the pins. In the output, + marks a new definition, ~ a changed
    one, - a deleted one.
    """
    import_file(file, dry_run=dry_run, prune=prune, yes=yes, as_json=as_json, where=where)


def import_file(
    file: Path, *, dry_run: bool, prune: bool, yes: bool, as_json: bool, where: Where, keeps: bool = False
) -> None:
    """Import a file.

    Args:
      keeps: leave the properties that the file does not name as they are.
    """
    given = _read(file)
    with where.client() as client:
        scope = client.namespace if _is_of_one_namespace(given) else None
        wanted = _encoded(file, _qualified(client, file, given, keeps=keeps))
        query = {"prune": "true"} if prune else {}
        if prune and scope is not None:
            query["namespace"] = scope
        answer = _put(client, wanted, {**query, "dryRun": "true"})
        if not dry_run:
            if answer["warnings"]:
                lines = [escaped(each) for each in answer["warnings"]]
                confirmed("\n".join([*lines[:10], *(["…"] if len(lines) > 10 else []), "Continue?"]), yes=yes)
            answer = _put(client, wanted, query)
    if as_json:
        echo_json(answer)
    else:
        output.echo_lines(_lines(answer, dry_run=dry_run))


def _encoded(file: Path, wanted: Mapping[str, Any]) -> bytes:
    """Return the body of the request. Raises CommandFailed: TOML has values that JSON and definitions lack."""
    try:
        return as_json(wanted)
    except (TypeError, ValueError, RecursionError) as error:
        raise CommandFailed(
            f"{file} has a value of an unsupported type: {error}", hint=_EXAMPLE, code=Exit.USAGE
        ) from error


def _put(client: Client, wanted: bytes, query: Mapping[str, str]) -> ImportReport:
    path = f"{_PATH}?{urlencode(query)}" if query else _PATH
    request = Request("PUT", path, (("Content-Type", "application/json"),), wanted)
    call: Call[ImportReport] = Call(request, object_of, "harmless", wait_s=60.0)
    return run_call(client, call)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a file. Raises CommandFailed."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} cannot be read: {error}", code=Exit.USAGE) from error
    try:
        text = text.removeprefix("\ufeff")  # some editors write a byte order mark
        given = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{file} is neither TOML nor JSON: {error}", hint=_EXAMPLE, code=Exit.USAGE) from error
    unknown = next((key for key in given if key not in ("format", *DEFINITION_PARTS)), None)
    if unknown is not None:
        raise CommandFailed(
            f"{file}: unknown key {unknown!r}", hint=nearest(unknown, DEFINITION_PARTS), code=Exit.USAGE
        )
    parts: dict[str, Any] = {part: given.get(part, {}) for part in DEFINITION_PARTS}
    tables = list(parts.values())
    if isinstance(parts["topics"], dict):
        tables += parts["topics"].values()
    if not given or not all(isinstance(each, dict) for each in tables):
        raise CommandFailed(f"{file} has no tables of topics", hint=_EXAMPLE, code=Exit.USAGE)
    return {"format": given.get("format", 1), **parts}


def _is_of_one_namespace(given: Mapping[str, Any]) -> bool:
    """True if a file has only topics, each without a namespace."""
    topics, others = given["topics"], given["namespaces"] or given["pins"]
    return bool(topics) and not others and not any(":" in name for name in topics)


def _qualified(client: Client, file: Path, given: Mapping[str, Any], *, keeps: bool) -> dict[str, Any]:
    """Return a file as the daemon takes it: full names, and values without units.

    Raises:
      InvalidProperty, CommandFailed: a name or a value is wrong; nothing was changed.
    """

    def full(name: str) -> str:
        return name if ":" in name else f"{client.namespace}:{name}"

    for part in ("topics", "pins"):
        counts = Counter(map(full, given[part]))
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise CommandFailed(
                f"{file} has {part[:-1]} {twice} twice: with its namespace and without", code=Exit.USAGE
            )
    topics = {}
    for name, properties in given["topics"].items():
        try:
            changes = checked(properties)
        except InvalidProperty as error:
            raise InvalidProperty(f"{file}: topic {name}: {error.detail}", hint=error.hint) from error
        topics[full(name)] = merged(_current(client, full(name)) if keeps else {}, changes)
    return {**given, "topics": topics, "pins": {full(name): instance for name, instance in given["pins"].items()}}


def _current(client: Client, name: str) -> dict[str, str]:
    """Return the properties of a topic; none if it does not exist."""
    try:
        return dict(run_call(client, describe_topic(*topic_name(*name.split(":", 1)))))
    except TopicNotFound:
        return {}


def _lines(answer: Mapping[str, Any], *, dry_run: bool) -> list[str]:
    """A line for each change, the warnings of a dry run, and the counts."""
    lists = answer["effect"] if dry_run else answer
    lines = [
        f"{sign} {escaped(path)}{_change(answer, path)}" for verdict, sign in _SIGNS.items() for path in lists[verdict]
    ]
    if dry_run:
        lines += [f"warning: {escaped(each)}" for each in answer["warnings"]]
    return [*lines, ", ".join(f"{len(lists[verdict])} {verdict}" for verdict in (*_SIGNS, "unchanged"))]


def _change(answer: Mapping[str, Any], path: str) -> str:
    """The changed properties of a definition: ``  ttl 1h -> 30d``."""
    before, after = answer["before"].get(path), answer["after"].get(path)
    if after is None:
        return ""
    if not isinstance(after, dict):  # a pin
        return f"  {escaped(str(after))}" if before is None else f"  {escaped(str(before))} -> {escaped(str(after))}"
    said = ""
    for name in sorted({*(before or {}), *after}):
        has, will = ((each or {}).get(name) for each in (before, after))
        if before is None:
            said += f"  {name} {show_property(name, will)}"
        elif has != will:
            said += f"  {name} {show_property(name, has)} -> {show_property(name, will)}"
    return escaped(said)


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
