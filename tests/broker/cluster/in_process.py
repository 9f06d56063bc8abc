"""Several instances in one process: whole daemons on shared memory, linked over loopback, with views that tests set.

async with cluster("a", "b", "c") as nodes:
    nodes.move("ns:t", "b")                      every view shows b as the owner at once
    nodes.move("ns:t", "c", seen_by="ab")        c has not heard of it yet
    await nodes["a"].publish("t", "hello")
    nodes["b"].cut_links()                       or kill(), or nodes["b"].store.reachable
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import httpx
import trio

from actors.authority import keep_authority
from actors.ownership import Instance
from broker.assemble import assemble
from broker.config.config import config_of
from broker.http.budgets import BodyBudget
from broker.http.reactor import open_reactor
from broker.listeners import serve
from broker.metrics import Metrics
from plainsong.protocol.cluster import SLICES
from plainsong.protocol.errors import TransactionsUnavailable
from plainsong.protocol.names import TopicName
from tests.patience import PATIENCE_S
from tests.storage.shared_memory import SharedMemory

TOPICS = "/v1/namespaces/ns/topics"


def named(text):
    """Parse ``"ns:t"``; return a TopicName unchanged."""
    return TopicName(*text.split(":")) if isinstance(text, str) else text


class SetView:
    """``Ownership`` of one instance, set by the test: it may lag, and disagree with the other instances."""

    def __init__(self, name, nodes):
        self._name = name
        self._nodes = nodes
        self._owners = {}
        self._told = []
        #: Names that another instance has claimed in the store: without an owner until the view is read again, which
        #: shows the same owner as before unless the test has changed it.
        self.lost = set()

    @property
    def me(self):
        return self._instance(self._name)

    @property
    def instances(self):
        return tuple(self._instance(name) for name in sorted(self._nodes.there))

    def _instance(self, name):
        return Instance(name, self._nodes.addresses.get(name, ""))

    def owner(self, name):
        if name in self.lost:
            return None
        there = sorted(self._nodes.there)
        found = self._owners.get(name, there[crc32(str(name).encode()) % len(there)])
        return None if found is None else self._instance(found)

    def is_mine(self, name):
        owner = self.owner(name)
        return owner is not None and owner.name == self._name

    def slices_of(self, instance):
        return SLICES if instance in self._nodes.there else 0

    def deposed(self, name):
        self.lost.add(name)
        trio.lowlevel.current_trio_token().run_sync_soon(self.lost.discard, name)

    def on_change(self, told):
        self._told.append(told)

    def set(self, name, owner):
        """Make ``owner`` the owner of ``name`` in this instance's view; None: no owner."""
        self._owners[name] = owner
        self.lost.discard(name)
        for told in list(self._told):
            told()


class Node:
    def __init__(self, name, nodes, store):
        self.name = name
        self.store = store
        self.view = SetView(name, nodes)
        self.stop = trio.Event()
        self.life = trio.CancelScope()
        self.ended = trio.Event()
        self.service = self.http = self.address = None

    async def call(self, method, path, *, status=200, code=None, **more):
        """Send a request, check the status and, if given, the problem's code, and return the answer."""
        answer = await self.http.request(method, path, **more)
        assert answer.status_code == status, (answer.status_code, answer.text)
        if code is not None:
            assert answer.json()["code"] == code, answer.text
        return answer

    async def create(self, topic="t", **properties):
        return await self.call("PUT", f"{TOPICS}/{topic}", json=properties)

    async def publish(self, topic, *payloads, **more):
        """Return the ids of the first and the last message."""
        prefer = {"Prefer": "return=representation"}
        body = {"messages": list(payloads), **more}
        answer = await self.call("POST", f"{TOPICS}/{topic}/publish", json=body, headers=prefer)
        return answer.json()["firstId"], answer.json()["lastId"]

    async def poll(self, topic="t", **body):
        """Return the payloads."""
        answer = await self.call("POST", f"{TOPICS}/{topic}/poll", json=body)
        return [message["payload"] for message in answer.json()]

    @property
    def cluster(self):
        return self.service.cluster

    @property
    def is_deciding(self):
        """True if this instance decides transactions, or reaches the one that does."""
        try:
            self.service.authority.transactions.view()
        except TransactionsUnavailable:
            return False
        return True

    def cut_links(self):
        """Break the links that this instance has opened."""
        for _, link in self.cluster.links:
            link.cut()

    def kill(self):
        """End the instance at once: its requests are not finished, and its connections break."""
        self.life.cancel()

    def parked(self, name):
        """Return the number of polls parked in a topic here."""
        core = next((e.actor.core for e in self.service.directory if e.name == named(name)), None)
        return 0 if core is None else len(core.parking)

    def metric(self, name, **labels):
        return self.service.metrics.registry.get_sample_value(name, labels) or 0


class Nodes(dict):
    def __init__(self):
        super().__init__()
        self.shared = SharedMemory()
        self.addresses = {}
        #: The instances that the initial placement counts.
        self.there = []

    def move(self, name, owner, *, seen_by=None):
        """Change the owner of a name in the views of some instances (default: all); None: no owner."""
        for node in [self[each] for each in seen_by] if seen_by is not None else list(self.values()):
            node.view.set(named(name), owner)

    async def run(self, name, config, task_status=trio.TASK_STATUS_IGNORED):
        """Run one more instance until it is stopped or killed."""
        node = self[name] = Node(name, self, self.shared.store())
        try:
            with node.life:
                await self._run(node, config, task_status)
        finally:
            node.ended.set()

    async def _run(self, node, config, task_status):
        await keep_authority(node.store, config.transactions.service)
        async with trio.open_nursery() as actors:
            service = node.service = await assemble(config, node.store, Metrics("0"), actors, ownership=node.view)
            await service.start(actors)
            budget = BodyBudget(config.http.max_inflight_bytes, service.answers)
            turns = service.directory.environment.run_queue
            async with open_reactor(config.http.keep_alive_s, turns) as reactor, trio.open_nursery() as listeners:
                (node.address,) = await listeners.start(serve, service, budget, reactor, node.stop)
                self.addresses[node.name] = node.address
                # ``verify``: there is no TLS here, and loading the system's certificates takes tens of milliseconds.
                url = f"http://{node.address}"
                async with httpx.AsyncClient(base_url=url, verify=False, timeout=2 * PATIENCE_S) as node.http:
                    task_status.started()
                    await node.stop.wait()
                service.stop()
            await service.drained()
            actors.cancel_scope.cancel()


@asynccontextmanager
async def cluster(*names, **values):
    """Run instances with these names and settings (``section__key``)."""
    nodes = Nodes()
    nodes.there = list(names)
    given = {
        "storage.kind": "memory",
        "http.bind": "127.0.0.1:0",
        "transactions.service": "off",
        "shutdown.drain_s": 1.0,
    }
    with TemporaryDirectory() as scratch:
        given["storage.data_dir"] = Path(scratch)
        config = config_of({**given, **{name.replace("__", ".", 1): value for name, value in values.items()}})
        async with _running(nodes, names, config):
            yield nodes


@asynccontextmanager
async def _running(nodes, names, config):
    async with trio.open_nursery() as nursery:
        for name in names:
            await nursery.start(nodes.run, name, config)
        try:
            yield
        finally:
            for node in nodes.values():
                node.store.reachable.set()
                node.stop.set()
        with trio.move_on_after(5):
            for node in nodes.values():
                await node.ended.wait()
        nursery.cancel_scope.cancel()
