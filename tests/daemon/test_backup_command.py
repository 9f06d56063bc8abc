"""``plainsong backup``: the content of a backup made under load, and the state after a restore."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.protocol.errors import ProducerFenced, TransactionNotInProgress
from tests.daemon.deployment import EACH, REQUESTS, fill, is_no_topic, new_messages_come_behind
from tests.daemon.harness import Daemon, DaemonEnded, eventually, run_plainsong
from tests.daemon.test_copy_command import ended_when

ACCOUNTS = ("a", "b", "c")
#: Pause between two transfers or publishes: hundreds run during a backup, but neither thread saturates a core.
PAUSE_S = 0.02


def url_of(daemon: Daemon) -> str:
    return "http://{}:{}".format(*daemon.address)


def backup(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_plainsong("backup", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def made(*words: object, code: int = 0) -> dict:
    return json.loads(backup(*words, "--json", code=code).stdout)


def restored(folder: Path, to: Path, *words: object) -> Path:
    backup("restore", folder, "--to", f"leveldb:{to}", *words)
    return to


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with a backup, the deployment in it, and values that were returned after the backup."""
    base = tmp_path_factory.mktemp("kept")
    # No snapshot of producers may be written between the two backups either: it would be a new object in the second.
    settings = ("retention.interval_s=3600", "deduplication.snapshot_interval_s=3600")
    with Daemon(base / "data", *settings) as daemon, Client(url_of(daemon)) as client:
        told = fill(client)
        client.store("twice", [b"never published"], transaction=told.open)
        first = made("create", base / "backups", "--url", url_of(daemon))
        again = made("create", base / "backups", "--url", url_of(daemon))
        open_, epoch = told.open, client.admin.producer_state("orders", "till")["epoch"]
        # Acknowledged after the last backup, so lost by a restore.
        lost = client.publish("orders", [b"lost"])
        with client.producer("orders", "till") as producer:
            producer.publish([b"lost too"])
            lost_epoch = producer.epoch
        later = client.transactions.begin(client_id="lost")
        service = client.transactions.get(later).service
        daemon.stop()
    assert first["newObjects"] > 3
    assert again["newObjects"] == 0
    return (
        base / "backups",
        told,
        {"open": open_, "epochs": (epoch, lost_epoch), "id": bytes(lost.last_id), "later": later, "service": service},
    )


def test_a_restore_serves_the_backed_up_messages_and_anything_later_is_new(filled, tmp_path):
    folder, told, lost = filled
    with Daemon(restored(folder, tmp_path / "data")) as daemon, Client(url_of(daemon)) as client:
        ids = [bytes(message.id) for message in client.read("orders", isolation="committed")]
        assert len(ids) == REQUESTS * EACH + 1
        assert set(ids) < set(told.ids)
        uncommitted = [message.value for message in client.read("orders", isolation="uncommitted")]
        assert b"undecided" in uncommitted  # like any message of an invalid transaction
        assert b"lost" not in uncommitted
        assert client.admin.properties("twice")["generation"] == "2"
        assert client.admin.reader("orders", "ana")["position"] == told.reader.hex()
        assert client.admin.namespaces.show()["properties"]["deduplication"] == "enabled"
        new = client.publish("orders", [b"new"])
        assert bytes(new.first_id) > lost["id"]
        told.ids.append(bytes(new.first_id))
        new_messages_come_behind(client, told)


def test_after_a_restore_open_transactions_are_invalid_and_the_service_is_new(filled, tmp_path):
    folder, told, lost = filled
    with Daemon(restored(folder, tmp_path / "data")) as daemon, Client(url_of(daemon)) as client:
        status = client.transactions.get(told.open)
        assert status.state == "invalid"
        assert status.service != lost["service"]
        assert client.transactions.get(lost["later"]).state == "unknown"
        for gone in (told.open, lost["later"]):
            with pytest.raises(TransactionNotInProgress):
                client.publish("orders", [b"too late"], transaction=gone)
        assert client.transactions.begin().id > lost["later"].id
        assert client.transactions.get(client.transactions.begin()).service == status.service


