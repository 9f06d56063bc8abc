"""``plainsong config``: shows the settings and where they come from, and checks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.command.named_files import notes_of_files, problems_of_files
from broker.command.options import load_settings, refuse_strangers, setting_options
from broker.config import every_setting
from broker.config.config import notes
from broker.config.exposure import in_effect
from broker.config.values import show_value
from plainsong.cli.command import CommandFailed, Exit, json_option
from plainsong.protocol.masking import masked
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from broker.config import Config, LoadedConfig


@click.group()
def config() -> None:
    """Check and show the daemon's settings.

    Later sources override earlier ones: defaults, the file of --config, the
    environment (PLAINSONG_HTTP__BIND for http.bind; PORT for its port), flags.
    """


@config.command()
@setting_options
@json_option
def check(file: Path | None, data_dir: str | None, bind: str | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Check the settings and the files that they name, and list all errors.

    Also warns about settings that are valid but probably a mistake. Exits with
    0 if `plainsong serve` would start with them, with 2 if not.
    """
    config = load_settings(file, data_dir, bind, sets).config
    refuse_strangers(config)
    refuse_unusable_files(config)
    found = [*notes(config), *notes_of_files(config), *in_effect(config).values()]
    if as_json:
        click.echo(json.dumps({"valid": True, "notes": list(found)}, ensure_ascii=False))
        return
    for note in found:
        click.echo(f"note: {note}")
    click.echo("the settings are valid")


@config.command()
@setting_options
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@json_option
def show(
    file: Path | None, data_dir: str | None, bind: str | None, sets: tuple[str, ...], origin: bool, as_json: bool
) -> None:
    """Show every setting as `plainsong serve` would use it.

    User and password in a URL are shown as ***.
    """
    loaded = load_settings(file, data_dir, bind, sets)
    click.echo(masked(_as_json(loaded, origin) if as_json else _as_toml(loaded, origin)))


def refuse_unusable_files(config: Config) -> None:
    """Raise CommandFailed if files that the settings name cannot be used; the error lists them, one per line."""
    problems = problems_of_files(config)
    if len(problems) == 1:
        hint = "it must exist, and not be writable by its group or others"
        raise CommandFailed(problems[0], hint=hint, code=Exit.USAGE)
    if problems:
        lines = [f"{counted(len(problems), 'file')} cannot be used", *(f"  {problem}" for problem in problems)]
        raise CommandFailed("\n".join(lines), code=Exit.USAGE)


def _as_json(loaded: LoadedConfig, origin: bool) -> str:
    values = {name: loaded.config.value(name) for name in every_setting()}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    if origin:
        return json.dumps({name: {"value": plain[name], "origin": loaded.origins[name]} for name in plain}, indent=2)
    return json.dumps(plain, indent=2)


def _as_toml(loaded: LoadedConfig, origin: bool) -> str:
    """Return the lines of a settings file."""
    shown = {
        name: f"{name} = {show_value(setting.meaning, loaded.config.value(name))}"
        for name, setting in every_setting().items()
    }
    if not origin:
        return "\n".join(shown.values())
    width = max(map(len, shown.values()))
    return "\n".join(f"{line:<{width}}  # {loaded.origins[name]}" for name, line in shown.items())
