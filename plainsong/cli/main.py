"""The program `plainsong`: its table of verbs, how it loads each on demand, and how it reports errors."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from io import TextIOWrapper
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import click

from plainsong import __version__
from plainsong.cli.command import CommandFailed, Exit, one_line, resolved, shared_options
from plainsong.cli.quitting import quit_at_once
from plainsong.protocol.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Listed(NamedTuple):
    where: str
    """``module:attribute``."""
    says: str
    """The first line of the verb's help."""


#: The program's own verbs, in the order of its help. The help lines are repeated here so that --help loads no verb.
SECTIONS: dict[str, dict[str, Listed]] = {
    "Messages": {
        "publish": Listed("plainsong.cli.publish:publish", "Publish messages from arguments, lines, NDJSON or files."),
        "poll": Listed("plainsong.cli.read:poll", "Read messages of a topic and stop."),
        "tail": Listed("plainsong.cli.read:tail", "Follow topics: print messages as they arrive."),
        "on": Listed("plainsong.cli.on:on", "Run a command for each message, or POST it."),
        "peek": Listed("plainsong.cli.read:peek", "Look at messages: state, size, expiry."),
    },
    "Topics": {
        "topic": Listed("plainsong.cli.topic:topic", "Create, change, list and delete topics."),
        "namespace": Listed("plainsong.cli.namespace:namespace", "List namespaces and set their properties."),
        "definitions": Listed(
            "plainsong.cli.definitions:definitions", "Declare topics, namespaces and pins in a file."
        ),
        "producer": Listed("plainsong.cli.producer:producer", "Show the producers that a topic remembers."),
        "reader": Listed("plainsong.cli.reader:reader", "Show and move positions kept by the daemon."),
        "tx": Listed("plainsong.cli.tx:tx", "Show transactions, and end one that holds readers."),
        "outbox": Listed("plainsong.cli.outbox:outbox", "Publish the messages in a database's outbox."),
        "stats": Listed("plainsong.cli.stats:stats", "Show message counts, sizes, ages and rates."),
        "top": Listed("plainsong.cli.stats:top", "Watch topics live."),
        "events": Listed("plainsong.cli.events:events", "Follow changes as they happen."),
    },
    "The daemon": {
        "serve": Listed("broker.command.serve:serve", "Run the daemon until SIGTERM or Ctrl-C."),
        "config": Listed("broker.command.config:config", "Check and show the daemon's settings."),
        "token": Listed("broker.command.token:token", "Create, list and revoke clients' tokens."),
        "grants": Listed("broker.command.grants:grants", "Show and check the grants of names."),
        "store": Listed("broker.command.store:store", "Inspect a stopped data directory, or a store in HBase."),
        "copy": Listed("broker.command.copy:copy", "Copy a deployment from one store to another, byte for byte."),
        "backup": Listed(
            "broker.command.backup:backup", "Back up a running deployment; verify, restore and remove backups."
        ),
        "replica": Listed(
            "broker.command.replica:replica",
            "Check and restore the second copy in an object store, and let a standby take over.",
        ),
        "maintain": Listed(
            "broker.command.maintain.command:maintain", "Show rows that wait to be cleaned, and clean tables in HBase."
        ),
        "cluster": Listed("plainsong.cli.cluster:cluster", "Show instances and owners; drain and move."),
        "audit": Listed("plainsong.cli.audit:audit", "Show who changed what, and who was refused."),
        "doctor": Listed("plainsong.cli.doctor:doctor", "Check disk, clock, limits and daemon."),
        "bench": Listed("plainsong.cli.bench:bench", "Measure a daemon: rates and latencies."),
    },
    "Jobs": {
        "pipeline": Listed(
            "pyspark_plainsong.pipeline.command:pipeline", "Run the jobs that archive, replay and audit messages."
        ),
    },
    "This program": {
        "help": Listed("plainsong.cli.about:help_verb", "Show the help of a verb."),
        "version": Listed("plainsong.cli.about:version", "Show the versions of what is installed here."),
        "context": Listed("plainsong.cli.context:context", "Name daemons, so that you need no --url."),
        "completion": Listed("plainsong.cli.context:completion", "Print the completion script of a shell."),
    },
}
VERBS: dict[str, Listed] = {name: listed for section in SECTIONS.values() for name, listed in section.items()}
#: Former verbs, each with its replacement. They work until the next version, and are not shown in any help.
FORMER = {"ping": ("doctor", "--ready"), "check": ("doctor", "--check"), "attention": ("doctor", "--attention")}


