"""Simulated instances: the daemon's production assembly on simulated disk, network, clock and membership."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import unquote
from zlib import crc32

import trio

from actors.authority import keep_authority
from actors.ownership import Instance
from broker.assemble import assemble
from broker.config.config import config_of
from broker.http.handlers import answer_of
from broker.http.messages import Request
from broker.http.wire import answer_to
from broker.link.server import serve_link
from broker.metrics import Metrics
from plainsong.protocol.cluster import SLICES
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.names import TopicName
from tests.daemon.talk import Answer, ConnectionLost, NotConnected
from tests.simulation.clocks import SimulatedClock
from tests.simulation.disk import Disk, DiskStore, Weather
from tests.simulation.network import End, Network

if TYPE_CHECKING:
    from broker.config import Config
    from broker.daemon import Daemon
    from broker.http.route import Endpoint

State = Literal["up", "down"]
T = TypeVar("T")


class View:
    """An instance's ``Ownership`` in one life: the latest reported members, which may be outdated or wrong."""

    def __init__(self, name: str, there: list[str], reread: Callable[[], object]) -> None:
        self._reread = reread
        self._me = Instance(name, address_of(name))
        self._there = list(there)
        self._owners: dict[TopicName, str] = {}
        self._found: dict[TopicName, Instance] = {}
        """Owners looked up since the last report."""
        self._listeners: list[Callable[[], None]] = []
        self._lost: set[TopicName] = set()

    @property
    def me(self) -> Instance:
        return self._me

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(Instance(name, address_of(name)) for name in sorted(self._there))

    def owner(self, name: TopicName) -> Instance | None:
        found = self._found.get(name)
        if found is None and self._there:
            there = sorted(self._there)
            owner = self._owners.get(name) or there[crc32(str(name).encode()) % len(there)]
            found = self._found[name] = Instance(owner, address_of(owner))
        return found

    def is_mine(self, name: TopicName) -> bool:
        owner = self.owner(name)
        return owner is not None and owner.name == self._me.name and name not in self._lost

    def slices_of(self, instance: str) -> int:
        return SLICES if instance in self._there else 0

    def deposed(self, name: TopicName) -> None:
        self._lost.add(name)
        self._reread()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def tell(self, there: list[str], lies: Mapping[TopicName, str]) -> None:
        """Set the members that the instance sees from now on."""
        self._there, self._owners = list(there), dict(lies)
        self._found.clear()
        self._lost.clear()
        for listener in list(self._listeners):
            listener()


def address_of(name: str) -> str:
    return f"{name}:7420"


@cache
def _pattern_of(path: str) -> re.Pattern[str]:
    """Compile the pattern of a route's paths."""
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path) + "$")


