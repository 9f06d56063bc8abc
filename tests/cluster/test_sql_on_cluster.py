"""Rows of PostgreSQL and messages of several instances in one transaction, while the transaction service's owner fails.

It dies, leaves or drains between two steps of the commit; the next owner commits the transaction.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import count

import pytest
import trio
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from plainsong import Client, PlainsongError
from plainsong._sync.transaction import TransactionContext
from plainsong.sql import SqlParticipant, recover
from tests.cluster.harness import Cluster, Instance, open_cluster
from tests.daemon.harness import ROOT, clean_environ, eventually
from tests.daemon.talk import JSON_HEADERS, ConnectionLost, NotConnected, Talk
from tests.patience import PATIENCE_S
from tests.sql.conftest import Base
from tests.sql.server import NoServer, Postgres
from tests.sql.worker import POINTS, Knife

WORKER = ROOT / "tests/sql/worker.py"
#: Longer than a takeover takes, even on a busy machine.
TIMEOUT_S = 60
#: HBase must not time out, even if the machine stalls.
CALM = "storage.hbase.timeout_s=30"
Blow = Callable[[Cluster, Instance], Awaitable[None]]


@pytest.fixture(scope="module")
def engine():
    """An engine on a database with an empty table of orders."""
    try:
        server = Postgres()
    except NoServer as error:
        pytest.skip(f"NOT TESTED, rows and messages in one transaction of several instances: {error}")
    try:
        engine = create_engine(server.start().emptied("cluster", Base.metadata))
        yield engine
        engine.dispose()
    finally:
        server.remove()


async def dies(cluster: Cluster, owner: Instance) -> None:
    """Kill the owner; the others take over when its session has ended."""
    await owner.kill()


async def leaves(cluster: Cluster, owner: Instance) -> None:
    """Stop the owner, as in an upgrade."""
    await owner.stop()


async def is_drained(cluster: Cluster, owner: Instance) -> None:
    """Drain the owner: it keeps running, and owns nothing."""
    await ask(owner, "PUT", f"/v1/cluster/instances/{owner.name}/drain")


async def recovers(cluster: Cluster, owner: Instance) -> None:
    """Start the instance again, or end its drain."""
    if owner.state == "down":
        await owner.start()
    else:
        await ask(owner, "DELETE", f"/v1/cluster/instances/{owner.name}/drain")


async def ask(instance: Instance, method: str, path: str) -> dict[str, object]:
    """Return the answer; while it is 503 (the instance may have lost its session in a stall), ask again."""
    with trio.fail_after(PATIENCE_S):
        while True:
            async with await Talk.to(instance.address) as talk:
                answer = await talk.ask(method, path, b"", JSON_HEADERS)
            if answer.status == 200:
                return json.loads(answer.body) if answer.body else {}
            assert answer.status == 503, answer
            await trio.sleep(0.05)


async def owner_of_service(cluster: Cluster) -> Instance:
    """Return the owner of the transaction service, once all instances are up and agree on it."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                shown = [await ask(each, "GET", "/v1/cluster") for each in cluster.instances]
            except (NotConnected, ConnectionLost):
                shown = []
            names = {each["transactions"] for each in shown}
            whole = all(len(each["instances"]) == len(cluster.instances) for each in shown)  # type: ignore[arg-type]
            if shown and whole and len(names) == 1 and None not in names:
                return next(each for each in cluster.instances if each.name in names)
            await trio.sleep(0.05)


class Strike(Knife):
    """A participant that calls a function at one of its steps; ``at`` becomes None when it does."""

    at: str | None = None

    def __init__(self, at_commit: str, after_commit: str, happen: Callable[[], None]) -> None:
        super().__init__(at_commit, after_commit)
        self._happen = happen

    def commit_tx(self) -> bool:
        self.reach(self._at_commit)
        return True

    def post_tx_commit(self) -> None:
        self.reach(self._after_commit)

    def reach(self, point: str) -> None:
        if Strike.at == point:
            Strike.at = None
            self._happen()


def transact(client: Client, engine: Engine, number: int, point: str, happen: Callable[[], None]) -> str:
    """Write a row, and messages to two topics; return the outcome."""
    Strike.at = point
    first, last = Strike("worked", "committed", happen), Strike("prepared", "finished", happen)
    try:
        with (
            Session(engine) as session,
            client.transaction([first, SqlParticipant(session), last], timeout_s=TIMEOUT_S) as tx,
        ):
            first.reach("begun")
            session.execute(text("INSERT INTO orders (id, state) VALUES (:id, 'new')"), {"id": number})
            tx.publish("orders", b"%d" % number)
            tx.publish("copies", b"%d" % number)
    except PlainsongError as error:
        return f"{type(error).__name__}: {error}"
    return "committed"


