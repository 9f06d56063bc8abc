"""A machine whose clock was set: ids go on increasing, nothing is lost, the order stays."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from protocol.ids import unpack_id
from protocol.requests import PollRequest
from tests.daemon.harness import Daemon
from tests.daemon.talk import create, poll, publish, read_all

_LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
pytestmark = pytest.mark.skipif(not _LIBRARIES, reason="NOT TESTED: wrong clocks, since libfaketime is not installed")

HOUR_S = 3600


def clock(ahead_s: int) -> dict[str, str]:
    """The environment of a process whose wall clock is so far ahead."""
    # The monotonic clock stays as it is: it times waits, not messages.
    return {
        "LD_PRELOAD": str(_LIBRARIES[0]),
        "FAKETIME": f"{ahead_s:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def test_the_fake_clock_is_one():
    shown = subprocess.run(["date", "+%s"], env=clock(-HOUR_S), capture_output=True, text=True, check=True)
    assert abs(int(shown.stdout) + HOUR_S - time.time()) < 60


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_with_the_clock_an_hour_back_or_a_day_ahead_keeps_ids_increasing(tmp_path, how):
    ids = []
    sent = []
    for ahead_s in (0, -HOUR_S, -2 * HOUR_S, 24 * HOUR_S, 0):
        with Daemon(tmp_path / "data", environ=clock(ahead_s)) as running:
            create(running.address, "t")
            for number in range(3):
                message = b"%d:%d" % (ahead_s, number)
                receipt = publish(running.address, "t", message)
                sent.append(message)
                ids.append(receipt.first_id)
            getattr(running, how)()
    assert ids == sorted(set(ids))
    with Daemon(tmp_path / "data") as running:
        assert read_all(running.address, "t") == list(zip(ids, sent, strict=True))
        for number, message_id in enumerate(ids):
            rest = poll(running.address, "t", PollRequest(message_id, inclusive=False))
            assert [payload for _, payload in rest] == sent[number + 1 :]


def test_after_the_clock_went_back_times_still_find_their_messages(tmp_path):
    with Daemon(tmp_path / "data") as running:
        create(running.address, "t")
        before = publish(running.address, "t", b"before").first_id
        running.stop()
    with Daemon(tmp_path / "data", environ=clock(-HOUR_S)) as running:
        after = publish(running.address, "t", b"after").first_id
        assert before is not None
        assert after is not None
        assert unpack_id(after).publish_ts_ms >= unpack_id(before).publish_ts_ms
        at = unpack_id(before).publish_ts_ms
        assert [payload for _, payload in poll(running.address, "t", PollRequest(at))] == [b"before", b"after"]
