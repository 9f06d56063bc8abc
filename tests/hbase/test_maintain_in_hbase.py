"""``maintain`` cleans tables in HBase while a daemon runs: its counts match HBase's, and it survives kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading

import pytest
import trio

from broker.command.maintain.hbase import HBaseTables, shares
from broker.command.maintain.plan import KeyRange
from plainsong import Client
from plainsong.protocol.effects import Table
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import decode_row
from storage.base import read_rows
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually, run_plainsong

PREFIX = "maintained_"
PATIENCE_S = 300
SHORT, TWICE, KEPT = (TopicName("default", name) for name in ("short", "twice", "kept"))


@pytest.fixture(scope="module")
def daemon(hbase, tmp_path_factory):
    """A daemon that does no cleaning during these tests."""
    sets = (
        "storage.kind=hbase",
        "storage.hbase.thrift={}:{}".format(*hbase.address),
        f"storage.hbase.table_prefix={PREFIX}",
        "retention.interval_s=3600",
    )
    with Daemon(tmp_path_factory.mktemp("maintained") / "data", *sets) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client("http://{}:{}".format(*daemon.address)) as made:
        yield made


def line(daemon, hbase, *words: str) -> list[str]:
    where = ("--url", "http://{}:{}".format(*daemon.address), "--thrift", "{}:{}".format(*hbase.address))
    return [str(PLAINSONG), "maintain", *where, "--table-prefix", PREFIX, *words]


def maintained(daemon, hbase, *words: str, code: int = 0) -> dict[str, dict]:
    """Return the last event of each name that the job printed."""
    done = run_plainsong(*line(daemon, hbase, *words)[1:], "--json", timeout_s=PATIENCE_S)
    assert done.returncode == code, done.stdout + done.stderr
    return {event["event"]: event for event in map(json.loads, done.stdout.splitlines())}


def whole(name: TopicName, generation: int, table: Table) -> KeyRange:
    prefix = generation_prefix(name, generation)
    return KeyRange(table, prefix, stop_after(prefix), "expired")


def in_hbase(hbase, *parts: KeyRange) -> int:
    async def count() -> int:
        async with HBaseTables.open([hbase.address], PREFIX) as tables:
            return sum([await tables.count_rows(part) for part in parts])

    return trio.run(count)


def rows_of(hbase, part: KeyRange) -> list[tuple[bytes, bytes]]:
    async def read():
        async with HBaseTables.open([hbase.address], PREFIX) as tables:
            return await read_rows(tables.store, part.table, part.start, part.stop, limit=100_000)

    return trio.run(read)


def expire(client: Client, requests: int) -> None:
    """Create a topic of expired messages, some of them stored before they were published."""
    client.create_topic("short", ttl_s=2)
    stored = client.transactions.begin(timeout_s=600, client_id="maintain")
    client.store("short", [b"stored"] * 50, transaction=stored)
    for _ in range(requests):
        client.publish("short", [bytes(100)] * 10)
    client.transactions.abort(stored)
    eventually("they expire", lambda: not client.admin.stats("short")["messages"])


def test_expired_rows_and_older_generations_are_removed_from_hbase_itself_during_publishes(daemon, hbase, client):
    client.create_topic("twice")
    client.publish("twice", [b"of the first"] * 500)
    client.admin.delete_topic("twice")
    client.create_topic("twice")
    client.publish("twice", [b"of the second"])
    expire(client, 200)
    client.create_topic("kept")
    invalid = client.transactions.begin(timeout_s=600, client_id="maintain")
    client.publish("kept", [b"invalid"] * 20, transaction=invalid)
    client.transactions.invalidate(invalid)
    ids: list[bytes] = []
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.02):  # continuously, but without starving the job of processor time
            ids.append(bytes(client.publish("kept", b"meanwhile").first_id))

    publisher = threading.Thread(target=publish)
    publisher.start()
    before = in_hbase(hbase, whole(SHORT, 1, Table.MESSAGE), whole(TWICE, 1, Table.MESSAGE))
    try:
        cleaned = maintained(daemon, hbase, "--parts", "3")["cleaned"]
    finally:
        stop.set()
        publisher.join()
    assert cleaned["removedRows"] == 2_500
    assert before >= 200
    assert in_hbase(hbase, whole(SHORT, 1, Table.MESSAGE), whole(TWICE, 1, Table.MESSAGE)) == 0
    assert [message.value for message in client.read("twice")] == [b"of the second"]
    pointers = {decode_row(value).pointer for _, value in rows_of(hbase, whole(KEPT, 1, Table.MESSAGE))}
    assert pointers == {None, -invalid.write_pointer}
    assert [bytes(message.id) for message in client.read("kept", isolation="committed")] == ids
    assert maintained(daemon, hbase)["cleaned"]["removedRows"] == 0
    assert client.publish("short", b"it continues").count == 1


def test_a_killed_run_can_be_started_again_and_leaves_nothing(daemon, hbase, client):
    client.admin.delete_topic("short")
    expire(client, 400)
    part = whole(SHORT, 2, Table.MESSAGE)
    before = in_hbase(hbase, part)
    process = subprocess.Popen(
        line(daemon, hbase, "short"),
        env=clean_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        eventually(
            "some of it is gone", lambda: in_hbase(hbase, part) < before or process.poll() is not None, PATIENCE_S
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    maintained(daemon, hbase, "short")
    assert in_hbase(hbase, part) == 0
    assert client.publish("short", b"it continues").count == 1


def test_a_dry_run_shows_the_plan_and_removes_nothing(daemon, hbase, client):
    client.create_topic("dry", ttl_s=1)
    client.publish("dry", [b"soon gone"])
    eventually("it expires", lambda: not client.admin.stats("dry")["messages"])
    told = maintained(daemon, hbase, "--dry-run", "dry")
    assert [part["why"] for part in told["topic"]["parts"]] == ["expired", "expired"]
    assert told["dry-run"]["done"] is False
    assert in_hbase(hbase, whole(TopicName("default", "dry"), 1, Table.MESSAGE)) == 1


def test_tables_of_another_deployment_are_refused_before_anything_is_removed(daemon, hbase, client, tmp_path):
    client.create_topic("mine", if_not_exists=True)
    with (
        Daemon(
            tmp_path / "data",
            "storage.kind=hbase",
            "storage.hbase.thrift={}:{}".format(*hbase.address),
            "storage.hbase.table_prefix=elsewhere_",
        ) as other,
        Client("http://{}:{}".format(*other.address)) as theirs,
    ):
        theirs.create_topic("mine")
        maintained(other, hbase, "mine", code=2)


def test_shares_of_keys_are_of_equal_width():
    assert shares(b"\x00\x00", b"\x01\x00", 4) == [b"\x00\x40", b"\x00\x80", b"\x00\xc0"]
    assert shares(b"a", b"bb", 4) == []
