"""The daemon is killed in the system call that writes a transaction's step, or in the one that makes it durable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from itertools import count
from random import Random

import pytest
import trio

from plainsong import Client
from tests.daemon.harness import Daemon, eventually
from tests.daemon.ring import Place
from tests.daemon.talk import ConnectionLost, Talk, create
from tests.daemon.transactional_readers import HABITS, many_reader, reader, snapshot_reader
from tests.daemon.transactional_rest import check_all
from tests.daemon.transactional_writers import Plot, Work, decide_somehow
from tests.patience import PATIENCE_S
from tests.ports import free_address

TOPICS = ("one", "two", "three")
SETTINGS = ("storage.min_free_bytes=0",)
STEPS = ("begin", "store", "publish", "prepare", "commit")
#: System calls with their number: before anything is written, within a long write, and before the write is durable.
BEFORE, IN_THE_MIDDLE, BEFORE_THE_SYNC = ("write", 1), ("write", 20), ("fdatasync", 1)
#: Far longer than a transaction of a few messages, or one of 30 000, takes on a busy machine that stalls.
TIMEOUT_S, LONG_TIMEOUT_S = 12, 120
MANY = 30_000
#: Each call is delayed by this at its entry: enough to read strace's line and send SIGKILL on a busy machine.
HELD_FOR_US = 250_000


class Killer:
    """Kills a daemon at the entry of its n-th system call of a kind, counted from now, in any thread.

    strace counts calls per thread, so this class counts them; each call is delayed until its line has been read.
    """

    def __init__(self, daemon: Daemon, call: str, when: int) -> None:
        strace = shutil.which("strace")
        if strace is None:
            pytest.skip("NOT TESTED: daemons killed in a system call, since strace is not installed")
        held = ["-e", f"trace={call}", "-e", f"inject={call}:delay_enter={HELD_FOR_US}"]
        self._process = subprocess.Popen(
            [strace, "-f", "-p", str(daemon.pid), *held], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if b"attached" not in said:
            self._process.kill()
            self._process.communicate()
            pytest.skip(f"NOT TESTED: daemons killed in a system call, since strace says {said!r}")
        self.killed = False
        self._counting = threading.Thread(target=self._count, args=(daemon.pid, f"{call}(".encode(), when))
        self._counting.start()

    def _count(self, pid: int, entered: bytes, when: int) -> None:
        assert self._process.stderr is not None
        said = b""
        while piece := self._process.stderr.read(1 << 16):
            said += piece
            if said.count(entered) >= when:
                self.killed = True
                os.kill(pid, signal.SIGKILL)
                break

    def end(self) -> None:
        """Stop; ``killed`` is True if the daemon was killed."""
        self._process.kill()
        self._counting.join()
        self._process.communicate()


class Harness:
    """A daemon, its readers, and their records."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.place, self.plot, self.rng = daemon, Place(), Plot(), Random(7)
        self.numbers = count()

    async def live_and_die(self, step: str, call: str, when: int, stored: int = 3) -> bool:
        """Run a transaction, and kill the daemon at this step of it; return True if it was killed."""
        end = "abort" if step == "abort" else "commit"
        self.place.opened(self.daemon.address)
        killer, work, killed = None, None, False
        try:
            async with self.place.talk() as talk:
                work = Work(talk, self.plot, f"{step}-{next(self.numbers)}", TOPICS, self.rng)
                for name in (*STEPS[:4], end):
                    if name == step:
                        await self.place.more(0, 12)  # let the readers poll first
                        killer = Killer(self.daemon, call, when)
                    await self._step(work, name, stored)
        except ConnectionLost:
            killed = True
        if killer is not None:
            killer.end()
            killed = killed or killer.killed  # possibly in a background call after the last answer
        if killed:
            self.place.closed()
            await trio.to_thread.run_sync(self.daemon.wait)
            await trio.to_thread.run_sync(self.daemon.start)
            self.place.opened(self.daemon.address)
            await self.place.more(0, 12)
        if work is not None and work.transaction is not None:
            async with self.place.talk() as talk:
                await decide_somehow(talk, work.transaction, self.rng)
        return killed

    async def _step(self, work: Work, name: str, stored: int) -> None:
        if name == "begin":
            await work.begin(TIMEOUT_S if stored < MANY else LONG_TIMEOUT_S)
        elif name == "store":
            self.stores = [await work.store("one", stored)]
        elif name == "publish":
            await work.publish("one", 1, self.stores)
            await work.publish("two", 3)
        elif name == "prepare":
            await work.prepare()
        else:
            await work.end(name)