#: Entry points by which other packages add commands, the daemon's own among them.
GROUP = "plainsong.commands"
OTHERS = "Others"
#: By package, for verbs that are not part of plainsong-client: what the error calls it, and the distribution to
#: install.
ELSEWHERE = {"broker": ("the daemon", "plainsong-server"), "pyspark_plainsong": ("the pipeline", "plainsong-spark")}


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class Program(click.Group):
    """Loads each command on demand, so that a command that cannot be loaded does not break the others.

    Args:
      found: returns the entry points to offer; by default those of the installed packages.
    """

    def __init__(self, *args: object, found: Callable[[], Iterable[EntryPoint]] = _installed, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._found = found
        self._points: dict[str, EntryPoint] | None = None

    @property
    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._points is None:
            self._points = {point.name: point for point in self._found()}
        return self._points

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *VERBS, *self._entry_points})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads the command; returns one that fails with the reason when it cannot be loaded."""
        listed = VERBS.get(cmd_name)
        if listed is not None and listed.where.startswith("plainsong."):
            module, _, attribute = listed.where.partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        point = self._entry_points.get(cmd_name)
        if point is not None:
            return _load(point)
        return super().get_command(ctx, cmd_name) if listed is None else _not_installed(cmd_name, listed)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *shared_options(hidden=False)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return resolved(self, ctx, [*FORMER.get(args[0], args[:1]), *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        width = max(map(len, names), default=0)
        sections = {title: [name for name in verbs if name in names] for title, verbs in SECTIONS.items()}
        sections[OTHERS] = [name for name in names if name not in VERBS]
        for title, listed in sections.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl([(f"{name:<{width}}", self._line_of(ctx, name)) for name in listed])

    def _line_of(self, ctx: click.Context, name: str) -> str:
        listed, point = VERBS.get(name), self._entry_points.get(name)
        if listed is not None and listed.where.startswith("plainsong."):
            return listed.says
        if listed is not None and point is not None and point.value == listed.where and _is_there(point):
            return listed.says
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=60)


def _is_there(point: EntryPoint) -> bool:
    try:
        return find_spec(point.module) is not None
    except ImportError:
        return False


def _load(point: EntryPoint) -> click.Command:
    if misfit := _misfit(point):
        return _failing(point.name, misfit.message, misfit)
    try:
        command = point.load()
    except (ImportError, AttributeError) as error:
        return _broken(point, str(error))
    return command if isinstance(command, click.Command) else _broken(point, f"{point.value} is not a command")


def _misfit(point: EntryPoint) -> CommandFailed | None:
    """The distributions are built from one tree and share internal interfaces, so their versions must match."""
    dist = point.dist
    if dist is None or dist.name not in {name for _, name in ELSEWHERE.values()} or dist.version == __version__:
        return None
    message = f"{dist.name} {dist.version} does not match plainsong-client {__version__}"
    return CommandFailed(message, hint="install both at one version", code=Exit.USAGE)


def _not_installed(name: str, listed: Listed) -> click.Command:
    what, distribution = ELSEWHERE[listed.where.partition(".")[0]]
    error = CommandFailed(
        f"{what} is not installed here",
        hint=f"pip install {distribution} (its wheel is next to this one's; `make dist` builds it)",
        code=Exit.USAGE,
    )
    return _failing(name, "not installed", error)


def _broken(point: EntryPoint, reason: str) -> click.Command:
    error = CommandFailed(f"the command {point.name!r} cannot be loaded: {reason}", hint="reinstall its package")
    return _failing(point.name, f"not available: {reason}", error)


def _failing(name: str, why: str, error: CommandFailed) -> click.Command:
    @click.command(
        name,
        short_help=f"({why})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def fail() -> None:
        raise error

    return fail


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


@click.group(cls=Program, context_settings=SETTINGS)
@click.version_option(__version__, "--version", message="plainsong %(version)s")
def program() -> None:
    """Plainsong: topics of messages in one durable order.

    Start a daemon with `plainsong serve`, then try in a second terminal:

    \b
      plainsong topic create greetings
      plainsong publish greetings hello world
      plainsong poll greetings

    Every command has --help, and prints JSON with --json. The options below
    work before or after the command.

    \b
    Exit codes: 0 done, 1 failed, 2 invalid command line or settings, 3 the
    store cannot be opened, 4 no such topic, reader or context, 5 no daemon
    available, 6 outcome unknown: it may have happened, 7 the daemon's second
    copy belongs to another process now, 130 interrupted.
    """
    # Runs when the command has been loaded: exclude the loaded modules from garbage collections.
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run(command: click.Command, arguments: Sequence[str], name: str) -> int:
    """Runs a command, reports its failure on standard error, and returns the exit code.

    Args:
      arguments: the command line's, without the program's name.
      name: the program's name, for usage lines.
    """
    try:
        code = command.main(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except CommandFailed as error:
        failed = error
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return Exit.USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else name
        failed = CommandFailed(error.format_message(), hint=f"try {path} --help", code=Exit.USAGE)
    except click.ClickException as error:
        failed = CommandFailed(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except UnicodeEncodeError as error:  # arguments, variables and names of files can have any bytes
        said = f"{error.object[:80]!a} is not UTF-8"
        failed = CommandFailed(said, hint="give it as UTF-8", code=Exit.USAGE)
    except OSError as error:
        if _is_of_output(error):
            _drop_output()
            if error.errno == errno.EPIPE:  # the reader has closed the pipe
                return Exit.FAILED
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            failed = CommandFailed(f"standard output cannot be written: {why}")
        else:
            failed = CommandFailed(_said(error))
    else:
        return code if isinstance(code, int) else Exit.OK
    # A command line that cannot be parsed has no parameters to ask.
    failed.as_json |= "--json" in takewhile(lambda each: each != "--", arguments)
    return _report(failed)


def _is_of_output(error: OSError) -> bool:
    """True if the error came from writing standard output."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    if code is click.echo.__code__:
        return not trace.tb_frame.f_locals.get("err")
    return code is run.__code__ or code.co_qualname == "Printer.write"


