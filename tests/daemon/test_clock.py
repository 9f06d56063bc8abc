"""After a machine's clock was set, ids still increase, nothing is lost, and the order stays."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from plainsong.cli.command import Exit
from plainsong.protocol.ids import unpack_id
from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon, run_plainsong
from tests.daemon.talk import create, metric, poll, publish, read_all

_LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
pytestmark = pytest.mark.skipif(not _LIBRARIES, reason="NOT TESTED: wrong clocks, since libfaketime is not installed")

HOUR_S = 3600
DAY_S = 24 * HOUR_S


def clock(ahead_s: int) -> dict[str, str]:
    """Return the environment of a process whose wall clock is ahead by ``ahead_s``."""
    # The monotonic clock stays real: it times waits, not messages.
    return {
        "LD_PRELOAD": str(_LIBRARIES[0]),
        "FAKETIME": f"{ahead_s:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # libfaketime's workaround for old C libraries repeatedly wakes threads that wait for the interpreter's lock.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "DONT_FAKE_MONOTONIC": "1",
    }


def test_the_fake_clock_works():
    shown = subprocess.run(["date", "+%s"], env=clock(-HOUR_S), capture_output=True, text=True, check=True)
    assert abs(int(shown.stdout) + HOUR_S - time.time()) < 60


def test_a_restart_with_the_clock_an_hour_back_or_a_day_ahead_keeps_ids_increasing(tmp_path):
    ids: list[bytes] = []
    sent: list[bytes] = []
    for ahead_s, end in ((0, "kill"), (-HOUR_S, "stop"), (24 * HOUR_S, "kill"), (0, "kill")):
        with Daemon(tmp_path / "data", environ=clock(ahead_s)) as running:
            create(running.address, "t")
            for number in range(3):
                sent.append(b"%d:%d" % (ahead_s, number))
                first_id = publish(running.address, "t", sent[-1]).first_id
                assert first_id is not None
                ids.append(first_id)
            check(running, ids, sent)
            getattr(running, end)()


def check(running: Daemon, ids: list[bytes], sent: list[bytes]) -> None:
    """Check that every message is there in the order sent, by reading from every id and every time."""
    assert ids == sorted(set(ids))
    assert read_all(running.address, "t") == list(zip(ids, sent, strict=True))
    for number, message_id in enumerate(ids):
        rest = poll(running.address, "t", PollRequest(message_id, inclusive=False))
        assert [payload for _, payload in rest] == sent[number + 1 :]
        at_ms = unpack_id(message_id).publish_ts_ms
        first = next(i for i, other in enumerate(ids) if unpack_id(other).publish_ts_ms >= at_ms)
        assert [payload for _, payload in poll(running.address, "t", PollRequest(at_ms))] == sent[first:]


def test_a_clock_that_disagrees_with_the_store_is_named_at_the_start_and_by_the_check(tmp_path):
    data = tmp_path / "data"
    with Daemon(data, environ=clock(0)) as running:
        create(running.address, "t")
        publish(running.address, "t", b"m")
    with Daemon(data, environ=clock(-2 * DAY_S - HOUR_S // 2)) as behind:
        said = json.loads(behind.wait_for_line("the clock is behind the store"))
        assert said["behind_s"] == pytest.approx(2 * DAY_S, abs=HOUR_S)
        assert named_by_the_check(behind, "2 days behind")
        assert metric(behind.address, "plainsong_clock_behind_seconds") == pytest.approx(2 * DAY_S, abs=HOUR_S)
    far_ahead = Daemon(data, "storage.max_clock_ahead_s=86400", environ=clock(10 * DAY_S))
    far_ahead.spawn()
    assert far_ahead.wait() == Exit.STORE
    assert "expired messages cannot be restored" in far_ahead.errors
    assert "storage.max_clock_ahead_s=0" in far_ahead.errors
    with Daemon(data, environ=clock(0)) as corrected:
        assert [payload for _, payload in read_all(corrected.address, "t")] == [b"m"]
        assert not named_by_the_check(corrected, "")
    with Daemon(data, environ=clock(10 * DAY_S)) as ahead:
        said = json.loads(ahead.wait_for_line("the clock is far ahead of the store"))
        assert said["ahead_s"] == pytest.approx(10 * DAY_S, abs=HOUR_S)
        publish(ahead.address, "t", b"too late")
        ahead.stop()
    with Daemon(data, environ=clock(0)) as corrected:
        said = json.loads(corrected.wait_for_line("the clock is behind the store"))
        assert said["behind_s"] == pytest.approx(10 * DAY_S, abs=HOUR_S)
        assert named_by_the_check(corrected, "behind the newest time in the store")


def test_after_a_crash_the_clock_is_compared_once_a_topic_is_open(tmp_path):
    with Daemon(tmp_path / "data", environ=clock(DAY_S)) as ahead:
        create(ahead.address, "t")
        publish(ahead.address, "t", b"too late")
        ahead.kill()
    with Daemon(tmp_path / "data", environ=clock(0)) as corrected:
        assert len(read_all(corrected.address, "t")) == 1
        assert named_by_the_check(corrected, "behind the newest time in the store")
        said = json.loads(corrected.wait_for_line("the clock is behind the store"))
        assert said["behind_s"] == pytest.approx(DAY_S, abs=HOUR_S)


def named_by_the_check(running: Daemon, words: str) -> bool:
    """True if the check for monitoring systems warns about the clock with these words."""
    url = "http://{}:{}".format(*running.address)
    done = run_plainsong("doctor", "--check", "--json", "--url", url)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [each for each in json.loads(done.stdout)["findings"] if "The clock is" in str(each)]
    assert done.returncode or not found
    return any(words in str(each) for each in found)
