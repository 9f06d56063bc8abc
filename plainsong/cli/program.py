"""A click group whose commands are found by name and loaded when they are asked for.

The program's own verbs stand in a table; those of other packages are entry points of the group
``plainsong.commands``. Listing them loads only those that are in no table.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from plainsong.cli.exits import CommandFailed
from plainsong.cli.verb import resolved
from plainsong.cli.verbs import SECTIONS, VERBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GROUP = "plainsong.commands"
OTHERS = "Others"


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class Program(click.Group):
    """The program ``plainsong``. A command that cannot be loaded spoils no other.

    Args:
      found: the entry points to offer; those of the installed packages when it is None.
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
        """The names of all commands, sorted."""
        own = {name for name, listed in VERBS.items() if listed.where.startswith("plainsong.")}
        return sorted({*super().list_commands(ctx), *own, *self._entry_points})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, loaded now; one that fails with its reason if it cannot be."""
        listed = VERBS.get(cmd_name)
        if listed is not None and listed.where.startswith("plainsong."):
            module, _, attribute = listed.where.partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        point = self._entry_points.get(cmd_name)
        return super().get_command(ctx, cmd_name) if point is None else _load(point)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is meant. Raises click.UsageError naming the nearest one."""
        return resolved(self, ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All commands with one line each, in sections."""
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
        if listed is not None and (point is None or (point.value == listed.where and _is_there(point))):
            return listed.says
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=60)


def _is_there(point: EntryPoint) -> bool:
    try:
        return find_spec(point.module) is not None
    except ImportError:
        return False


def _load(point: EntryPoint) -> click.Command:
    try:
        command = point.load()
    except (ImportError, AttributeError) as error:
        return _broken(point, str(error))
    return command if isinstance(command, click.Command) else _broken(point, f"{point.value} is no command")


def _broken(point: EntryPoint, reason: str) -> click.Command:
    @click.command(
        point.name,
        short_help=f"(not available: {reason})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def fail() -> None:
        raise CommandFailed(
            f"the command {point.name!r} cannot be loaded: {reason}", hint="install the package again: etc/venv run"
        )

    return fail
