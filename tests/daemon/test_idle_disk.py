"""A daemon without requests leaves its disk alone, whatever is left in its volumes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import create, publish, read_all
from tests.daemon.test_crash_ring import SIZES

SETTINGS = ("retention.interval_s=0.1", "storage.min_free_bytes=0", *SIZES["smallest sizes"])
#: Topics with one message left each: together less than half of a volume.
QUIET = [f"quiet{number}" for number in range(20)]
#: More bytes than the probes and the log write, but far fewer than a daemon writes that rewrites volumes every round.
MOST_BYTES = 1 << 20


def volumes(data: Path) -> set[str]:
    """Return the folders of volumes; a rewritten one has a suffix, which counts the rewrites."""
    return {path.name for path in (data / "volumes").iterdir() if re.fullmatch(r"\d{8,}(\.\d+)?", path.name)}


def written(running: Daemon) -> int:
    """Return the bytes that the daemon has written to files and pipes since its start."""
    found = re.search(r"^wchar: (\d+)$", Path(f"/proc/{running.pid}/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def clean(running: Daemon, probe: str) -> None:
    """Wait until the janitor has cleaned a new topic, which means that it has tidied since the last call."""
    create(running.address, probe, ttl=1)
    publish(running.address, probe, b"soon gone")
    eventually(
        f"{probe} is cleaned", lambda: any("topic cleaned" in line and f'{probe}"' in line for line in running.lines)
    )


def test_an_idle_daemon_rewrites_a_volume_with_few_messages_left_only_once(tmp_path):
    data = tmp_path / "data"
    with Daemon(data, *SETTINGS) as running:
        create(running.address, "busy", ttl=1)
        for topic in QUIET:
            create(running.address, topic)
            publish(running.address, topic, b"q" * 1000)
        while len(volumes(data)) < 4:
            publish(running.address, "busy", *[b"b" * 4000] * 8)
        eventually("a volume is rewritten", lambda: any("." in name for name in volumes(data)))
        clean(running, "probe0")
        clean(running, "probe1")
        rewritten, before = {name for name in volumes(data) if "." in name}, written(running)
        for number in range(2, 5):
            clean(running, f"probe{number}")
        assert written(running) - before < MOST_BYTES
        assert {name for name in volumes(data) if "." in name} == rewritten
        for topic in QUIET:
            assert [payload for _, payload in read_all(running.address, topic)] == [b"q" * 1000]
