"""A course that can hold a write of a chosen owner while something else happens."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from whole_course import NAMES, Failed, Scene, life

from storage.base import SERVICE_NAME
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore


class GatedStore(FaultyStore):
    """A store that delays writes of chosen owners before they have any effect."""

    def __init__(self):
        super().__init__(MemoryStore())
        self._gates = {}

    async def write(self, commit, *, claim, expect=()):
        gate = self._gates.get(claim.name.topic)
        if gate is not None:
            with trio.CancelScope(shield=True):
                gate[0].set()
                await gate[1].wait()
        await super().write(commit, claim=claim, expect=expect)

    @asynccontextmanager
    async def held(self, owner, call, *arguments):
        """Run a call, and hold its write for the duration of the block."""
        reached, opened = self._gates[owner] = (trio.Event(), trio.Event())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, *arguments)
            await reached.wait()
            try:
                yield nursery
            finally:
                del self._gates[owner]
                opened.set()


SERVICE = SERVICE_NAME.topic


@asynccontextmanager
async def staged(scene=None):
    """Create both topics with one message each, and a transaction that has published in ``a``; check at the end."""
    scene = scene or Scene(GatedStore())
    async with life(scene.store) as scene.daemon:
        for topic in NAMES:
            await scene.daemon.create(topic)
            await scene.publish(topic, 1)
        transaction, _ = await scene.begin()
        await scene.publish("a", 2, transaction)
        await scene.look()
        yield scene, transaction
        await scene.look()
        await scene.check()


async def refused(call, *arguments):
    """Return the code of the problem that a call is refused with."""
    with pytest.raises(Failed) as info:
        await call(*arguments)
    return info.value.code


async def and_fail(call, *arguments):
    """Run ``refused`` as a task."""
    await refused(call, *arguments)


async def leaving(call, *arguments):
    """Make the call as a client that disconnects before the answer."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, *arguments)
            await wait_all_tasks_blocked()
            scope.cancel()
