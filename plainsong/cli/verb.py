"""A verb: a click command with examples in its help, and the exit code and next step of its errors.

How a command ends: its exit code, and the error that says so.

0    done
1    failed, and the error says why; or whoever read the output has gone
2    the command line or the settings are wrong; nothing was done
3    the store cannot be opened as it is; nothing was changed
4    there is no such topic, reader or context; nothing was done
5    no daemon answered, or it cannot serve this now; nothing was done: try again later
6    nobody knows whether it happened: look before you repeat it
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import click

from plainsong.protocol.errors import BadRequest, NotFound, PlainsongError, QuotaExceeded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    STORE = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    UNKNOWN = 6
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Ends a command with one line ``error: …``, a line ``hint: …`` where there is one, and an exit code.

    Args:
      message: what went wrong, in one line; further lines are printed as they are.
      hint: what to do about it.
      code: of the process.
    """

    def __init__(self, message: str, *, hint: str = "", code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        #: The daemon's word for it, and whether it happened; for programs.
        self.word = ""
        self.outcome = ""
        self.more: dict[str, object] = {}
        self.as_json = False


# --- verb ------------------------------------------------------------------------------------------
#
# A verb: a click command with examples in its help, whose errors end it with a code and a next step.


class Verb(click.Command):
    """A command of the client.

    Args:
      examples: command lines for the end of its help, each within 78 columns.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*args, **named)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verb's own options, then those that every verb has."""
        own: list[tuple[str, str]] = []
        where: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):  # the usage line has those
                (where if isinstance(param, WhereOption) else own).append(record)
        for title, records in (("Options", own), ("Which daemon", where)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, as they would be typed."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; what the client raises becomes what the program reports."""
        try:
            return super().invoke(ctx)
        except PlainsongError as error:
            raise self._marked(ctx, failure_of(error)) from error
        except CommandFailed as error:
            raise self._marked(ctx, error) from error.__cause__

    @staticmethod
    def _marked(ctx: click.Context, failed: CommandFailed) -> CommandFailed:
        failed.as_json = bool(ctx.params.get("as_json"))
        return failed


class WhereOption(click.Option):
    """An option that says which daemon is meant."""


def resolved(
    group: click.Group, ctx: click.Context, args: list[str]
) -> tuple[str | None, click.Command | None, list[str]]:
    """The command that is meant. Raises click.UsageError naming the nearest one."""
    try:
        return click.Group.resolve_command(group, ctx, args)
    except click.UsageError as error:
        near = get_close_matches(args[0], group.list_commands(ctx), n=1)
        says = f"there is no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        raise click.UsageError(says, ctx=ctx) from error


class VerbGroup(click.Group):
    """A group of verbs, listed in the order they are written in; ``ls`` and ``list``, ``rm`` and ``delete`` are one."""

    command_class = Verb
    _SAME: ClassVar = {"ls": "list", "list": "ls", "rm": "delete", "delete": "rm"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name, or of the other name for the same."""
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, self._SAME.get(cmd_name, ""))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As ``resolved``."""
        return resolved(self, ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the source."""
        return list(self.commands)


json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON, errors too.")


def exit_of(error: PlainsongError) -> Exit:
    """The exit code of an error of the client."""
    if error.outcome == "unknown":
        return Exit.UNKNOWN
    if isinstance(error, NotFound):
        return Exit.NOT_FOUND
    if isinstance(error, (Unavailable, QuotaExceeded)) or error.code == "deadline_exceeded":
        return Exit.UNAVAILABLE
    return Exit.USAGE if isinstance(error, BadRequest) else Exit.FAILED


def failure_of(error: PlainsongError, *, hint: str = "") -> CommandFailed:
    """What the program says of an error of the client.

    Args:
      hint: instead of the error's own.
    """
    message = one_line(error.detail)
    if error.outcome == "unknown":
        message += " (nobody knows whether it happened)"
    failed = CommandFailed(message, hint=one_line(hint or error.hint), code=exit_of(error))
    failed.word, failed.outcome = error.code, error.outcome
    return failed


def one_line(text: str) -> str:
    """``text`` as one line without control characters; it may come from a daemon."""
    return "".join(char if char.isprintable() else " " for char in text)