@pytest.fixture
async def harness(tmp_path):
    with Daemon(tmp_path / "data", *SETTINGS) as daemon:
        for topic in TOPICS:
            create(daemon.address, topic)
        harness = Harness(daemon)
        async with trio.open_nursery() as readers:
            for topic in TOPICS[:2]:
                for habit in HABITS:
                    readers.start_soon(reader, harness.place, topic, habit, harness.plot)
            readers.start_soon(many_reader, harness.place, TOPICS, harness.plot, None)
            readers.start_soon(snapshot_reader, harness.place, TOPICS, harness.plot, Random(1))
            yield harness
            readers.cancel_scope.cancel()
        async with await Talk.to(daemon.address) as talk:
            await check_all(talk, harness.plot, TOPICS[::-1])  # the first, which is read singly, is the shortest


@pytest.mark.parametrize(("call", "when"), [BEFORE, BEFORE_THE_SYNC], ids=["before it writes", "before it syncs"])
async def test_a_daemon_killed_in_any_step_of_a_commit_leaves_a_transaction_whole_or_absent(harness, call, when):
    for step in STEPS:
        assert await harness.live_and_die(step, call, when)


async def test_a_daemon_killed_in_any_write_of_an_abort_leaves_nothing_visible(harness):
    for when in range(1, 20):
        if not await harness.live_and_die("abort", "fdatasync", when):
            break
    assert 3 < when < 19, "it marks the abort, rolls back in the topics, and decides"


async def test_a_daemon_killed_while_it_stores_many_messages_leaves_a_transaction_whole_or_absent(harness):
    assert await harness.live_and_die("store", *IN_THE_MIDDLE, stored=MANY)
    assert not await harness.live_and_die("nothing", *BEFORE, stored=MANY)


def test_a_client_stores_and_commits_many_messages_through_kills_of_the_daemon(tmp_path):
    amount, kills_at = 12_000, (4_000, 8_000)
    with Daemon(tmp_path / "data", *SETTINGS, bind=free_address()) as daemon:
        for topic in TOPICS:
            create(daemon.address, topic)
        client = Client("http://{}:{}".format(*daemon.address), namespace="ring", deadline_s=30)
        failures: list[BaseException] = []
        sent = [0]
        may_commit = threading.Event()

        def write() -> None:
            try:
                with client.transaction(timeout_s=600, buffer_messages=500) as tx:
                    for number in range(amount):
                        tx.publish(TOPICS[number % 2], b"%d" % number)
                        sent[0] = number
                    assert may_commit.wait(PATIENCE_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        with client:
            thread = threading.Thread(target=write)
            thread.start()
            for kill_at in kills_at:
                eventually("enough is stored", lambda at=kill_at: sent[0] >= at or failures)
                daemon.kill()
                daemon.start()
                for topic in TOPICS[:2]:
                    assert not client.poll(topic)
            may_commit.set()  # not before those reads, however fast the last restart was
            thread.join(PATIENCE_S)
            assert not failures, failures
            for parity, topic in enumerate(TOPICS[:2]):
                for isolation in ("committed", "uncommitted"):
                    found = [int(message.payload) for message in client.read(topic, isolation=isolation)]
                    assert found == list(range(parity, amount, 2))
