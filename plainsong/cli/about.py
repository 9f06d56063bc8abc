"""The verbs `help` and `version`: about this program itself."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from plainsong import __version__
from plainsong.cli import output
from plainsong.cli.command import Verb, json_option
from plainsong.cli.output import echo_json

DISTRIBUTIONS = ("plainsong-client", "plainsong-server", "plainsong-spark")


@click.command(name="help", cls=Verb, examples=["plainsong help publish", "plainsong help topic create"])
@click.argument("verb", nargs=-1)
@click.pass_context
def help_verb(ctx: click.Context, verb: tuple[str, ...]) -> None:
    """Show the help of a verb."""
    found = ctx.find_root()
    for name in verb:
        if not isinstance(found.command, click.Group):
            raise click.UsageError(f"{found.command_path} has no verb {name!r}", ctx=ctx)
        known, command, _ = found.command.resolve_command(found, [name])
        assert command is not None  # an unknown one is an error
        found = click.Context(command, info_name=known, parent=found, **command.context_settings)
    click.echo(found.get_help())


@click.command(cls=Verb, examples=["plainsong version", "plainsong version --json"])
@json_option
def version(as_json: bool) -> None:
    """Show the versions of what is installed here."""
    found = installed_versions()
    if as_json:
        echo_json(found)
    else:
        output.echo_lines(output.facts(list(found.items())))


def installed_versions() -> dict[str, str]:
    """Return the versions of Plainsong's installed distributions, and of Python."""
    found = {"plainsong": __version__, **{name: each for name in DISTRIBUTIONS if (each := _version(name))}}
    return {**found, "python": platform.python_version()}


def _version(name: str) -> str | None:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None