def test_producers_from_before_are_fenced_and_send_the_rest_again(filled, tmp_path):
    folder, _, lost = filled
    with Daemon(restored(folder, tmp_path / "data")) as daemon, Client(url_of(daemon)) as client:
        for epoch in lost["epochs"]:
            with pytest.raises(ProducerFenced):
                _publish_as(url_of(daemon), "till", epoch, REQUESTS * EACH)
        with client.producer("orders", "till") as producer:
            assert producer.last_sequence_id == REQUESTS * EACH - 1
            receipt = producer.publish([b"sent again"])
        assert not receipt.duplicate
        assert client.poll("orders", receipt.first_id, isolation="uncommitted") is not None
        values = Counter(message.value for message in client.read("orders", isolation="uncommitted"))
        assert values[b"sent again"] == 1


def _publish_as(url: str, producer: str, epoch: int, sequence_id: int) -> None:
    with Client(url) as client:
        body = {"messages": ["x"], "producer": producer, "producerEpoch": epoch, "sequenceIds": [sequence_id]}
        request = urllib.request.Request(
            f"{url}/v1/namespaces/default/topics/orders/publish",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request).read()
        except urllib.error.HTTPError as error:
            problem = json.loads(error.read())
            assert client is not None
            assert (error.code, problem["code"]) == (409, "producer_fenced"), problem
            raise ProducerFenced(problem["detail"]) from error


def test_a_killed_backup_is_not_listed_and_its_objects_are_used_by_the_next(tmp_path):
    with Daemon(tmp_path / "data", "backup.hold_s=8") as daemon:
        with Client(url_of(daemon)) as client:
            fill(client)
        folder = tmp_path / "backups"
        words = ("backup", "create", folder, "--url", url_of(daemon))
        # Killed just before it renames the tenth of fifteen objects.
        assert ended_when("os.rename", r"/objects/../[0-9a-f]{64}", *words, times=10) == -signal.SIGKILL
        assert json.loads(backup("list", folder, "--json").stdout) == []
        left = len([each for each in folder.glob("objects/*/*") if len(each.name) == 64])
        assert left == 9
        eventually("the cut of the killed backup ends", lambda: _can_begin(url_of(daemon)))
        done = made("create", folder, "--url", url_of(daemon))
        assert done["newObjects"] <= done["objects"] - left + 2
        assert made("verify", folder, "--deep")["ok"]


