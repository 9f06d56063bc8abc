"""A click group whose commands are entry points: found by name, loaded when they are asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import click

from plainsong.cli.exits import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GROUP = "plainsong.commands"


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

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *(point.name for point in self._found())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, loaded now; one that fails with its reason if it cannot be."""
        for point in self._found():
            if point.name == cmd_name:
                return _load(point)
        return super().get_command(ctx, cmd_name)


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
