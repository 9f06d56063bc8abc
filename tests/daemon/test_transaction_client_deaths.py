"""A client process is killed before, between and after its requests: its transaction is complete or absent."""

from __future__ import annotations

import signal
import time
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from math import inf
from pathlib import Path

import trio

from tests.client.proxy import Proxy
from tests.daemon.harness import Daemon, eventually, start_python
from tests.daemon.ring import Place
from tests.daemon.talk import Talk, create
from tests.daemon.transactional_history import Request, Transaction
from tests.daemon.transactional_program import TIMEOUT_S, TOPICS
from tests.daemon.transactional_readers import HABITS, many_reader, reader
from tests.daemon.transactional_rest import check_all
from tests.daemon.transactional_writers import Plot, settle
from tests.patience import PATIENCE_S

PROGRAM = Path(__file__).with_name("transactional_program.py")
#: Far more requests than the program sends.
ENOUGH = 40


@asynccontextmanager
async def watched(tmp_path, plot, *, aborting=True):
    """Run a daemon whose topics are read constantly, and check everything at the end."""
    place = Place()
    with Daemon(tmp_path / "data", "storage.min_free_bytes=0", "retention.interval_s=0.1") as daemon:
        for topic in TOPICS:
            create(daemon.address, topic)
        place.opened(daemon.address)
        async with trio.open_nursery() as readers:
            for topic in TOPICS:
                for habit in HABITS:
                    readers.start_soon(reader, place, topic, habit, plot)
            readers.start_soon(many_reader, place, TOPICS, plot, None)
            yield daemon
            async with await Talk.to(daemon.address) as talk:
                await settle(talk, plot, aborting=aborting)  # while the readers still run
            readers.cancel_scope.cancel()
        async with await Talk.to(daemon.address) as talk:
            await check_all(talk, plot, TOPICS)


@contextmanager
def start(url, name, end, last):
    process = start_python(PROGRAM, url, name, end, str(last), imports=["plainsong._sync.client"])
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def note(plot, name, began_s, said):
    """Record a transaction from its client's output; return True if the client finished."""
    words = said.split()
    if "began" in words:
        transaction = Transaction(int(words[words.index("began") + 1]), int((time.time() + TIMEOUT_S) * 1000))
        if "asks" in words:
            transaction.asked_s = began_s
        if "done" in words:
            told = "committed_s" if "asks" in words else "undone_s"
            setattr(transaction, told, time.monotonic())
        plot.transactions.append(transaction)
        for topic in TOPICS:
            payloads = tuple(b"%s.%d in %s" % (name.encode(), number, topic.encode()) for number in range(3))
            if transaction.asked_s < inf:  # everything was published before
                plot.requests.append(Request(topic, payloads, transaction, "acknowledged"))
            else:
                plot.requests += [Request(topic, (payload,), transaction) for payload in payloads]
    return "done" in words


def run_to_its_end(url, name, end, last):
    with start(url, name, end, last) as process:
        out, err = process.communicate(PATIENCE_S)
    assert process.returncode in (0, -signal.SIGKILL), err
    return out.decode()


async def die_before_each(daemon, plot, end, first):
    """Kill one client before its first request, another before its second, and so on, until one finishes."""
    url = "http://{}:{}".format(*daemon.address)
    for last in count(first):
        name, began_s = f"{end} {last}", time.monotonic()
        said = await trio.to_thread.run_sync(run_to_its_end, url, name, end, last)
        if note(plot, name, began_s, said):
            break
        assert last < ENOUGH
    assert last > first + 3


async def test_transactions_of_clients_that_die_before_any_request_are_whole_or_absent(tmp_path):
    plot = Plot()
    async with watched(tmp_path, plot) as daemon, trio.open_nursery() as nursery:
        nursery.start_soon(die_before_each, daemon, plot, "commit", 1)
        # The first three requests are the same as for a commit.
        nursery.start_soon(die_before_each, daemon, plot, "abort", 4)


async def die_waiting(daemon, plot, mark, end):
    """Kill a client after it has sent this request, before it gets the answer."""
    with Proxy(daemon.address) as proxy:
        proxy.after[mark] = "swallow"
        began_s, name = time.monotonic(), mark.decode().strip("/")
        with start(proxy.url, name, end, ENOUGH) as process:
            await trio.to_thread.run_sync(eventually, "it waits for an answer", lambda: proxy.lost)
            process.kill()
            said, _ = process.communicate(PATIENCE_S)
        assert not note(plot, name, began_s, said.decode())


async def test_transactions_of_clients_that_die_waiting_for_an_answer_end_in_one_state(tmp_path):
    plot = Plot()
    async with watched(tmp_path, plot, aborting=False) as daemon:
        for mark in (b"/store", b"/publish", b"/commit"):
            await die_waiting(daemon, plot, mark, "commit")
        for mark in (b"/rollback", b"/abort"):
            await die_waiting(daemon, plot, mark, "abort")
    assert [each.state for each in plot.transactions] == ["invalid", "invalid", "committed", "invalid", "aborted"]