def _drop_output() -> None:
    """Drops unwritten output, which the interpreter would otherwise try to write again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(error: OSError) -> str:
    if error.filename is not None:
        return one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the current directory was deleted"
    return one_line(error.strerror or str(error))


def _open_streams() -> None:
    """Makes streams that the shell has closed fail when used, and escapes what an encoding cannot represent."""
    for number, (name, flags, mode) in enumerate(
        [("stdin", os.O_WRONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")]
    ):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # a stream with unusual settings
            sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Runs the program and ends the process."""
    # Loaded modules are thousands of objects, none of them garbage. Collections, while modules are loaded and several
    # times at exit, took a third of the processor time of a daemon's start and stop.
    gc.disable()
    _open_streams()
    if signal.getsignal(signal.SIGINT) is quit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # The kernel does not deliver SIGTERM to a container's first process unless that has a handler for it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(program, sys.argv[1:], "plainsong")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, quit_at_once)
    gc.freeze()
    sys.exit(code)


def _report(error: CommandFailed) -> int:
    with suppress(OSError):  # standard error is full or closed
        _write_report(error)
    return error.code


def _write_report(error: CommandFailed) -> None:
    if error.as_json:
        fields = {"error": error.message, "hint": error.hint, "code": error.word, "outcome": error.outcome}
        said = json.dumps({**fields, "exit": int(error.code), **error.more}, ensure_ascii=False)
        click.echo(masked(said), err=True)
        return
    from plainsong.cli.output import coloured  # here, so that completion does not load it

    click.echo(coloured("error:", "error", err=True) + masked(f" {error.message}"), err=True)
    if error.hint:
        click.echo(coloured("hint:", "hint", err=True) + masked(f" {one_line(error.hint)}"), err=True)
