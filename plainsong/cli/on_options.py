"""Options of `on`: commands, headers, retries, and the position it keeps."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from plainsong.cli.command import CommandFailed, Exit
from plainsong.positions import FilePosition, ServerPosition
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from plainsong.positions import Daemon, Position

FOREVER = "forever"
READER = "reader:"
#: Time limit for acquiring the lock of a position's file.
LOCK_WAIT_S = 3.0
_LOCK_PAUSE_S = 0.02


class RetriesType(click.ParamType["int | None"]):
    """A number of retries; ``forever`` is None."""

    name = "retries"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == FOREVER:
            return None
        if isinstance(value, int):
            return value
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            self.fail(f"invalid number of retries {text[:40]!r}; use 0 or more, or {FOREVER}", param, ctx)
        return int(text)


# --- commands and headers ------------------------------------------------------------------------------


def _operators(command: str) -> list[str]:
    """The words of a command that a shell would not pass on, such as ``|`` and ``>``, unless they are quoted."""
    return [word for word in shlex.split(command, posix=False) if re.fullmatch(r"[0-9]?[|&;<>]+(&[0-9])?", word)]


def words_of(command: str, *, shell: bool) -> list[str]:
    """Splits the command into words.

    Raises:
      click.UsageError: the command is empty, or does not exist.
    """
    if shell:
        if not command.strip():
            raise click.UsageError("--run names no command")
        return ["/bin/sh", "-c", command]
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"--run {command!r}: {error}") from None
    if not words:
        raise click.UsageError("--run names no command")
    for operator in _operators(command):
        raise click.UsageError(
            f"--run: without a shell {operator!r} would be an argument of {words[0]!r}; --shell runs the command by /bin/sh, "
            "quotes around it make it an argument"
        )
    if shutil.which(words[0]) is None:
        raise click.UsageError(f"--run: command {words[0]!r} not found; pipes, variables and the like need --shell")
    return words


def header_lines(given: Iterable[str]) -> list[str]:
    """Returns lines ``Name: value``, with those of the file for ``@FILE``. Raises click.UsageError."""
    lines: list[str] = []
    for text in given:
        if not text.startswith("@"):
            lines.append(text)
            continue
        try:
            found = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--header {text}: cannot read the file: {error}") from None
        lines += [line for line in found if line.strip()]
    return lines


# --- position ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptPosition:
    """A position, and where it is kept."""

    name: str
    """The name in the form that ``--position`` takes."""
    position: Position
    path: Path | None = None
    """The file, if the position is kept in one."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Locks the file for the block, since two processes would repeat each other's work.

        A position kept by the daemon needs no lock: the second to save it gets an error.

        Raises:
          CommandFailed: another process has the lock, or the directory cannot be written to; nothing was done.
        """
        if self.path is None:
            yield
            return
        try:
            lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CommandFailed(f"cannot keep the position in {self.path}: {error.strerror}") from error
        try:
            if not _try_lock(lock):
                says = f"another process uses the position {self.path}"
                raise CommandFailed(says, hint="one is enough; for another purpose, give another --position")
            yield
        finally:
            os.close(lock)


def _try_lock(lock: int) -> bool:
    """Lock a file. Returns False if another process holds the lock for ``LOCK_WAIT_S``.

    If ``plainsong on`` is killed while it forks, its child holds the lock until it runs its program.
    """
    until_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True


def kept_position(given: str | None, derived: str) -> KeptPosition:
    """Parses ``--position``; without it, the position of a reader with a derived name.

    Raises:
      click.UsageError: the value is neither a file nor a reader.
    """
    text = READER + derived if given is None else given
    if text.startswith(READER):
        try:
            return KeptPosition(text, ServerPosition(text.removeprefix(READER)))
        except PlainsongError as error:
            raise click.UsageError(f"--position {text}: {error.detail}; {error.hint}") from None
    if not text or text.endswith("/") or Path(text).is_dir():
        raise click.UsageError(f"--position {text!r} is not a file; use a file's name, or {READER}NAME")
    path = Path(text).absolute()
    return KeptPosition(str(path), FilePosition(path), path)


def derived_name(command: str | None, url: str | None) -> str:
    """A reader's name from the command or the URL, with a hash of all its words.

    So two reactions never share a position, even when one interpreter runs both.
    """
    if url is not None:
        parts = urlsplit(url)
        text = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        words = [text, parts.query]
    else:
        try:
            words = shlex.split(command or "")
        except ValueError:  # a shell may accept it
            words = (command or "").split()
        text = Path(words[0]).stem if words else ""
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:200]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return f"on-{slug}-{digest}" if slug else f"on-{digest}"


def check_unlike(derived: str, readers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a first start when the same command with other arguments has a position.

    If the user changed a reaction's arguments, a new start would repeat all its work; a different reaction must start
    from the beginning. Only the user can tell which it is.

    Raises:
      CommandFailed: there is such a position; nothing was done.
    """
    names = [str(each["name"]) for each in readers]
    stem = derived.rpartition("-")[0]
    like = [name for name in names if re.fullmatch(rf"{re.escape(stem)}(-[0-9a-f]{{8}})?", name)]
    if like and derived not in names:
        raise CommandFailed(
            f"no position {READER}{derived} yet, but {READER}{like[0]} of the same command with other arguments",
            hint=f"--position {READER}{like[0]} continues there; --from oldest (or another place) starts a new reaction",
            code=Exit.USAGE,
        )


class UnsavedPosition:
    """A position that is loaded and never saved, for a dry run."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def load(self, daemon: Daemon, topics: Iterable[str]) -> dict[str, bytes]:
        return self._position.load(daemon, topics)

    def save(self, daemon: Daemon, positions: Mapping[str, bytes]) -> None:
        """Saves nothing."""