def seen(client: Client, engine: Engine) -> list[list[int]]:
    """Return the ids in the table and in both topics, after a recovery that leaves nothing open."""
    recovery = recover(engine, client)
    assert not recovery.unsure
    assert not recovery.count("left")
    with engine.connect() as connection:
        rows = list(connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars())
    read = [[int(each.payload) for each in client.read(topic, isolation="committed")] for topic in ("orders", "copies")]
    return [rows, *map(sorted, read)]


async def rows_and_messages(hbase, tmp_path, engine, monkeypatch, blows: list[tuple[str, Blow]]) -> None:
    numbers = count(1)
    async with open_cluster(hbase, tmp_path, 2, CALM) as cluster:
        urls = [f"http://{each.address[0]}:{each.address[1]}" for each in cluster.instances]
        with Client(urls, namespace="sql") as client:
            decide = TransactionContext._committed
            for topic in ("orders", "copies"):
                await trio.to_thread.run_sync(client.create_topic, topic)
            for point, blow in blows:
                owner = await owner_of_service(cluster)

                def happen(blow=blow, owner=owner):
                    trio.from_thread.run(blow, cluster, owner)

                strike = Strike("published", "", happen)

                def decided(*arguments, strike=strike):
                    strike.reach("published")
                    return decide(*arguments)

                monkeypatch.setattr(TransactionContext, "_committed", decided)
                began_s = trio.current_time()
                told = await trio.to_thread.run_sync(transact, client, engine, next(numbers), point, happen)
                print(point, blow.__name__, told, f"{trio.current_time() - began_s:.1f} s")
                assert told == "committed", (point, blow.__name__)
                await recovers(cluster, owner)
            found = await trio.to_thread.run_sync(seen, client, engine)
    everything = list(range(1, len(blows) + 1))
    assert found == [everything] * 3


async def test_rows_and_messages_are_committed_by_the_next_owner_of_the_service(hbase, tmp_path, engine, monkeypatch):
    blows: list[tuple[str, Blow]] = [("begun", is_drained), ("prepared", is_drained), ("published", dies)]
    await rows_and_messages(hbase, tmp_path, engine, monkeypatch, [*blows, ("committed", is_drained)])


async def test_transactions_of_a_dead_client_are_recovered_from_the_next_owner_of_the_service(hbase, tmp_path, engine):
    async with open_cluster(hbase, tmp_path, 2, CALM) as cluster:
        urls = [f"http://{each.address[0]}:{each.address[1]}" for each in cluster.instances]
        with Client(urls, namespace="sql") as client:
            for topic in ("orders", "copies"):
                await trio.to_thread.run_sync(client.create_topic, topic)
            undone = await trio.to_thread.run_sync(die_at, ",".join(urls), engine, 2_000, "prepared")
            done = await trio.to_thread.run_sync(die_at, ",".join(urls), engine, 3_000, "committed")
            await (await owner_of_service(cluster)).kill()
            await trio.to_thread.run_sync(
                eventually, "nothing is left", lambda: is_recovered(client, engine), PATIENCE_S
            )
            rows, messages, _ = await trio.to_thread.run_sync(seen, client, engine)
    assert [row for row in rows if row >= 2_000] == messages
    assert undone not in messages
    assert done in messages


def die_at(urls: str, engine: Engine, first: int, point: str) -> int:
    """Run a program that writes a row and a message per transaction, until it dies; return the last one's number."""
    command = [sys.executable, str(WORKER), urls, engine.url.render_as_string(hide_password=False)]
    environ = {**clean_environ(), "PYTHONPATH": str(ROOT)}
    told = f"{first}- {point} self\n"
    done = subprocess.run(
        command, input=told, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done
    return first + len(done.stdout.splitlines())


def is_recovered(client: Client, engine: Engine) -> bool:
    """True if recovery is complete: a transaction whose client died undecided is invalid after its time-out."""
    return not recover(engine, client).count("left")


@pytest.mark.torture
async def test_rows_and_messages_agree_whatever_happens_at_any_step(hbase, tmp_path, engine, monkeypatch):
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM orders"))
    blows = [(point, blow) for point in POINTS for blow in (dies, leaves, is_drained)]
    await rows_and_messages(hbase, tmp_path, engine, monkeypatch, blows)
