"""Shared by the daemon's commands: the options that choose settings, Ctrl-C, and times."""

from __future__ import annotations

import os
import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import trio

from broker.config import ConfigError, LoadedConfig, load_config
from broker.config.exposure import refusals
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.config import Config
    from plainsong.protocol.names import TopicName

F = TypeVar("F", bound="Callable[..., Any]")
_OPTIONS = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="Read this TOML file; none by default."),
    click.option("--data-dir", metavar="DIR", help="Data directory (storage.data_dir)."),
    click.option(
        "--bind",
        metavar="HOST:PORT",
        help="Listen here (http.bind): HOST:PORT, or unix:/PATH; port 0 picks a free one.",
    ),
    click.option(
        "--set", "sets", metavar="NAME=VALUE", multiple=True, help="Set any setting, e.g. log.access=true. Repeatable."
    ),
)


def parse_topic(text: str) -> TopicName:
    """Parse ``NAMESPACE:TOPIC``, or a topic of the namespace ``default``. Raises InvalidName."""
    namespace, colon, topic = text.partition(":")
    return topic_name(namespace, topic) if colon else topic_name("default", text)


def setting_options(command: F) -> F:
    """Add ``--config``, ``--data-dir``, ``--bind`` and ``--set``, as ``load_settings`` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def load_settings(file: Path | None, data_dir: str | None, bind: str | None, sets: tuple[str, ...]) -> LoadedConfig:
    """Load the settings of a command, from its options and the environment.

    Raises:
      CommandFailed: the settings are invalid; the message lists every problem, one per line.
    """
    flags: dict[str, object] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandFailed(f"--set {text}: no value", hint="write --set section.key=value", code=Exit.USAGE)
        flags[name.strip()] = value
    flags |= {"storage.data_dir": data_dir} if data_dir is not None else {}
    flags |= {"http.bind": bind} if bind is not None else {}
    try:
        loaded = load_config(file, os.environ, flags)
    except ConfigError as error:
        first, *others = error.problems
        if not others:
            raise CommandFailed(f"{first.origin}: {first.detail}", hint=first.hint, code=Exit.USAGE) from error
        lines = [f"{len(error.problems)} settings are invalid", *(f"  {problem}" for problem in error.problems)]
        raise CommandFailed("\n".join(lines), code=Exit.USAGE) from error
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    return loaded


def refuse_strangers(config: Config) -> None:
    """Raise CommandFailed if other machines could reach the daemon unprotected."""
    for refusal in refusals(config):
        raise CommandFailed(refusal.detail, hint=refusal.hint, code=Exit.USAGE)


# --- Ctrl-C ----------------------------------------------------------------------------------------


async def until_ctrl_c(work: Callable[[], Awaitable[None]], *also: signal.Signals) -> None:
    """Run ``work``; Ctrl-C cancels it at its next checkpoint. A second Ctrl-C, during the cleanup, interrupts any line.

    If the first one interrupted any line, it could end a task that writes for others, which would then wait forever.

    Args:
      also: further signals with the same effect.
    Raises:
      BaseExceptionGroup: with a KeyboardInterrupt if ``work`` was cancelled, or with the error of ``work``.
    """
    # A signal that the parent ignores stays ignored: nohup, a background job.
    signals = [each for each in (signal.SIGINT, *also) if signal.getsignal(each) is not signal.SIG_IGN]
    if not signals:
        await work()
        return
    async with trio.open_nursery() as nursery:
        await nursery.start(_wait_for, signals)
        await work()
        nursery.cancel_scope.cancel()


async def _wait_for(
    signals: list[signal.Signals], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*signals) as received:
        task_status.started()
        await anext(aiter(received))
    raise KeyboardInterrupt


# --- times -----------------------------------------------------------------------------------------


_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?Z?")


def time_ms(option: str, text: str) -> int:
    """Parse a time, and return it in milliseconds since 1970. Raises CommandFailed."""
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    if _TIME.fullmatch(text):
        try:
            return int(datetime.fromisoformat(text.rstrip("Z")).replace(tzinfo=UTC).timestamp() * 1000)
        except ValueError:
            pass
    raise CommandFailed(
        f"{option} {text[:60]!r} is not a time",
        hint="write 2026-11-22T05:00Z (in UTC), or milliseconds since 1970",
        code=Exit.USAGE,
    )