class Life:
    """One process: from its start until it is killed or fails."""

    def __init__(self, store: DiskStore, view: View) -> None:
        self.store, self.view = store, view
        self.scope = trio.CancelScope()
        self.daemon: Daemon | None = None
        #: Routes by method and number of path segments: pattern and endpoint.
        self.routes: dict[tuple[str, int], list[tuple[re.Pattern[str], Endpoint]]] = {}
        self._found: dict[tuple[str, str], tuple[Endpoint, dict[str, str]]] = {}
        #: Client requests in progress; a dict, because they must be cancelled in a deterministic order.
        self._serving: dict[trio.CancelScope, None] = {}

    def route(self, method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
        """Return the endpoint and the path's parameters."""
        found = self._found.get((method, path))
        if found is None:
            found = self._found[method, path] = self._look_for(method, path)
        return found

    def _look_for(self, method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
        for pattern, endpoint in self.routes.get((method, path.count("/")), ()):
            match = pattern.match(path)
            if match is not None:
                return endpoint, {name: unquote(value) for name, value in match.groupdict().items()}
        raise AssertionError(f"there is no route {method} {path}")

    async def serve(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Run ``work``; return its result, or None if the process ended first."""
        scope, found = trio.CancelScope(), None
        self._serving[scope] = None
        try:
            with scope:
                found = await work()
        finally:
            del self._serving[scope]
        return None if scope.cancel_called else found

    def end(self) -> None:
        """Break the clients' connections."""
        for scope in list(self._serving):
            scope.cancel()


class SimulatedInstance:
    """One daemon with its disk and clock, which outlive its processes."""

    def __init__(self, name: str, disk: Disk, network: Network, config: Config, rng: Random) -> None:
        self.name = name
        self.disk, self.network, self.config, self.rng = disk, network, config, rng
        self.clock = SimulatedClock()
        self.weather = Weather()
        self.life: Life | None = None
        #: Makes the membership service check again, and report some time later.
        self.reread: Callable[[], object] = int
        self.alone = not disk.shared

    @property
    def state(self) -> State:
        return "up" if self.life is not None and self.life.daemon is not None else "down"

    async def run(self, there: list[str], task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Run one life, until it is killed."""
        life = self.life = Life(self.disk.open(self.rng, self.weather), View(self.name, there, self.reread))
        try:
            with life.scope:
                await self._live(life, task_status)
        finally:
            life.store.kill()
            if self.life is life:
                self.life = None
                self.network.listening.pop(self.name, None)
            self.network.break_all(self.name)
            life.end()

    async def _live(self, life: Life, task_status: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.store.run)  # type: ignore[attr-defined]  # both kinds have it
            while True:
                try:
                    await keep_authority(life.store, self.config.transactions.service)
                    daemon = await assemble(
                        self.config,
                        life.store,
                        Metrics("0"),
                        nursery,
                        ownership=None if self.alone else life.view,
                        clock=self.clock,
                    )
                    break
                except PlainsongError:
                    await trio.sleep(0.5)  # like a supervisor that restarts it
            if daemon.cluster is not None:
                daemon.cluster.links.dial = self._dial
                self.network.listening[self.name] = partial(self._accept, nursery, daemon)
            await daemon.start(nursery)
            turns = daemon.directory.environment.run_queue

            async def take_turns() -> None:
                await trio.lowlevel.checkpoint()
                turns.run_due()

            turns.attach(lambda: None, lambda: nursery.start_soon(take_turns))
            for each in daemon.endpoints:
                path = each.route.path
                alike = life.routes.setdefault((each.route.method, path.count("/")), [])
                alike.append((_pattern_of(path), each))
            life.daemon = daemon
            task_status.started()
            await trio.sleep_forever()

    async def _dial(self, address: str) -> End:
        return await self.network.connect(self.name, address.partition(":")[0])

    def _accept(self, nursery: trio.Nursery, daemon: Daemon, end: End) -> None:
        nursery.start_soon(self._serve_link, daemon, end)

    async def _serve_link(self, daemon: Daemon, end: End) -> None:
        assert daemon.cluster is not None
        try:
            await serve_link(end, daemon.cluster.dispatcher, peer=end.there)
        finally:
            end.cut()

    def kill(self, *, power: bool = False) -> None:
        """End the process now; ``power``: a power cut, after which unsynced changes are lost."""
        life = self.life
        if life is not None:
            life.store.kill()
            life.scope.cancel()
            self.life = None
            self.network.listening.pop(self.name, None)
            self.network.break_all(self.name)
        if power:
            self.disk.lose_unsynced(self.rng.randrange(1 + len(self.disk.unsynced)))


class SimulatedTalk:
    """A client's connection to an instance: ``tests.daemon.talk.Talk`` without sockets."""

    def __init__(self, instance: SimulatedInstance) -> None:
        self._instance = instance

    async def ask(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a request; return its response. Raises ConnectionLost."""
        instance, network = self._instance, self._instance.network
        await network.pass_on("client", instance.name)
        life = instance.life
        if life is None or life.daemon is None:
            raise NotConnected(f"{instance.name} is down")
        answer = await life.serve(partial(self._answer, life, method, target, body, headers))
        if answer is None or instance.life is not life:
            raise ConnectionLost(f"{instance.name} has ended")
        await network.pass_on(instance.name, "client")
        return answer

    async def _answer(self, life: Life, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        path, _, query = target.partition("?")
        endpoint, places = life.route(method, path)
        request = Request(dict(places), query, {name.lower(): value for name, value in headers.items()}, body)
        return await _answered(endpoint, request)


async def _answered(endpoint: Endpoint, request: Request) -> Answer:
    try:
        given = await answer_of(endpoint.handler, request)
        data = given.body if isinstance(given.body, bytes) else b"".join([piece async for piece in given.body])
    except Exception as error:  # noqa: BLE001  # as listeners do
        given = answer_to(error, request.request_id)
        assert isinstance(given.body, bytes)
        data = given.body
    headers = {name.lower(): value for name, value in given.headers}
    if given.content_type is not None:
        headers["content-type"] = given.content_type
    return Answer(given.status, headers, data)


def configured(**values: Any) -> Config:
    """Return the settings of a simulated instance."""
    given = {"storage.kind": "memory", "storage.min_free_bytes": 0, "shutdown.drain_s": 1.0}
    return config_of({**given, **{name.replace("__", ".", 1): value for name, value in values.items()}})
