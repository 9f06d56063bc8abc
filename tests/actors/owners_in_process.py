"""Several instances in one process with a shared in-memory store, and views of ownership that a test sets."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

from actors_in_process import actors

from actors.ownership import Instance
from tests.storage.shared_memory import SharedMemory, SharedMemoryStore


class OwnStore(SharedMemoryStore):
    """One instance's store; ``release_all`` unblocks it at the end of a test."""

    def release_all(self):
        self.reachable.set()


class View:
    """One instance's ``Ownership``, as last set by the test; views of different instances may contradict each other."""

    def __init__(self, me, cluster):
        self._me = Instance(me, f"{me}:7420")
        self._cluster = cluster
        self._owners = {}
        self._told = []
        #: Topics that, according to the store, another owner has claimed, in order.
        self.lost = []

    @property
    def me(self):
        return self._me

    @property
    def instances(self):
        return tuple(Instance(name, f"{name}:7420") for name in sorted(self._cluster))

    def owner(self, name):
        owner = self._owners.get(name, self._owners.get(None))
        return None if owner is None else Instance(owner, f"{owner}:7420")

    def is_mine(self, name):
        return self.owner(name) == self._me

    def deposed(self, name):
        self.lost.append(name)

    def on_change(self, told):
        self._told.append(told)

    def set(self, owner, name=None):
        """Set the owner of a topic, or with no name of all topics, in this instance's view."""
        if name is None:
            self._owners.clear()
        self._owners[name] = owner
        for told in self._told:
            told()


@asynccontextmanager
async def instances(*names, owner=None, **options):
    """Run a harness for each name, with a ``View`` of its own; at first ``owner`` (default: the first) owns all topics."""
    shared = SharedMemory()
    harnesses = {}
    async with AsyncExitStack() as stack:
        for name in names:
            view = View(name, names)
            view.set(owner or names[0])
            store = OwnStore(shared)
            harnesses[name] = await stack.enter_async_context(actors(store, ownership=view, **options))
        yield harnesses


def say(harnesses, owner, name=None):
    """Set a topic's owner in all instances' views at once."""
    for harness in harnesses.values():
        harness.directory.environment.ownership.set(owner, name)
