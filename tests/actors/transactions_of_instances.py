"""Several instances with topics and transactions on one in-memory store; a test can block calls between them."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio
from actors_in_process import NAME, SetClock, actors
from asked_service import AskedService
from owners_in_process import OwnStore, View
from pointers_in_process import request

from actors.pointers import Enlistments, PointerIndex
from actors.reading import read_page
from actors.replica import RoutedTransactions
from plainsong.protocol.errors import NoOwner, TransactionsUnavailable
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Look, PublishUnder, RollBackPointer, StoreUnder
from plainsong.protocol.transactions.ledger import TransactionSettings
from plainsong.protocol.transactions.replica import ReplicaUpdate
from plainsong.protocol.transactions.view import Moment
from storage.base import SERVICE_NAME
from tests.storage.shared_memory import SharedMemory

OTHER = TopicName("ns", "u")


class Lines:
    """Links between instances; a test may cut one, or hold the answers on it."""

    def __init__(self):
        self.cut = set()
        #: By asking instance: answers arrive once the event is set.
        self.held = {}

    def refuse(self, asking, asked):
        if (asking, asked) in self.cut:
            raise TransactionsUnavailable(f"{asked} cannot be reached")

    async def arrive(self, asking):
        if asking in self.held:
            await self.held[asking].wait()


class Peer:
    """Implements ``actors.replica.Peer`` for one instance: it calls the service's owner in this instance's view."""

    def __init__(self, cluster, me):
        self.cluster, self.me = cluster, me

    async def _service(self):
        await trio.lowlevel.checkpoint()
        owner = self.cluster.views[self.me].owner(SERVICE_NAME)
        self.cluster.lines.refuse(self.me, owner.name)
        home = self.cluster.instances[owner.name].transactions.home
        if home is None or owner.name == self.me:
            raise NoOwner("no instance owns the transactions")
        return home

    async def sync(self, known, wait_ms=0):
        synced = await (await self._service()).sync(known, wait_ms)
        await self.cluster.lines.arrive(self.me)
        return ReplicaUpdate.unpack(synced.packed())

    async def as_of(self, at_ms):
        answer = await (await self._service()).as_of(at_ms)
        await self.cluster.lines.arrive(self.me)
        return Moment.unpack(answer.packed())

    async def enlist(self, pointer, name):
        answer = await (await self._service()).enlist(pointer, name)
        await self.cluster.lines.arrive(self.me)
        return answer


@dataclass
class OneInstance:
    """One daemon's actors."""

    name: str
    harness: object
    transactions: RoutedTransactions
    enlistments: Enlistments
    pointers: PointerIndex
    view: View

    async def ask_under(self, pointer, ask, name):
        return await self.enlistments.enlisted(name, pointer, lambda: self.harness.directory.ask(name, ask))

    async def publish_under(self, pointer, *payloads, name=NAME):
        given = request(payloads, pointer)
        return await self.ask_under(pointer, PublishUnder(given, sum(map(len, payloads))), name)

    async def store_under(self, pointer, *payloads, name=NAME):
        given = request(payloads, pointer)
        return await self.ask_under(pointer, StoreUnder(given, sum(map(len, payloads))), name)

    async def roll_back(self, pointer, *, name=NAME):
        return await self.ask_under(pointer, RollBackPointer(pointer), name)

    async def committed(self, *names):
        """Return a committed reader's payloads; one view covers all topics, and each topic's owner reports its end."""
        found = [payloads for payloads, _ in await self.read_committed(*names or (NAME,))]
        return found if names else found[0]

    async def read_committed(self, *names):
        """Do the same; return each topic's payloads, and True if an undecided message follows."""
        await self.transactions.fresh()
        view = self.transactions.view()
        found = []
        for name in names:
            span = await self.cluster.ask(self.name, name, Look(FIRST_BOUND))
            page = await read_page(self.harness.store, None, span, limit=1000, max_bytes=1 << 20, view=view)
            found.append(([payload.decode() for _, payload in page.messages()], page.held is not None))
        return found


@dataclass
class Cluster:
    """All instances."""

    lines: Lines = field(default_factory=Lines)
    instances: dict = field(default_factory=dict)
    views: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)

    def __getitem__(self, name):
        return self.instances[name]

    def home(self):
        return next(each.transactions.home for each in self.instances.values() if each.transactions.home)

    async def ask(self, me, name, ask):
        """Send a topic's request from ``me`` to the owner in the view of ``me``."""
        await trio.lowlevel.checkpoint()
        owner = self.views[me].owner(name).name
        if owner != me:
            self.lines.refuse(me, owner)
        self.asked.append((owner, ask))
        return await self.instances[owner].harness.directory.ask(name, ask)

    def say(self, owner, name=None, to=None):
        """Report a topic's owner to these instances, or to all."""
        for each in to or self.views:
            self.views[each].set(owner, name)

    async def begin(self, **more):
        return (await self.home().begin(**more)).transaction.transaction_id


@asynccontextmanager
async def cluster_of(*names, owner=None, topics=(NAME, OTHER), **settings):
    """Run a cluster; ``owner`` (by default the first) owns everything, and the topics exist."""
    shared, clock = SharedMemory(), SetClock()
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        for name in names:
            view = cluster.views[name] = View(name, names)
            view.set(owner or names[0])
        nursery = await stack.enter_async_context(trio.open_nursery())
        for name in names:
            cluster.instances[name] = await _instance(cluster, name, shared, clock, settings, stack)
        for each in cluster.instances.values():
            each.cluster = cluster
            known = trio.Event()
            nursery.start_soon(each.transactions.run, known.set)
            await known.wait()
        for name in topics:
            await cluster.instances[owner or names[0]].harness.create(name)
        yield cluster
        cluster.lines.held.clear()
        for each in cluster.instances.values():
            each.transactions.close()
        nursery.cancel_scope.cancel()


async def _instance(cluster, name, shared, clock, settings, stack):
    view, pointers = cluster.views[name], PointerIndex()
    store = OwnStore(shared)

    async def ask(topic, what):
        return await cluster.ask(name, topic, what)

    def build():
        return AskedService(store, clock, pointers, ask, TransactionSettings(**settings))

    transactions = RoutedTransactions(build, view, pointers, Peer(cluster, name))
    enlistments = Enlistments(transactions.enlist)
    harness = await stack.enter_async_context(
        actors(
            store,
            clock=clock,
            ownership=view,
            pointers=pointers,
            authority=transactions,
            enlistments=enlistments,
        )
    )
    return OneInstance(name, harness, transactions, enlistments, pointers, view)
