"""Errors of files and stores have one text, hint and exit code in every command of the daemon."""

from __future__ import annotations

import click
import pytest

from broker.command.failures import CONTINUES, reported
from broker.security.files import FileUnusable
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.errors import StorageFailed, TopicNotFound
from storage.backup.objects import DamagedObject
from storage.base import Deposed, StoreConflict, StoreError, StoreInUse
from storage.copying import StoresDiffer
from storage.replication.protocol import ReignOver


def grouped(error: BaseException) -> BaseException:
    return BaseExceptionGroup("a nursery", [BaseExceptionGroup("a nursery", [error])])


in_any_group = pytest.mark.parametrize("around", [lambda error: error, grouped], ids=["alone", "in a group"])


@in_any_group
@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (StoreInUse("in use", hint="stop it"), Exit.STORE, "stop it"),
        (FileUnusable("tls.key", "it is missing", "chmod 600"), Exit.USAGE, "chmod 600"),
        (StoresDiffer("two rows differ"), Exit.FAILED, ""),
        (Deposed("another owner"), Exit.FAILED, ""),
        (DamagedObject("its bytes have changed"), Exit.FAILED, ""),
        (ReignOver("another process has the log"), Exit.FAILED, ""),
        (StoreError("no answer"), Exit.UNAVAILABLE, CONTINUES),
        (StoreError("no answer", hint="start it"), Exit.UNAVAILABLE, "start it"),
        (StoreConflict("a row has changed"), Exit.UNAVAILABLE, CONTINUES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_a_store_or_file_ends_the_command_with_its_exit_code(around, error, code, hint):
    with pytest.raises(CommandFailed) as caught, reported(CONTINUES):
        raise around(error)
    failed = caught.value
    assert (failed.code, failed.hint) == (code, hint)
    assert failed.message == getattr(error, "detail", str(error))
    assert failed.word == getattr(error, "code", "")


@in_any_group
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        click.exceptions.Exit(1),
        CommandFailed("reported already"),
        TopicNotFound("the daemon has none"),
        StorageFailed("the store of the daemon"),
        BrokenPipeError("the reader has enough"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_end_of_a_command_leaves_its_group(around, error):
    with pytest.raises(type(error)) as caught, reported():
        raise around(error)
    assert caught.value is error


def test_an_interrupt_prevails_over_the_errors_that_it_causes():
    with pytest.raises(KeyboardInterrupt), reported():
        raise BaseExceptionGroup("a nursery", [StoreError("cut off"), KeyboardInterrupt()])


def test_a_bug_keeps_its_group():
    with pytest.raises(BaseExceptionGroup), reported():
        raise grouped(ZeroDivisionError())
