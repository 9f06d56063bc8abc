"""Whole daemons as ``plainsong serve`` runs them, several in one process, with a real ZooKeeper and shared memory."""

from __future__ import annotations

from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import trio

import broker.main
from broker.cluster.join import find_others
from broker.config.config import config_of
from tests.patience import PATIENCE_S
from tests.storage.shared_memory import SharedMemory

TOPICS = "/v1/namespaces/ns/topics"

#: Longer than any test, so that a session ends with its daemon, not because the machine stalled.
SESSION_S = 5 * PATIENCE_S

#: The daemon to which a task belongs.
MINE = ContextVar("MINE")


class Daemon:
    def __init__(self, name, shared, config):
        self.name = name
        self.store = shared.store()
        self.config = config
        self.ended = trio.Event()
        self.life = trio.CancelScope()
        self.stop = self.address = self.http = self.membership = None

    async def call(self, method, path, *, status=200, **more):
        answer = await self.http.request(method, path, **more)
        assert answer.status_code == status, (self.name, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def cluster(self, query=""):
        return await self.call("GET", f"/v1/cluster{query}")

    async def owner(self, topic):
        return (await self.cluster(f"?topic=ns:{topic}"))["topic"]["owner"]

    async def publish(self, topic, *payloads):
        await self.call("POST", f"{TOPICS}/{topic}/publish", json={"messages": list(payloads)})

    async def poll(self, topic, **body):
        return [each["payload"] for each in await self.call("POST", f"{TOPICS}/{topic}/poll", json=body)]

    async def until(self, true):
        """Request the cluster's state until ``true(answer)``; return the last answer."""
        with trio.fail_after(PATIENCE_S):
            found = await self.cluster()
            while not true(found):
                found = await self.cluster()
            return found

    def leave(self):
        """Leave as on SIGTERM."""
        self.stop.set()

    def kill(self):
        """End at once, together with the session."""
        self.life.cancel()


class Daemons(dict):
    """All daemons by name."""

    def __init__(self, nursery, ensemble, values):
        super().__init__()
        self.shared = SharedMemory()
        self._nursery = nursery
        self._ensemble = ensemble
        self._values = values

    async def start(self, name, **values):
        given = {
            "http.bind": "127.0.0.1:0",
            "cluster.instance": name,
            "cluster.zookeeper": self._ensemble.hosts + self._ensemble.path,
            "cluster.session_timeout_s": SESSION_S,
            "transactions.service": "off",
            "shutdown.drain_s": 3.0,
            "storage.min_free_bytes": 0,
        }
        config = config_of({**given, **self._values, **values})
        daemon = self[name] = Daemon(name, self.shared, config)
        await self._nursery.start(_run, daemon)
        return daemon

    async def together(self):
        """Wait until each daemon sees all daemons with their shares of the topics."""
        shares = dict.fromkeys(self, 64)
        for daemon in self.values():
            await daemon.until(lambda found: {each["name"]: each["slices"] for each in found["instances"]} == shares)


async def _run(daemon, task_status):
    there = trio.Event()

    def announce(running):
        daemon.address = running.addresses[0]
        there.set()

    async def run():
        MINE.set(daemon)
        await broker.main.run_daemon(daemon.config, announce=announce)
        nursery.cancel_scope.cancel()

    try:
        with daemon.life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await there.wait()
                # ``verify=False``: there is no TLS here, and loading the system's certificates takes tens of
                # milliseconds.
                url = daemon.address
                async with httpx.AsyncClient(base_url=url, verify=False, timeout=2 * PATIENCE_S) as daemon.http:
                    task_status.started()
                    await trio.sleep_forever()
    finally:
        daemon.ended.set()


@asynccontextmanager
async def _open_store(config, shipper):
    del shipper
    yield MINE.get().store


async def _find_others(config, nursery):
    MINE.get().membership = found = await find_others(config, nursery)
    return found


async def _stop_on_request(stop):
    MINE.get().stop = stop
    await trio.sleep_forever()


@asynccontextmanager
async def daemons(ensemble, monkeypatch, *names, **values):
    """Run daemons that see one another; those still running leave at the end.

    Their time-outs for ZooKeeper and for a topic's next owner are long, so that a stalled machine causes no failure.
    """
    for place in (
        "cluster.owners.PATIENCE_S",
        "membership.zookeeper.CALL_TIMEOUT_S",
        "membership.zookeeper.STOP_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"broker.{place}", PATIENCE_S)
    monkeypatch.setattr(broker.main, "open_store", _open_store)
    monkeypatch.setattr(broker.main, "_stop_at_signal", _stop_on_request)
    monkeypatch.setattr(broker.main, "find_others", _find_others)
    with TemporaryDirectory() as scratch:
        async with trio.open_nursery() as nursery:
            found = Daemons(nursery, ensemble, {"storage.data_dir": Path(scratch), **values})
            for name in names:
                await found.start(name)
            await found.together()
            yield found
            for daemon in found.values():
                daemon.leave()
            with trio.move_on_after(PATIENCE_S):
                for daemon in found.values():
                    await daemon.ended.wait()
            nursery.cancel_scope.cancel()
