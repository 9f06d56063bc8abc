"""Finds the tokens or grants file of a command: the one given by ``--file``, or else by the settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from broker.command.options import load_settings
from plainsong.cli.command import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def file_options(what: str) -> Callable[[F], F]:
    """Add the options ``--file``, ``--config`` and ``--set``, whose values ``chosen_file`` takes."""
    options = (
        click.option("--file", type=click.Path(path_type=Path), help=f"The {what} file."),
        click.option(
            "--config", type=click.Path(path_type=Path), help=f"Settings file that names it (security.{what}_file)."
        ),
        click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Set a setting. Repeatable."),
    )

    def added(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return added


def chosen_file(what: str, file: Path | None, config: Path | None, sets: tuple[str, ...]) -> Path:
    """Return the file to work on. Raises CommandFailed if nothing names one."""
    found = named_file(what, file, config, sets)
    if found is None:
        raise CommandFailed(
            f"no {what} file is given",
            hint=f"give --file, or --config with the settings that name security.{what}_file",
            code=Exit.USAGE,
        )
    return found


def named_file(what: str, file: Path | None, config: Path | None, sets: tuple[str, ...]) -> Path | None:
    """Return the file to work on; None if neither an option nor a setting names one."""
    if file is not None:
        if config is not None or sets:
            load_settings(config, None, None, sets)  # a wrong setting is an error even if it is not needed
        return file
    named: str = load_settings(config, None, None, sets).config.value(f"security.{what}_file")
    return Path(named) if named else None
