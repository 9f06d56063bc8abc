"""The entry of ``plainsong``: one program, one way to report what went wrong."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from plainsong import __version__
from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


@click.group(cls=Program, context_settings=SETTINGS)
@click.version_option(__version__, "--version", message="plainsong %(version)s")
def program() -> None:
    """Plainsong: topics of messages in one durable order.

    Start with `plainsong serve`; then open a second terminal and try

    \b
      plainsong topic create greetings
      plainsong publish greetings hello world
      plainsong poll greetings

    Every command explains itself with --help, and speaks JSON with --json.

    \b
    Exit codes: 0 done, 1 failed, 2 wrong command line or settings, 3 the store
    cannot be opened, 4 no such topic, reader or context, 5 no daemon answers,
    6 nobody knows whether it happened, 130 interrupted.
    """


def run(command: click.Command, arguments: Sequence[str], name: str) -> int:
    """Run a command and report its failure, if any, on standard error.

    Args:
      command: what to run.
      arguments: of the command line, without the program's name.
      name: the program's name, for usage lines.
    Returns:
      the exit code.
    """
    try:
        code = command.main(list(arguments), prog_name=name, standalone_mode=False)
    except CommandFailed as error:
        return _report(error)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return Exit.USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else name
        return _report(CommandFailed(error.format_message(), hint=f"try {path} --help", code=Exit.USAGE))
    except click.ClickException as error:
        return _report(CommandFailed(error.format_message()))
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    return code if isinstance(code, int) else Exit.OK


def main() -> None:
    """``plainsong``, as installed."""
    sys.exit(run(program, sys.argv[1:], "plainsong"))


def _report(error: CommandFailed) -> int:
    if error.as_json:
        told = {"error": error.message, "hint": error.hint, "code": error.word, "outcome": error.outcome}
        click.echo(json.dumps({**told, "exit": int(error.code), **error.more}, ensure_ascii=False), err=True)
        return error.code
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    return error.code
