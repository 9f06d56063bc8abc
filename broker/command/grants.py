"""The verb `grants`: shows and checks the grants file; no daemon is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.command.security_files import chosen_file, file_options
from broker.security.files import read_guarded, reason_of
from broker.security.grants import MAX_FILE_BYTES, SERVICE, BadGrantsFile, parse_grants
from broker.security.identity import VERBS
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option
from plainsong.cli.output import echo_json
from plainsong.protocol.errors import InvalidName
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from broker.security.grants import Grant, GrantTable


@click.group(cls=VerbGroup)
def grants() -> None:
    """Show and check the grants of names.

    Works on the grants file (security.grants_file), which is written by hand
    and which a running daemon reads again within two seconds.
    """


@grants.command(name="list", examples=["plainsong grants list --file grants.toml --as billing"])
@click.option("--as", "name", metavar="NAME", help="Only grants of this name.")
@click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help="Group reported by its identity provider. Repeatable."
)
@file_options("grants")
@json_option
def list_grants(
    name: str | None,
    groups: tuple[str, ...],
    file: Path | None,
    config: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """List grants: names, verbs and resources."""
    table = _read(chosen_file("grants", file, config, sets))
    chosen = table.grants if name is None else table.granted(name, groups)
    if as_json:
        echo_json([_shown(grant) for grant in chosen])
        return
    rows = [(str(grant.line), " ".join(grant.to), _verbs(grant), " ".join(map(str, grant.on))) for grant in chosen]
    output.echo_lines(output.table((">LINE", "TO", "VERBS", "ON"), rows))


@grants.command(
    examples=[
        "plainsong grants check --file grants.toml --as billing publish shop:orders",
        "plainsong grants check --file grants.toml --as oidc:ann --group ops \\",
        "    operate service",
    ]
)
@click.option("--as", "name", metavar="NAME", required=True, help="Name to check.")
@click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help="Group reported by its identity provider. Repeatable."
)
@click.argument("verb", type=click.Choice(VERBS), metavar="VERB")
@click.argument("resource", metavar="NS:TOPIC|service")
@file_options("grants")
@json_option
def check(
    name: str,
    groups: tuple[str, ...],
    verb: str,
    resource: str,
    file: Path | None,
    config: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check whether a name may do something, and show the line that grants it.

    Exits with 0 if it may, otherwise with 1. NS:* asks about a whole namespace.
    """
    path = chosen_file("grants", file, config, sets)
    namespace, topic = _resource(resource)
    found = next(
        (
            grant
            for grant in _read(path).granted(name, groups)
            if verb in grant.verbs and _covers(grant, namespace, topic)
        ),
        None,
    )
    if as_json:
        echo_json({"granted": found is not None, "line": None if found is None else found.line})
    elif found is None:
        click.echo(f"no: no line grants {name} {verb} on {resource}")
    else:
        click.echo(f"yes: {path}, line {found.line}")
    if found is None:
        click.get_current_context().exit(Exit.FAILED)


@grants.command(examples=["plainsong grants validate grants.toml"])
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def validate(path: Path, as_json: bool) -> None:
    """Check a grants file before a daemon reads it."""
    table = _read(path)
    if as_json:
        echo_json(
            {"valid": True, "grants": len(table.grants), "groups": len(table.groups), "quotas": len(table.quotas)}
        )
    else:
        counts = ((len(table.grants), "grant"), (len(table.groups), "group"), (len(table.quotas), "quota"))
        click.echo("valid: " + ", ".join(output.counted(count, thing) for count, thing in counts))


def _read(path: Path) -> GrantTable:
    try:
        data, _ = read_guarded(path, MAX_FILE_BYTES)
        return parse_grants(data)
    except BadGrantsFile as error:
        raise CommandFailed(f"{path}, {error}", code=Exit.USAGE) from None
    except OSError as error:
        raise CommandFailed(reason_of(error, path), code=Exit.USAGE) from None


def _resource(text: str) -> tuple[str, str]:
    """Return namespace and topic; the topic is empty for the service, and ``*`` for a whole namespace."""
    if text == SERVICE:
        return "", ""
    namespace, _, topic = text.partition(":")
    try:
        topic_name(namespace, "x" if topic == "*" else topic)
    except InvalidName as error:
        raise CommandFailed(
            f"{text[:80]!r} is not a resource: {error.detail}",
            hint="write shop:orders, shop:* or service",
            code=Exit.USAGE,
        ) from None
    return namespace, topic


def _covers(grant: Grant, namespace: str, topic: str) -> bool:
    if not topic:
        return any(pattern.is_service for pattern in grant.on)
    if topic == "*":
        return any(pattern.topic == "*" and pattern.matches_namespace(namespace) for pattern in grant.on)
    return any(pattern.matches(namespace, topic) for pattern in grant.on)


def _verbs(grant: Grant) -> str:
    return "all" if len(grant.verbs) == len(VERBS) else " ".join(grant.verbs)


def _shown(grant: Grant) -> dict[str, object]:
    return {
        "to": list(grant.to),
        "verbs": list(grant.verbs),
        "on": [str(pattern) for pattern in grant.on],
        "line": grant.line,
    }