def _can_begin(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/backups", method="POST")) as answer:
            begun = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        assert error.code == 409
        return False
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/backups/{begun['id']}", method="DELETE")).read()
    return True


def test_a_killed_restore_is_not_served_and_continues_when_it_is_run_again(filled, tmp_path):
    folder, _told, _ = filled
    target = tmp_path / "data"
    words = ("restore", folder, "--to", f"leveldb:{target}")
    # At least half of the twenty thousand rows are written by then.
    assert ended_when("says", r"copying: \d{5} of", "backup", *words, "--progress") == -signal.SIGKILL
    with pytest.raises(DaemonEnded, match="not complete"), Daemon(target):
        pass
    assert "both sides are the same" in backup(*words).stdout
    assert "is already done" in backup(*words).stdout
    with Daemon(target) as daemon, Client(url_of(daemon)) as client:
        assert len(list(client.read("orders"))) == REQUESTS * EACH + 1


def test_one_topic_is_restored_under_another_name_next_to_the_original(filled, tmp_path):
    folder, *_ = filled
    target = tmp_path / "data"
    with Daemon(target) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("twice")
        client.publish("twice", b"of now")
        daemon.stop()
    backup("restore", folder, "--to", f"leveldb:{target}", "default:twice", code=3)
    restored(folder, target, "default:twice", "--as", "default:twice_before")
    with Daemon(target) as daemon, Client(url_of(daemon)) as client:
        assert [message.value for message in client.read("twice")] == [b"of now"]
        assert [message.value for message in client.read("twice_before")] == [b"of the second generation"]
        assert is_no_topic(client, "orders")


def test_one_flipped_bit_is_found_with_its_messages_and_nothing_is_restored(filled, tmp_path):
    folder, *_ = filled
    place = max(folder.glob("objects/*/*"), key=lambda each: each.stat().st_size)
    whole = place.read_bytes()
    try:
        place.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
        found = made("verify", folder, code=1)
        assert not found["ok"]
        (damaged,) = found["damaged"]
        assert (damaged["sha256"], damaged["topic"]) == (place.name, "default:orders")
        assert damaged["messages"] > 100
        assert damaged["fromMs"] <= damaged["toMs"]
        done = backup("restore", folder, "--to", f"leveldb:{tmp_path / 'data'}", code=1)
        assert place.name in done.stderr
        assert not (tmp_path / "data").exists()
    finally:
        place.write_bytes(whole)


# --- sums over topics ------------------------------------------------------------------------------


class Transfers:
    """Moves amounts between topics, each in a transaction, until the block ends; also publishes to ``log``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.acknowledged = 0
        self.transfers = 0
        self._threads = [threading.Thread(target=work) for work in (self._transfer, self._transfer, self._publish)]

    def __enter__(self) -> Transfers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _transfer(self) -> None:
        with Client(self._url) as client:
            number = 0
            while not self._stop.is_set():
                number += 1
                transaction = client.transactions.begin()
                one, other = ACCOUNTS[number % 3], ACCOUNTS[(number + 1) % 3]
                client.publish(one, [b"%d" % -number], transaction=transaction)
                if number % 4 == 0:
                    client.store(other, [b"%d" % number], transaction=transaction)
                    client.publish(other, [], transaction=transaction)
                else:
                    client.publish(other, [b"%d" % number], transaction=transaction)
                if number % 5 == 0:
                    client.transactions.abort(transaction)
                else:
                    client.transactions.commit(transaction)
                    self.transfers += 1
                self._stop.wait(PAUSE_S)

    def _publish(self) -> None:
        with Client(self._url) as client:
            while not self._stop.is_set():
                client.publish("log", [b"%d" % self.acknowledged, b"same request"])
                self.acknowledged += 1
                self._stop.wait(PAUSE_S)


def sums(client: Client, suffix: str = "") -> tuple[int, int]:
    """Return the sum of all amounts that a committed reader sees, and their number."""
    amounts = [int(message.value) for name in ACCOUNTS for message in client.read(name + suffix, isolation="committed")]
    return sum(amounts), len(amounts)


def test_sums_over_topics_hold_in_every_restore_to_a_point_in_time_too(tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data", "backup.bytes_per_s=64KiB") as daemon:
        with Client(url_of(daemon)) as client:
            for name in (*ACCOUNTS, "log"):
                client.create_topic(name)
        begun_ms = time.time_ns() // 1_000_000
        ids, floors = [], []
        with Transfers(url_of(daemon)) as going_on:
            for _ in range(3):
                transfers = going_on.transfers
                eventually(
                    "there are more transfers to restore", lambda before=transfers: going_on.transfers > before + 30
                )
                acknowledged = going_on.acknowledged
                ids.append(made("create", folder, "--url", url_of(daemon))["id"])
                floors.append(acknowledged)
        ended_ms = time.time_ns() // 1_000_000
        daemon.stop()
    counts = []
    for number, (backup_id, floor) in enumerate(zip(ids, floors, strict=True)):
        target = restored(folder, tmp_path / f"whole{number}", "--id", backup_id)
        with Daemon(target) as daemon, Client(url_of(daemon)) as client:
            total, count = sums(client)
            published = [message.value for message in client.read("log")]
        assert total == 0
        # A prefix of whole requests that includes every publish acknowledged before ``create`` began.
        assert len(published) >= 2 * floor
        assert published == [each for n in range(len(published) // 2) for each in (b"%d" % n, b"same request")]
        counts.append(count)
    assert counts == sorted(set(counts))
    span_ms = ended_ms - begun_ms
    for part in (1, 3, 5, 7):
        at_ms = begun_ms + span_ms * part // 8
        target = restored(folder, tmp_path / f"at{part}", "--at", at_ms)
        with Daemon(target) as daemon, Client(url_of(daemon)) as client:
            total, count = sums(client)
            last = [int.from_bytes(bytes(message.id)[:8], "big") for name in ACCOUNTS for message in client.read(name)]
            published = [message.value for message in client.read("log")]
        assert total == 0
        assert max(last, default=0) <= at_ms
        assert published[-1:] in ([], [b"same request"])
        assert count <= counts[-1]


@pytest.mark.parametrize("requests", [3, 12], ids=["remembered", "long ago"])
def test_producers_are_restored_as_of_the_chosen_time_and_continue_after_it(tmp_path, requests):
    """Covers producers whose rows still list those requests, and those restored from the stamps of their messages."""
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("t", deduplication="enabled")
        at_ms = 0
        with client.producer("t", "till") as producer:
            for number in range(requests):
                receipt = producer.publish([b"%d" % number])
                if number == 1:
                    at_ms = int.from_bytes(bytes(receipt.last_id)[:8], "big")
                    eventually("the clock is past the publish", lambda then=at_ms: time.time_ns() // 1_000_000 > then)
        made("create", folder, "--url", url_of(daemon))
        daemon.stop()
    with Daemon(restored(folder, tmp_path / "then", "--at", at_ms)) as daemon, Client(url_of(daemon)) as client:
        assert [message.value for message in client.read("t")] == [b"0", b"1"]
        with client.producer("t", "till") as producer:
            assert producer.last_sequence_id == 1
            again = [producer.publish([b"%d" % number]) for number in range(2, requests)]
        assert not any(receipt.duplicate for receipt in again)
        assert [message.value for message in client.read("t")] == [b"%d" % number for number in range(requests)]


def test_pruning_keeps_what_the_remaining_backups_need(tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("t")
        for number in range(4):
            client.publish("t", [b"%d" % number + bytes(100)] * 100)
            made("create", folder, "--url", url_of(daemon))
        daemon.stop()
    assert len(made("prune", folder, "--keep-last", 2)["removed"]) == 2
    kept = [each["id"] for each in json.loads(backup("list", folder, "--json").stdout)]
    assert len(kept) == 2
    assert all(made("verify", folder, "--id", each, "--deep")["ok"] for each in kept)
    assert made("prune", folder, "--keep", "7d")["removed"] == []
    assert backup("prune", folder, code=2)
    with Daemon(restored(folder, tmp_path / "new", "--id", kept[0])) as daemon, Client(url_of(daemon)) as client:
        assert len(list(client.read("t"))) == 300


def test_memory_stays_flat_however_many_messages_a_topic_has(tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data", "cache.max_bytes=0") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("t")
        for _ in range(40):
            client.publish("t", [bytes(60)] * 10_000)
        before = _rss_kib(daemon)
        done = made("create", folder, "--url", url_of(daemon))
        assert done["messages"] == 400_000
        # An object and the rows after it, twice: memory does not grow with the messages, 30 MiB here.
        assert _peak_kib(daemon) - before < 40 << 10


def _rss_kib(daemon: Daemon) -> int:
    Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
    return _status(daemon, "VmRSS")


def _peak_kib(daemon: Daemon) -> int:
    return _status(daemon, "VmHWM")


def _status(daemon: Daemon, name: str) -> int:
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_a_manifest_that_cannot_be_read_is_named_and_the_other_backups_are_listed_pruned_and_restored(filled, tmp_path):
    folder, _, _ = filled
    copy = tmp_path / "backups"
    shutil.copytree(folder, copy)
    whole, spoiled = [each["id"] for each in made("list", copy)]
    place = copy / "backups" / f"{spoiled}.json"
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 4
    place.write_bytes(content)
    shown = made("list", copy, code=Exit.FAILED)
    assert [each["id"] for each in shown] == [whole, spoiled]
    assert "damaged" not in shown[0]
    assert spoiled in shown[1]["damaged"]
    listed = backup("list", copy, code=Exit.FAILED)
    assert whole in listed.stdout
    assert spoiled in listed.stderr
    verified = made("verify", copy, code=Exit.FAILED)
    assert (verified["id"], verified["ok"]) == (spoiled, False)
    assert spoiled in verified["manifest"]
    objects = {each.name for each in copy.glob("objects/*/*")}
    pruned = backup("prune", copy, "--keep-last", 1, code=Exit.FAILED)
    assert spoiled in pruned.stderr
    assert {each.name for each in copy.glob("objects/*/*")} == objects
    assert [each["id"] for each in made("list", copy, code=Exit.FAILED)] == [whole, spoiled]
    # A restore without an id takes the newest backup, and never silently an older one.
    refused = backup("restore", copy, "--to", f"leveldb:{tmp_path / 'none'}", code=Exit.STORE)
    assert spoiled in refused.stderr
    assert not (tmp_path / "none").exists()
    assert made("verify", copy, "--id", whole, "--deep")["ok"]
