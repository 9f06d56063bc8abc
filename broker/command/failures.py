"""Errors of files and stores, as a command of the daemon reports them: a text, a hint and an exit code."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from broker.security.files import FileUnusable
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.errors import PlainsongError, StorageFailed
from storage.base import Deposed, StoreConflict, StoreError, StoreUnusable
from storage.copying import StoresDiffer

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The hint for a command that continues an interrupted run.
CONTINUES = "run it again: it continues where it stopped"


@contextmanager
def reported(again: str = "") -> Iterator[None]:
    """Turn an error of a file or a store, alone or in a group, into CommandFailed.

    Other errors that end a command (the daemon's, standard output's, Ctrl-C) are taken out of their group and raised.
    Bugs are raised unchanged, so that the traceback shows the whole group.

    Args:
      again: the hint for a store that does not answer, if the error has none of its own.
    """
    try:
        yield
    except BaseException as error:
        found = list(leaves(error))
        leaf = next((each for each in found if isinstance(each, KeyboardInterrupt)), found[0])
        if isinstance(leaf, FileUnusable):
            raise CommandFailed(str(leaf), hint=leaf.hint, code=Exit.USAGE) from error
        if isinstance(leaf, PlainsongError) and (code := _exit_of(leaf)) is not None:
            hint = leaf.hint or (again if code is Exit.UNAVAILABLE else "")
            failed = CommandFailed(leaf.detail, hint=hint, code=code)
            failed.word = leaf.code
            raise failed from error
        if isinstance(leaf, KeyboardInterrupt | OSError | PlainsongError | CommandFailed | click.exceptions.Exit):
            raise leaf from leaf.__cause__
        raise


def _exit_of(error: PlainsongError) -> Exit | None:
    """Return the exit code of a store's error; None for an error of the daemon."""
    if isinstance(error, StoreUnusable):
        return Exit.STORE
    if isinstance(error, StoresDiffer | Deposed):
        return Exit.FAILED
    if isinstance(error, StoreError | StoreConflict):
        return Exit.UNAVAILABLE
    # Damage, or a log that another process has continued. The client raises StorageFailed itself for the daemon's store.
    return Exit.FAILED if isinstance(error, StorageFailed) and type(error) is not StorageFailed else None


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` itself, or all errors in the group, at any depth."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error
