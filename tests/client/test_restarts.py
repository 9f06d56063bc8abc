"""A daemon is killed and restarted while clients publish and read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from plainsong import AsyncClient, Client, FilePosition
from plainsong.protocol.errors import PlainsongError
from tests.client.conftest import url_of
from tests.daemon.harness import Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_address

KILLS = 3


def kill_and_restart(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def test_messages_that_a_publisher_acknowledged_are_stored_in_order_after_kills(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running)) as client:
        client.create_topic("t")
        sents = []
        ended = threading.Event()
        publisher = client.publisher("t", max_batch_messages=20, max_pending_bytes=100_000)

        def send() -> None:
            while not ended.is_set():
                sents.append(publisher.send(b"%d" % len(sents)))

        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(KILLS):
            so_far = publisher.counts.delivered
            eventually("something is delivered", lambda so_far=so_far: publisher.counts.delivered > so_far + 200)
            kill_and_restart(running)
        ended.set()
        thread.join()
        unknown = {n for n, sent in enumerate(sents) if sent.exception(30) is not None}
        assert all(sents[n].exception().outcome == "unknown" for n in unknown)
        publisher.close()
        found = [(message.id, int(message.payload)) for message in client.read("t")]
    order = [n for _, n in found]
    assert order == sorted(set(order)), "each once, in the order of the calls"
    promised = {n: sent.result() for n, sent in enumerate(sents) if n not in unknown}
    assert promised.items() <= {n: message_id for message_id, n in found}.items()
    # One request is in progress at a kill; another may start on a connection whose end the client has not noticed.
    assert len(unknown) <= KILLS * 2 * 20


def test_at_least_once_loses_nothing_through_kills(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running)) as client:
        client.create_topic("t")
        with client.publisher("t", max_batch_messages=20, retry_unknown=True, max_pending_bytes=100_000) as publisher:
            sent = 0
            for _ in range(KILLS):
                for _ in range(1000):
                    publisher.send(b"%d" % sent)
                    sent += 1
                kill_and_restart(running)
        found = [int(message.payload) for message in client.read("t")]
    assert list(dict.fromkeys(found)) == list(range(sent))


@pytest.mark.parametrize("topics", [1, 3])
def test_a_follower_sees_every_message_once_and_in_order_through_kills(daemon: Callable[..., Daemon], topics: int):
    running = daemon(bind=free_address())
    names = [f"t{n}" for n in range(topics)]
    with Client(url_of(running)) as client:
        for name in names:
            client.create_topic(name)
        found: list[tuple[str, int]] = []

        def follow() -> None:
            reader = client.read(names, follow=True, limit=topics * (KILLS + 1) * 100)
            found.extend((message.topic, int(message.payload)) for message in reader)

        thread = threading.Thread(target=follow)
        thread.start()
        for k in range(KILLS + 1):
            for name in names:
                client.publish(name, [b"%d" % n for n in range(k * 100, k * 100 + 100)])
            if k < KILLS:
                kill_and_restart(running)
        thread.join(PATIENCE_S)
    for name in names:
        assert [n for who, n in found if who == name] == list(range((KILLS + 1) * 100))


def test_calls_wait_for_a_daemon_that_returns_in_time(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running)) as client:
        client.create_topic("t")
        client.publish("t", b"before")
        running.kill()
        thread = threading.Thread(target=running.start)
        thread.start()
        assert client.publish("t", b"after").count == 1
        thread.join()
        assert [message.payload for message in client.poll("t")] == [b"before", b"after"]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_asynchronous_clients_survive_a_kill(daemon: Callable[..., Daemon], loop: str, tmp_path: Path):
    running = daemon(bind=free_address())

    async def main() -> None:
        async with AsyncClient(url_of(running)) as client:
            await client.create_topic("t")
            found: list[int] = []

            async def follow() -> None:
                async with client.read("t", follow=True, limit=200, position=FilePosition(tmp_path / "p")) as reader:
                    async for message in reader:
                        found.append(int(message.payload))  # noqa: PERF401 - another thread reads it during the loop

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                async with client.publisher("t", retry_unknown=True) as publisher:
                    for n in range(200):
                        sent = await publisher.send(b"%d" % n)
                        if n == 99:
                            await sent
                            await anyio.to_thread.run_sync(kill_and_restart, running)
            assert found == list(range(200))

    anyio.run(main, backend=loop)


def test_a_graceful_restart_loses_nothing_and_at_most_one_answer(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running)) as client:
        client.create_topic("t")
        failed: list[PlainsongError] = []
        ended = threading.Event()
        acknowledged = 0

        def publish() -> None:
            nonlocal acknowledged
            while not ended.is_set():
                try:
                    client.publish("t", b"%d" % acknowledged)
                    acknowledged += 1
                except PlainsongError as error:
                    failed.append(error)

        thread = threading.Thread(target=publish)
        thread.start()
        eventually("it publishes", lambda: acknowledged > 50)
        assert running.stop() == 0
        running.start()
        so_far = acknowledged
        eventually("it continues", lambda: acknowledged > so_far + 50)
        ended.set()
        thread.join()
        # The daemon may close an idle connection just as a request starts on it; its outcome is then unknown.
        assert [error.outcome for error in failed] in ([], ["unknown"])
        found = [int(message.payload) for message in client.read("t")]
        assert sorted(set(found)) == list(range(acknowledged))
        assert len(found) <= acknowledged + len(failed)
