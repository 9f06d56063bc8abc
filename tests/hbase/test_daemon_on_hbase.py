"""The daemon on HBase: it keeps the same promises as on LevelDB, despite kills, checked by the same tests."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack

import pytest

from tests.daemon import test_crash_ring, test_transaction_ring, transactional_checker
from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import ask, create, metric, poll, publish, read_all, topic_path
from tests.daemon.test_crash_ring import reborn, ring

PREFIXES = itertools.count()
#: Each cleaning pass calls HBase for each topic. At the rate of the tests on a disk, ten or twenty passes a second, an
#: idle daemon uses a quarter of a core here; at two passes a second, a twentieth.
PASSES = "retention.interval_s=0.5"
#: Each start sends the gateway a frame twice the size of the largest cell: 18 MiB by default.
SMALL_CELLS = "storage.hbase.max_cell_bytes=1 MiB"


@pytest.fixture
def on_hbase(hbase, tmp_path):
    """Return a function that starts daemons on new tables."""
    host, port = hbase.address
    settings = ("kind=hbase", f"hbase.thrift={host}:{port}", f"hbase.table_prefix=daemon{next(PREFIXES)}_")

    def start(data_dir, *sets, **options):
        return Daemon(data_dir, *(f"storage.{each}" for each in settings), *sets, **options)

    return start


@pytest.fixture
def killed_on_hbase(on_hbase):
    """Return the same for tests written for the ring on LevelDB, whose settings suit a disk and small messages."""
    return lambda data_dir, *sets, **options: on_hbase(data_dir, *sets, PASSES, SMALL_CELLS, **options)


@pytest.fixture
def daemon(on_hbase, tmp_path):
    with ExitStack() as daemons:
        yield lambda *sets: daemons.enter_context(on_hbase(tmp_path / "data", *sets))


def test_messages_keep_their_ids_through_kills_and_nothing_is_kept_in_files(daemon, tmp_path):
    running = daemon()
    create(running.address, "t")
    publish(running.address, "t", *(b"%d" % number for number in range(1000)))
    publish(running.address, "t", bytes(8 << 20))
    there = read_all(running.address, "t")
    assert len(there) == 1001
    running.kill()
    running.start()
    assert read_all(running.address, "t") == there
    publish(running.address, "t", b"behind")
    last = read_all(running.address, "t")
    assert last[:-1] == there
    assert last[-1][1] == b"behind"
    assert last[-1][0] > there[-1][0]
    assert running.serving["store"] == "hbase"
    assert running.serving["data_dir"] is None
    assert not (tmp_path / "data").exists()


def test_a_message_too_large_for_a_cell_is_refused_and_its_topic_continues(daemon):
    running = daemon(SMALL_CELLS)
    create(running.address, "t")
    lowered = json.loads(running.wait_for_line("a setting is lowered to what the store supports"))
    assert lowered["setting"] == "topic.max_message_bytes"
    publish(running.address, "t", bytes(lowered["to"]))
    path = topic_path("t", "/publish")
    body = json.dumps({"messages": ["x" * (lowered["to"] + 1)]}).encode()
    assert ask(running.address, "POST", path, body, {"Content-Type": "application/json"}).code == "message_too_large"
    publish(running.address, "t", b"behind")
    assert len(poll(running.address, "t")) == 2


def test_a_recreated_topic_shows_nothing_of_its_past(daemon):
    running = daemon("retention.delete_grace_s=0", "retention.interval_s=0.1", SMALL_CELLS)
    for number in range(3):
        create(running.address, "t")
        publish(running.address, "t", b"%d" % number)
        assert [payload for _, payload in read_all(running.address, "t")] == [b"%d" % number]
        running.kill()
        running.start()
        assert [payload for _, payload in read_all(running.address, "t")] == [b"%d" % number]
        assert ask(running.address, "DELETE", topic_path("t")).status == 200


def test_messages_expire_and_their_rows_are_removed(daemon):
    running = daemon("retention.interval_s=0.1")
    create(running.address, "t", ttl=1)
    publish(running.address, "t", b"fleeting")
    eventually("it expired", lambda: not read_all(running.address, "t"))
    eventually("its row is gone", lambda: metric(running.address, "plainsong_expired_rows_total") >= 1)


def test_a_daemon_on_hbase_has_no_disk_to_watch(daemon):
    running = daemon("storage.min_free_bytes=1024 TiB")
    assert ask(running.address, "GET", "/version").json()["store"] == "hbase"
    assert metric(running.address, "plainsong_low_space") == 0
    assert ask(running.address, "GET", "/readyz").status == 200


@pytest.mark.parametrize("cycles", [3, pytest.param(24, marks=pytest.mark.torture)])
async def test_acknowledged_messages_survive_kills_on_hbase(monkeypatch, killed_on_hbase, tmp_path, cycles):
    monkeypatch.setattr(test_crash_ring, "Daemon", killed_on_hbase)
    await ring(tmp_path, seed=8, cycles=cycles)


async def test_a_topic_recreated_between_kills_never_shows_its_past_on_hbase(monkeypatch, killed_on_hbase, tmp_path):
    monkeypatch.setattr(test_crash_ring, "Daemon", killed_on_hbase)
    await reborn(tmp_path, seed=8, cycles=2)


#: A page takes about eight calls to HBase, a transaction about twenty puts. Most pages repeat the one before, and
#: transactions repeat eleven courses, so fewer of both between kills are enough; torture makes as many as on a disk.
FEWER = {"readers_pause_s": 0.5, "singly": 50, "most_a_life": 30}


@pytest.mark.parametrize(
    ("cycles", "manners"), [(3, FEWER), pytest.param(24, {}, marks=pytest.mark.torture)], ids=["3", "24"]
)
async def test_transactions_are_all_or_nothing_through_kills_on_hbase(
    monkeypatch, killed_on_hbase, tmp_path, cycles, manners
):
    monkeypatch.setattr(test_transaction_ring, "Daemon", killed_on_hbase)
    # A snapshot is held until rows are rolled back, which waits for a start. That is slower than from a disk, and
    # slower still on a busy machine.
    monkeypatch.setattr(transactional_checker, "GRACE_MS", 60_000)
    await test_transaction_ring.ring(tmp_path, 50, cycles=cycles, writers=6, pause_s=0.05, **manners)


def test_a_poll_as_of_a_moment_shows_the_same_before_and_after_a_kill(daemon):
    running = daemon()
    create(running.address, "t")

    def call(path, body):
        answer = ask(running.address, "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        assert answer.status == 200, answer.body
        return json.loads(answer.body) if answer.body else None

    def shown(at_ms):
        return [message["payload"] for message in call(topic_path("t", "/poll"), {"asOfMs": at_ms})]

    early, late = (call("/v1/transactions", {"type": "long"}) for _ in range(2))
    for begun, payload in ((late, "late"), (early, "early")):
        call(topic_path("t", "/publish"), {"transactionWritePointer": begun["writePointer"], "messages": [payload]})
    call(f"/v1/transactions/{early['id']}/commit", {})
    publish(running.address, "t", b"plain")
    at_ms = int(read_all(running.address, "t")[-1][0][:8].hex(), 16)
    assert shown(at_ms) == ["early", "plain"]
    running.kill()
    running.start()
    call(f"/v1/transactions/{late['id']}/commit", {})
    publish(running.address, "t", b"behind")
    assert shown(at_ms) == ["early", "plain"]
    assert shown(at_ms - 60_000) == []
    assert len(read_all(running.address, "t")) == 4
