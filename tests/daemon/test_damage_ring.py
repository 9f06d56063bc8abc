"""A daemon with a damaged block, which is killed or runs out of space while it scrubs and sets rows aside."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import JSON_HEADERS, Answer, ask, create, json_body, poll_call, publish, read_all, topic_path
from tests.daemon.test_backup_command import backup, made, url_of
from tests.daemon.test_disk import leave_free
from tests.patience import PATIENCE_S
from tests.storage.disks import fill, small_disk

SETTINGS = ("storage.write_buffer_bytes=65536", "retention.interval_s=3600")
#: Number of undamaged rows before the damaged block that are set aside together with it.
WHOLE = 5


@dataclass(frozen=True)
class Damaged:
    """A data directory in which a bit was flipped."""

    folder: Path
    ids: list[str]
    """Ids of all messages that were published."""
    front: list[str]
    """Ids of the messages before the damaged block; ``rest`` has those after it."""
    rest: list[str]
    finding: dict[str, Any]
    """The scrub's finding."""

    @property
    def stretch(self) -> dict[str, str]:
        """The range to set aside: some undamaged rows and the damaged block after them."""
        return {"from": self.front[-WHOLE], "to": self.finding["to"]}

    def copied(self, to: Path) -> Path:
        shutil.copytree(self.folder, to)
        return to


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Damaged:
    folder = tmp_path_factory.mktemp("damaged") / "data"
    random = Random(1)
    ids: list[str] = []
    with Daemon(folder, *SETTINGS) as daemon:
        create(daemon.address, "t")
        for _ in range(60):
            publish(daemon.address, "t", *[random.randbytes(200).hex().encode() for _ in range(10)])
        ids = [message_id.hex() for message_id in read_on(daemon, "0" * 40)[0]]
        daemon.stop()
    flip_a_bit(folder)
    with Daemon(folder, *SETTINGS) as daemon:
        front, stopped = read_on(daemon, "0" * 40)
        (finding,) = scrubbed(daemon)["findings"]
        rest, _ = read_on(daemon, next(each for each in ids if each > finding["to"]))
        daemon.stop()
    (folder / "scrub.json").unlink()
    found = Damaged(folder, ids, [each.hex() for each in front], [each.hex() for each in rest], finding)
    # All messages before and after the damaged block are readable; the block contains a few dozen.
    assert stopped
    assert found.front == ids[: len(front)]
    assert found.rest == ids[-len(rest) :]
    assert len(front) > WHOLE
    assert 0 < len(ids) - len(front) - len(rest) < 100
    assert finding["from"] <= ids[len(front)] <= ids[-len(rest) - 1] <= finding["to"]
    return found


def flip_a_bit(folder: Path) -> None:
    """Flip a bit in the middle of the largest table of a stopped daemon."""
    table = max(folder.glob("volumes/*/*.ldb"), key=lambda each: each.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)


def read_on(daemon: Daemon, start: str) -> tuple[list[bytes], bool]:
    """Read page by page from a position; return the ids, and whether an error stopped the reader."""
    found: list[bytes] = []
    request = PollRequest(bytes.fromhex(start), limit=100)
    while True:
        answer = ask(daemon.address, *poll_call("t", request))
        if answer.status != 200:
            assert answer.code == "storage_failed", answer
            return found, True
        found += [message_id for message_id, _ in answer.messages()]
        if answer.headers["plainsong-end"] == "end":
            return found, False
        request = PollRequest(bytes.fromhex(answer.headers["plainsong-last-id"]), inclusive=False, limit=100)


def scrub_of(daemon: Daemon) -> dict[str, Any]:
    return dict(ask(daemon.address, "GET", "/v1/scrub").json())


def scrubbed(daemon: Daemon) -> dict[str, Any]:
    """Run a scrub round, and return its report."""
    before = scrub_of(daemon)["lastCompleteMs"]
    ask(daemon.address, "POST", "/v1/scrub")
    eventually("the round is complete", lambda: scrub_of(daemon)["lastCompleteMs"] != before)
    return scrub_of(daemon)


