"""Transactions across crashes of the daemon between two steps, and of the program in the middle of processing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_transactions import Rows, committed

from plainsong import Client
from plainsong.protocol.errors import PlainsongError, TransactionNotInProgress
from tests.client.conftest import url_of
from tests.daemon.harness import Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_address

ROOT = Path(__file__).parents[2]

DIES = """
import os, sys
from plainsong import Client

client = Client(sys.argv[1])
with client.transaction(timeout_s=8, buffer_messages=10, client_id="dies") as tx:
    for n in range(100):
        tx.publish("t", b"stored %d" % n)
    if sys.argv[2] == "published":
        tx.checkpoint()
    print("open", flush=True)
    os._exit(9)
"""


@pytest.mark.parametrize("after", ["stored", "published"])
def test_a_program_that_dies_in_the_middle_leaves_nothing_and_holds_readers_until_the_timeout(
    shared_url: str, client: Client, topic: str, after: str
):
    script = DIES.replace('"t"', f'"{topic}"')
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, shared_url, after],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (9, "open\n", "")
    client.publish(topic, b"after")
    # The time-out alone releases a blocked reader.
    reader = client.read(topic, isolation="committed", follow=True, limit=1)
    assert [message.payload for message in reader] == [b"after"]
    assert committed(client, topic) == [b"after"]
    if after == "published":
        assert [each.client_id for each in client.transactions.list(state="invalid") if topic in str(each.topics)] == [
            "dies"
        ]


def test_a_commit_succeeds_when_a_daemon_killed_before_it_is_back(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running), deadline_s=PATIENCE_S) as client:
        client.create_topic("t")
        rows = Rows()
        context = client.transaction([rows], timeout_s=int(PATIENCE_S))
        transaction = context.start()
        context.publish("t", b"m")

        def kill_and_start() -> bool:
            running.kill()
            thread = threading.Thread(target=running.start)
            thread.start()
            threads.append(thread)
            return True

        threads: list[threading.Thread] = []
        rows.commit_tx = kill_and_start  # type: ignore[method-assign]
        context.finish()
        for thread in threads:
            thread.join()
        assert committed(client, "t") == [b"m"]
        assert client.transactions.get(transaction).state == "committed"


def test_a_long_transaction_survives_a_daemon_that_is_killed_while_it_stores(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running), deadline_s=PATIENCE_S) as client:
        client.create_topic("t")

        def killed_and_back() -> None:
            running.kill()
            running.start()

        with client.transaction(type="long", buffer_messages=50) as tx:
            thread = threading.Thread(target=killed_and_back)
            for n in range(4_000):
                tx.publish("t", b"%d" % n)
                if n == 1_000:
                    thread.start()
            thread.join()
        assert committed(client, "t") == [b"%d" % n for n in range(4_000)]
        assert [message.payload for message in client.read("t")] == [b"%d" % n for n in range(4_000)]


def test_a_transaction_and_its_outcome_survive_a_daemon_that_is_killed_after_the_publish(daemon: Callable[..., Daemon]):
    running = daemon(bind=free_address())
    with Client(url_of(running), deadline_s=PATIENCE_S) as client:
        client.create_topic("t")
        begun = client.transactions.begin(timeout_s=int(PATIENCE_S))
        client.publish("t", b"open", transaction=begun)
        done = client.transactions.begin()
        client.publish("t", b"done", transaction=done)
        client.transactions.commit(done)
        running.kill()
        running.start()
        assert client.transactions.commit(done) == "committed"
        page = client.poll("t", isolation="committed")
        assert (list(page), page.end, page.held.write_pointer) == ([], "held", begun.id)
        assert client.transactions.abort(begun) == "aborted"
        with pytest.raises(TransactionNotInProgress):
            client.transactions.commit(begun)
        assert committed(client, "t") == [b"done"]


def test_without_a_service_transactions_are_refused_and_plain_requests_work(daemon: Callable[..., Daemon]):
    running = daemon("transactions.service=off")
    with Client(url_of(running), deadline_s=5) as client:
        client.create_topic("t")
        for refused in (
            client.transactions.begin,
            client.transaction().start,
            lambda: client.publish("t", b"m", transaction="own"),
            lambda: client.poll("t", isolation="committed"),
            lambda: next(client.read("t", isolation="committed", follow=True)),
        ):
            with pytest.raises(PlainsongError) as caught:
                refused()
            assert caught.value.code == "transactions_unavailable"
        client.publish("t", b"plain")
        client.publish("t", b"under", transaction=1_800_000_000_000_000_000)
        assert [message.payload for message in client.read("t")] == [b"plain", b"under"]


def test_a_client_that_is_closed_inside_its_transaction_rolls_its_participants_back(shared_url: str, topic: str):
    rows = Rows()
    with Client(shared_url) as client:
        context = client.transaction([rows], timeout_s=1)
        transaction = context.start()
        context.publish(topic, b"m")
    with pytest.raises(PlainsongError, match="closed"):
        context.finish()
    assert rows.calls == ["start", "commit", "rollback"]
    with Client(shared_url) as client:
        eventually("it timed out", lambda: client.transactions.get(transaction).state == "invalid")
        assert committed(client, topic) == []
