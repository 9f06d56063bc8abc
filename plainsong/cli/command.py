"""A verb: a click command with examples in its help, and the exit code and next step of its errors."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.core import ParameterSource

from plainsong.hints import in_command
from plainsong.protocol.errors import BadRequest, NotFound, PlainsongError, QuotaExceeded, Unavailable
from plainsong.protocol.masking import masked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Exit(IntEnum):
    """The exit codes of every command.

    0    done
    1    failed, and the error says why; also if the reader of the output has closed it
    2    the command line or the settings are wrong; nothing was done
    3    the store cannot be opened in its present state; nothing was changed
    4    there is no such topic, reader or context; nothing was done
    5    no daemon answered, or it cannot serve this now; nothing was done: try again later
    6    the outcome is unknown: check it before you repeat the command
    7    another process has taken over the second copy of the daemon's store
    130  interrupted (Ctrl-C)
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    STORE = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    UNKNOWN = 6
    DEPOSED = 7
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Ends a command with a line ``error: …``, a line ``hint: …`` if there is a hint, and an exit code.

    Args:
      message: what went wrong, in one line; further lines are printed as they are.
      hint: what to do about it.
    """

    def __init__(self, message: str, *, hint: str = "", code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        #: The daemon's error code, and whether the request happened; for JSON output.
        self.word = ""
        self.outcome = ""
        self.more: dict[str, object] = {}
        self.as_json = False


class Verb(click.Command):
    """A command whose errors from the client become exit codes.

    Args:
      examples: command lines for the end of its help, each within 78 columns.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*args, **named)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verb's own options first, then those that choose a daemon."""
        own: list[tuple[str, str]] = []
        where: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):  # the usage line shows arguments
                is_where = isinstance(param, WhereOption) or param.name == "verbose"
                (where if is_where else own).append(record)
        for title, records in (("Options", own), ("Which daemon", where)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
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


# --- options before or after the verb --------------------------------------------------------------
#
# ``plainsong --url URL topic --json list`` is ``plainsong topic list --url URL --json``. A group takes the options as text
# and keeps them; the verb's own options of the same names convert them. An option after the verb wins.


_GIVEN = "plainsong.given"


class SharedOption(click.Option):
    """An option that may also precede its verb."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        given = ctx.meta.get(_GIVEN, {})
        if source in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP) and self.name in given:
            return given[self.name], ParameterSource.COMMANDLINE
        return value, source


class WhereOption(SharedOption):
    """An option that chooses the daemon; listed last in help."""


#: Options of every verb that talks to a daemon, in the order of its help; without a metavar it is a flag.
WHERE_OPTIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "context": (("--context",), "NAME", "Name from `plainsong context ls`."),
    "url": (("--url",), "URL", "Address; comma-separated for a cluster."),
    "namespace": (("-n", "--namespace"), "NAME", "Namespace of the topics; default: `default`."),
    "token_file": (("--token-file",), "FILE", "File with a bearer token on its only line."),
    "ca_file": (("--ca-file",), "FILE", "CA certificates to trust for https; default: the system's."),
    "certificate": (("--certificate",), "FILE", "Client certificate; needs --key."),
    "key": (("--key",), "FILE", "Key of that certificate."),
    "insecure": (("--insecure",), "", "Send the token unencrypted to another machine."),
    "timeout_ms": (("--timeout", "timeout_ms"), "TIME", "Time limit of each call; default: 15s."),
}
_JSON_SAYS = "Print JSON, errors included."


def shared_options(*, hidden: bool) -> list[click.Parameter]:
    """The options that a group takes for its verbs."""
    where = [
        WhereOption(
            names,
            metavar=metavar or None,
            help=says,
            expose_value=False,
            callback=_keep_for_verb,
            hidden=hidden,
            is_flag=not metavar,
        )
        for names, metavar, says in WHERE_OPTIONS.values()
    ]
    as_json = click.Option(
        ["--json", "as_json"], is_flag=True, help=_JSON_SAYS, expose_value=False, callback=_keep_for_verb, hidden=hidden
    )
    return [as_json, verbose_option(hidden=hidden), *where]


def _keep_for_verb(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(_GIVEN, {})[param.name] = value


def verbose_option(*, hidden: bool = False) -> click.Option:
    """``-v``: requests and their answers on standard error."""
    return click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_be_verbose,
        hidden=hidden,
        help="Log requests and responses to standard error.",
    )


class _Masked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _be_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        handler = logging.StreamHandler()
        handler.setFormatter(_Masked("%(message)s"))
        logger = logging.getLogger("plainsong")
        logger.setLevel(logging.DEBUG)
        logger.handlers, logger.propagate = [handler], False


# --- groups ----------------------------------------------------------------------------------------


def resolved(
    group: click.Group, ctx: click.Context, args: list[str]
) -> tuple[str | None, click.Command | None, list[str]]:
    """Finds the command. Raises click.UsageError that names the nearest one."""
    try:
        return click.Group.resolve_command(group, ctx, args)
    except click.UsageError as error:
        near = get_close_matches(args[0], group.list_commands(ctx), n=1)
        says = f"there is no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        raise click.UsageError(says, ctx=ctx) from error


class VerbGroup(click.Group):
    """A group of verbs in the order of the source; ``ls`` also means ``list``, and ``rm`` means ``delete``."""

    command_class = Verb

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        # The program's own help shows them.
        return [*super().get_params(ctx), *shared_options(hidden=True)]

    _SAME: ClassVar = {"ls": "list", "list": "ls", "rm": "delete", "delete": "rm"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, self._SAME.get(cmd_name, ""))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return resolved(self, ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, command in self.commands.items() if not command.hidden]


json_option = click.option("--json", "as_json", cls=SharedOption, is_flag=True, help=_JSON_SAYS)


def exit_of(error: PlainsongError) -> Exit:
    if error.outcome == "unknown":
        return Exit.UNKNOWN
    if isinstance(error, NotFound):
        return Exit.NOT_FOUND
    if isinstance(error, (Unavailable, QuotaExceeded)) or error.code == "deadline_exceeded":
        return Exit.UNAVAILABLE
    return Exit.USAGE if isinstance(error, BadRequest) else Exit.FAILED


def failure_of(error: PlainsongError, *, hint: str = "") -> CommandFailed:
    """Turns an error of the client into what the program reports; ``hint`` replaces the error's own."""
    message = one_line(error.detail)
    if error.outcome == "unknown":
        message += " (outcome unknown: it may have happened)"
    failed = CommandFailed(message, hint=one_line(hint or in_command(error.hint)), code=exit_of(error))
    failed.word, failed.outcome = error.code, error.outcome
    return failed


def one_line(text: str) -> str:
    """Returns ``text`` on one line without control characters, since it may come from a daemon."""
    return "".join(char if char.isprintable() else " " for char in text)
