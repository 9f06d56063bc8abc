"""Ctrl-C in a command that runs its own event loop."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from broker.command.options import until_ctrl_c


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_takes_effect_where_the_command_waits_and_never_in_the_middle_of_a_line():
    done = []

    async def work() -> None:
        ctrl_c()
        done.extend(range(1000))
        with trio.CancelScope(shield=True):  # like a commit of everything in progress
            await trio.lowlevel.checkpoint()
            done.append("committed")
        await trio.sleep_forever()

    with pytest.RaisesGroup(KeyboardInterrupt):
        trio.run(until_ctrl_c, work)
    assert done == [*range(1000), "committed"]


def test_a_second_ctrl_c_ends_a_cleanup():
    async def work() -> None:
        try:
            ctrl_c()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                ctrl_c()
                await trio.sleep_forever()

    with pytest.RaisesGroup(KeyboardInterrupt, KeyboardInterrupt, flatten_subgroups=True):
        trio.run(until_ctrl_c, work)


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = []

    async def work() -> None:
        ctrl_c()
        await trio.lowlevel.checkpoint()
        done.append("all of it")

    try:
        trio.run(until_ctrl_c, work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all of it"]


def test_work_ends_or_fails_as_usual():
    async def fails() -> None:
        raise ValueError("no")

    trio.run(until_ctrl_c, trio.lowlevel.checkpoint)
    with pytest.RaisesGroup(ValueError):
        trio.run(until_ctrl_c, fails)
