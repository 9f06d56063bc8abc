"""``replication.mode = "sync"``: the machine is lost under load, again and again, but no acknowledged data is lost.

The loads and their checkers are those of the other rings. Each time the daemon is killed, its directory is deleted, and
the copy is restored from a real S3 server into a new one, whose daemon has a copy of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from random import Random

import pytest

from plainsong import Client, PlainsongError
from plainsong.errors import OutcomeUnknown
from tests.daemon import test_crash_ring, test_producer_ring, test_transaction_ring
from tests.daemon.harness import Daemon, clean_environ, eventually, run_plainsong
from tests.daemon.test_replica_command import url_of, values, wait_until_all_counts
from tests.storage.replication.s3_proxy import Fault, S3Proxy
from tests.storage.replication.s3_server import BUCKET, s3_process

SEED = test_crash_ring.SEED
#: Set the variable to run a ring manually with more rounds.
ROUNDS = int(os.environ.get("PLAINSONG_LOST_MACHINES", "2"))


class MortalMachine(Daemon):
    """A daemon that loses its directory whenever it starts again."""

    def __init__(self, data_dir: Path, *sets: str, prefix: str, environ: dict[str, str]) -> None:
        self.prefix = prefix
        self.lives = 1
        super().__init__(data_dir, *sets, "replication.mode=sync", f"replication.to={self.to}", environ=environ)

    @property
    def to(self) -> str:
        return f"{self.prefix}/{self.lives}"

    def start(self) -> MortalMachine:
        if self._process is not None:
            shutil.rmtree(self.data_dir)
            words = ("replica", "restore", self.to, "--to", f"leveldb:{self.data_dir}")
            done = run_plainsong(*words, environ=self.environ)
            assert done.returncode == 0, done.stdout + done.stderr
            self.lives += 1
            self.command[-1] = f"replication.to={self.to}"
        super().start()
        wait_until_all_counts(self)
        return self


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_process(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def machine(server, tmp_path):
    return partial(MortalMachine, prefix=f"s3://{BUCKET}/{tmp_path.name}", environ=server[0])


async def test_every_acknowledged_message_and_every_page_survives_the_loss_of_the_machine(tmp_path, machine):
    await test_crash_ring.ring(tmp_path, SEED, cycles=ROUNDS, make=machine)


async def test_producers_store_each_message_once_through_losses_of_the_machine(tmp_path, machine):
    await test_producer_ring.ring(tmp_path, SEED, cycles=ROUNDS, make=machine)


async def test_transactions_are_whole_for_every_reader_through_losses_of_the_machine(tmp_path, machine):
    await test_transaction_ring.ring(
        tmp_path, SEED, cycles=ROUNDS, writers=6, pause_s=0.02, make=machine, restored=True
    )


class PlaguedMachine(MortalMachine):
    """A machine whose requests to the object store fail in every way, except those of a restore and of a start."""

    def __init__(self, *words: object, proxy: S3Proxy, **options: object) -> None:
        self.proxy, self.random = proxy, Random(SEED)
        super().__init__(*words, environ=proxy.environment, **options)

    def start(self) -> MortalMachine:
        self.proxy.restore()
        super().start()
        self.proxy.fault = self.fault
        return self

    def fault(self, method: str, path: str) -> Fault | None:
        return self.random.choice(PLAGUES) if self.random.random() < 0.1 else None


#: The ring's clients do not expect refusals, so no request may hang for ``timeout_s``; and after FORBIDDEN the daemon
#: pauses for seconds.
PLAGUES = [each for each in Fault if each not in (Fault.HANG, Fault.FORBIDDEN)]


async def test_nothing_is_lost_while_requests_to_the_object_store_fail_in_every_way(tmp_path, server):
    with S3Proxy(server[0]) as proxy:
        make = partial(PlaguedMachine, proxy=proxy, prefix=f"s3://{BUCKET}/{tmp_path.name}")
        await test_crash_ring.ring(tmp_path, SEED, cycles=ROUNDS, make=make)


@pytest.mark.torture
async def test_nothing_is_lost_with_fifty_machines(tmp_path, machine):
    await test_crash_ring.ring(tmp_path, SEED + 1, cycles=50, sizes="smallest sizes", make=machine)


@pytest.mark.torture
async def test_transactions_are_whole_through_the_loss_of_fifty_machines(tmp_path, machine):
    await test_transaction_ring.ring(
        tmp_path, SEED + 1, cycles=50, writers=6, pause_s=0.02, make=machine, restored=True
    )


def test_while_the_object_store_does_not_answer_changes_are_refused_and_polls_are_served(tmp_path, server):
    environ, process = server
    to = f"s3://{BUCKET}/{tmp_path.name}"
    sets = ("replication.mode=sync", "replication.timeout_s=1", f"replication.to={to}")
    with Daemon(tmp_path / "data", *sets, environ=environ) as daemon, Client(url_of(daemon), retry=False) as client:
        wait_until_all_counts(daemon)
        client.create_topic("orders")
        client.create_topic("idle")
        client.publish("orders", [b"counts"])
        freeze(process)
        try:
            with pytest.raises(OutcomeUnknown):
                client.publish("orders", [b"late"])
            for topic in ("orders", "idle"):
                with pytest.raises(PlainsongError) as refused:
                    client.publish(topic, [b"refused"])
                assert (refused.value.code, refused.value.outcome) == ("replication_unavailable", "not-applied")
            for isolation in ("uncommitted", "committed"):
                page = client.poll("orders", isolation=isolation)
                assert [message.value for message in page.messages] == [b"counts"]
                assert not client.poll("orders", page.last_id, isolation=isolation, wait_ms=200).messages
        finally:
            process.send_signal(signal.SIGCONT)
        wait_until_all_counts(daemon)
        eventually("changes are accepted again", lambda: accepts(client))
        assert values(client)[:2] == [b"counts", b"late"]
        assert b"refused" not in values(client)
        assert daemon.stop() == 0
    done = run_plainsong("replica", "verify", to, environ={**clean_environ(), **environ})
    assert done.returncode == 0, done.stdout + done.stderr


def freeze(process):
    """Stop a process, and return once all of its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")

    def has_stopped():
        return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in tasks.glob("*/stat"))

    eventually("the object store has stopped", has_stopped)


def accepts(client):
    try:
        client.publish("orders", [b"after"])
    except PlainsongError:
        return False
    return True


def test_a_daemon_stops_while_the_object_store_does_not_answer(tmp_path, server):
    environ, process = server
    to = f"s3://{BUCKET}/{tmp_path.name}"
    sets = ("replication.mode=sync", "replication.timeout_s=1", "shutdown.drain_s=1", f"replication.to={to}")
    with Daemon(tmp_path / "data", *sets, environ=environ) as daemon, Client(url_of(daemon), retry=False) as client:
        wait_until_all_counts(daemon)
        client.create_topic("orders")
        freeze(process)
        try:
            with pytest.raises(OutcomeUnknown):
                client.publish("orders", [b"late"])
            assert daemon.stop() == 0
        finally:
            process.send_signal(signal.SIGCONT)
    with Daemon(tmp_path / "data", *sets, environ=environ) as daemon, Client(url_of(daemon)) as client:
        assert values(client) == [b"late"]