def set_aside(daemon: Daemon, stretch: dict[str, str]) -> Answer:
    return ask(daemon.address, "POST", topic_path("t", "/set-aside"), json_body(stretch), JSON_HEADERS)


def noted(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the entries of the topic's messages that are set aside, newest first."""
    found = ask(daemon.address, "GET", topic_path("t", "/messages?order=desc&limit=1000")).json()
    return [each for each in found if each["state"] == "set-aside"]


def kept_rows(folder: Path) -> set[str]:
    """Return the positions of the rows in the files of ``set-aside``."""
    rows = [json.loads(line) for path in folder.glob("set-aside/*.ndjson") for line in path.read_text().splitlines()]
    return {row["key"][-20:] for row in rows if "key" in row}


def check_done(daemon: Daemon, damaged: Damaged) -> None:
    """Check that the whole range is set aside, its readable rows are kept, and the topic accepts messages after it."""
    found, stopped = read_on(daemon, "0" * 40)
    assert not stopped
    assert [each.hex() for each in found] == damaged.front[:-WHOLE] + damaged.rest
    assert kept_rows(daemon.data_dir) >= {each[:20] for each in damaged.front[-WHOLE:]}
    assert len(noted(daemon)) == 1
    assert scrubbed(daemon)["findings"] == []
    first_id = publish(daemon.address, "t", b"behind").first_id
    assert first_id is not None
    assert first_id.hex() > damaged.ids[-1]
    again, _ = read_on(daemon, "0" * 40)
    assert again == [*found, first_id]


@contextmanager
def killed_at(daemon: Daemon, call: str, when: int) -> Iterator[None]:
    """Have strace send SIGKILL at a thread's ``when``-th such system call; skip the test if strace cannot."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("NOT TESTED: kills at system calls, since strace is not installed")
    line = [strace, "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}"]
    with subprocess.Popen([*line, "-p", str(daemon.pid)], stderr=subprocess.PIPE, text=True) as tracing:
        assert tracing.stderr is not None
        said = tracing.stderr.readline()
        if "attached" not in said:
            tracing.terminate()
            pytest.skip(f"NOT TESTED: kills at system calls, since strace may not trace here: {said}")
        try:
            yield
        finally:
            daemon.kill()
            tracing.wait(PATIENCE_S)


#: The file of rows is synced and renamed, and its folders are synced; then the topic records the range, and the rows
#: are dropped and subtracted from the counts, each by one synced write; finally the scrub's report is rewritten.
MOMENTS = [
    ("fsync", 1),
    ("rename", 1),
    ("fsync", 3),
    ("fdatasync", 1),
    *[("fdatasync", n) for n in (2, 3, 4)],
    ("rename", 2),
]


@pytest.mark.parametrize(("call", "when"), MOMENTS, ids=[f"{call}-{when}" for call, when in MOMENTS])
def test_rows_are_set_aside_whole_or_not_at_all_whenever_the_daemon_is_killed(tmp_path, damaged, call, when):
    daemon = Daemon(damaged.copied(tmp_path / "data"), *SETTINGS)
    with daemon, killed_at(daemon, call, when):
        try:
            answered: Answer | None = set_aside(daemon, damaged.stretch)
        except OSError:
            answered = None
    with daemon:
        found, stopped = read_on(daemon, "0" * 40)
        shown = [each.hex() for each in found]
        if answered is not None:
            assert answered.status == 200, answered
            assert not stopped
        if stopped:  # nothing was set aside: all rows before and after the damaged block are readable
            assert shown == damaged.front
            assert [each.hex() for each in read_on(daemon, damaged.rest[0])[0]] == damaged.rest
            assert set_aside(daemon, damaged.stretch).status == 200
        check_done(daemon, damaged)
        assert not list(daemon.data_dir.glob("set-aside/*.part"))
        daemon.stop()


def test_findings_of_a_scrub_survive_a_kill_in_the_middle_and_nothing_is_moved(tmp_path, damaged):
    slow = Daemon(damaged.copied(tmp_path / "data"), *SETTINGS, "storage.scrub_bytes_per_s=16KiB")
    for _ in range(2):
        with slow:
            assert scrub_of(slow)["lastCompleteMs"] is None
            ask(slow.address, "POST", "/v1/scrub")
            found = eventually("something is found", lambda: (now := scrub_of(slow))["findings"] and now)
            assert found["state"] == "running"
            eventually("it is kept", (slow.data_dir / "scrub.json").exists)
            # Finding the end of the damaged block takes about a hundred reads, which must not all be logged.
            slow.wait_for_line("the store failed")
            assert sum("the store failed" in line for line in slow.lines) < 10
            slow.kill()
    with Daemon(slow.data_dir, *SETTINGS) as daemon:
        report = scrub_of(daemon)
        assert report["state"] == "waiting"
        places = [(each["topic"], each["from"], each["to"]) for each in report["findings"]]
        assert places == [("t", damaged.finding["from"], damaged.finding["to"])]
        kinds = [each["kind"] for each in ask(daemon.address, "GET", "/v1/attention").json()]
        assert "damaged" in kinds
        found, stopped = read_on(daemon, "0" * 40)
        assert (stopped, [each.hex() for each in found]) == (True, damaged.front)
        assert scrubbed(daemon)["findings"] == [damaged.finding]
        assert set_aside(daemon, damaged.stretch).status == 200
        check_done(daemon, damaged)


def test_a_full_disk_keeps_the_rows_where_they_are_and_the_scrub_continues(tmp_path, damaged):
    settings = (*SETTINGS, "storage.min_free_bytes=0")
    with small_disk(tmp_path / "disk", 32) as disk, Daemon(damaged.copied(disk / "data"), *settings) as daemon:
        ballast = leave_free(disk, 24 << 10)
        refused = set_aside(daemon, {**damaged.stretch, "from": damaged.front[0]})
        assert (refused.status, refused.code, refused.json()["outcome"]) == (503, "low_space", "not-applied"), refused
        assert list(disk.glob("data/set-aside/*")) == []
        found, stopped = read_on(daemon, "0" * 40)
        assert (stopped, [each.hex() for each in found]) == (True, damaged.front)

        rest = fill(disk / "data")
        assert scrubbed(daemon)["findings"] == [damaged.finding]
        assert not (disk / "data/scrub.json").exists()
        daemon.wait_for_line("the scrub's report was not saved")
        refused = set_aside(daemon, damaged.stretch)
        assert (refused.status, refused.json()["outcome"]) == (503, "not-applied"), refused

        ballast.unlink()
        rest.unlink()
        eventually("rows are set aside", lambda: set_aside(daemon, damaged.stretch).status == 200)
        check_done(daemon, damaged)


def test_a_backup_names_unreadable_rows_and_with_a_flag_has_all_the_rest(damaged, tmp_path):
    folder = tmp_path / "backups"
    with Daemon(damaged.copied(tmp_path / "data"), *SETTINGS) as daemon:
        failed = backup("create", folder, "--url", url_of(daemon), code=Exit.UNAVAILABLE)
        assert "ring:t" in failed.stderr
        assert "--without-damaged" in failed.stderr
        assert made("list", folder) == []
        # A second backup has a message that was published after the first.
        later = publish(daemon.address, "t", b"later").first_id.hex()
        done = made("create", folder, "--url", url_of(daemon), "--without-damaged", code=Exit.FAILED)
        again = made("create", folder, "--url", url_of(daemon), "--without-damaged", code=Exit.FAILED)
        daemon.stop()
    (place,) = done["leftOut"]
    assert (place["topic"], place["table"]) == ("ring:t", "messages")
    assert damaged.front[-1] < place["from"] <= place["to"] < damaged.rest[0]
    assert done["messages"] == len(damaged.front) + len(damaged.rest) + 1
    assert (again["leftOut"], again["newObjects"]) == (done["leftOut"], 0)
    assert made("verify", folder, "--deep")["ok"]
    assert [each["leftOut"] for each in made("list", folder)] == [done["leftOut"]] * 2
    told = backup("restore", folder, "--to", f"leveldb:{tmp_path / 'new'}").stderr
    assert "left out" in told
    assert place["from"] in told
    with Daemon(tmp_path / "new", *SETTINGS) as daemon:
        found, stopped = read_on(daemon, "0" * 40)
        assert [each.hex() for each in found] == [*damaged.front, *damaged.rest, later]
        assert not stopped
        assert publish(daemon.address, "t", b"new").first_id.hex() > later


def test_a_topic_that_cannot_be_loaded_for_damage_is_served_again_from_a_backup_of_the_rest(tmp_path):
    random = Random(1)
    # A snapshot of producers is also a checkpoint; none may be written while the messages are published.
    with Daemon(tmp_path / "data", *SETTINGS, "deduplication.snapshot_interval_s=3600") as daemon:
        create(daemon.address, "t")
        create(daemon.address, "whole")
        publish(daemon.address, "whole", b"elsewhere")
        for _ in range(60):
            publish(daemon.address, "t", *[random.randbytes(200).hex().encode() for _ in range(10)])
        ids = [message_id.hex() for message_id in read_on(daemon, "0" * 40)[0]]
        with Client(url_of(daemon), namespace="ring") as client, client.producer("t", "till") as producer:
            last = bytes(producer.publish([b"of a producer"]).last_id).hex()
            epoch = producer.epoch
        daemon.kill()
    with Daemon(tmp_path / "data", *SETTINGS) as daemon:
        daemon.stop()  # the log is in tables now; no topic was loaded that would write a checkpoint
    flip_a_bit(tmp_path / "data")
    with Daemon(tmp_path / "data", *SETTINGS) as daemon:
        assert [payload for _, payload in read_all(daemon.address, "whole")] == [b"elsewhere"]
        (finding,) = scrubbed(daemon)["findings"]
        assert (finding["namespace"], finding["topic"]) == ("ring", "t")
        for _ in range(2):
            refused = set_aside(daemon, {"from": finding["from"], "to": finding["to"]})
            assert (refused.status, refused.json()["outcome"]) == (503, "not-applied")
            assert refused.code in ("storage_failed", "recovering")
            assert "--without-damaged" in refused.json()["hint"]
        told = ask(daemon.address, "GET", "/v1/attention").json()
        assert any(each["text"].startswith("The topic cannot be loaded") for each in told)
        done = made("create", tmp_path / "backups", "--url", url_of(daemon), "--without-damaged", code=Exit.FAILED)
        daemon.stop()
    (place,) = done["leftOut"]
    rest = [each for each in ids if not place["from"] <= each <= place["to"]]
    assert 0 < len(ids) - len(rest) < 100
    backup("restore", tmp_path / "backups", "--to", f"leveldb:{tmp_path / 'new'}")
    with Daemon(tmp_path / "new", *SETTINGS) as daemon:
        found, stopped = read_on(daemon, "0" * 40)
        assert ([each.hex() for each in found], stopped) == ([*rest, last], False)
        assert [payload for _, payload in read_all(daemon.address, "whole")] == [b"elsewhere"]
        new = publish(daemon.address, "t", b"new").first_id
        assert new is not None
        assert new.hex() > last
        with Client(url_of(daemon), namespace="ring") as client, client.producer("t", "till") as producer:
            assert producer.epoch > epoch + 1_000_000
            assert producer.last_sequence_id == 0
        daemon.stop()
