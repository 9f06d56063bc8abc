"""Peers get the same loads in turn and return what they acknowledged; a missing peer is named with the reason."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench import daemon, generator
from bench.bodies import payloads
from bench.peers import both, fetch
from bench.peers.__main__ import PEERS
from bench.peers.kafka import crc32c
from bench.peers.loads import QUICK, Comparison
from bench.peers.peer import Lacking, Peer
from bench.peers.plainsong import Plainsong
from bench.report import results_of, write_report
from tests.bench.forking import start_process

ROOT = Path(__file__).parents[2]
#: Ten times the usual duration.
PATIENCE_S = 600
SMALL = replace(QUICK, sustained_s=0.1, open_s=0.1)


@pytest.fixture(autouse=True)
def _compiler():
    if generator.compiled() is None:
        pytest.skip("there is no C compiler")


@pytest.fixture(scope="module", autouse=True)
def _forked():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(daemon, "start_process", start_process)
        yield


class Absent(Plainsong):
    """A peer that is not available."""

    name = "absent"

    def fetch(self) -> str:
        raise Lacking("it is | not\nthere")


class Refusing(Plainsong):
    """A peer that refuses requests with more than one message."""

    name = "refusing"

    def publish(self, topic, messages):
        return super().publish(topic if len(messages) == 1 else "no-such-topic", messages)


class Forgetful(Plainsong):
    """A peer that has lost some of what it acknowledged."""

    name = "forgetful"

    def walk(self, running, topic, limit):
        asked = super().walk(running, topic, limit)
        # Start from an id in the far future.
        start = asked.position_at
        return replace(asked, request=asked.request[:start] + b"\x7f" * 20 + asked.request[start + 20 :])


@contextmanager
def open_directory():
    """A directory that other users may enter: a peer runs as another user, who cannot enter pytest's directories."""
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)


@contextmanager
def started(tmp_path, *peers: Peer):
    """Start a comparison of these peers."""
    home = tmp_path / "scratch"
    home.mkdir()
    with ExitStack() as ending:
        comparison = Comparison(SMALL, lambda line: None)
        comparison.start(peers, home, ending)
        yield comparison


def test_an_unavailable_peer_is_named_with_the_reason(tmp_path):
    with started(tmp_path, Absent()) as comparison:
        section = comparison.overview()
    write_report(tmp_path / "report", results_of("quick", {}, [section], []), [section])
    assert "| absent | not measured | it is / not there |" in (tmp_path / "report/report.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(("peer", "reason"), [(Refusing(), "404"), (Forgetful(), "3,000 messages and returned 0")])
def test_a_peer_that_refuses_or_loses_messages_is_measured_no_further(tmp_path, peer, reason):
    with started(tmp_path, peer) as comparison:
        comparison.warm_up()
    assert comparison.sides == []
    assert reason in comparison.lacking[peer.name]


def _is_here(name: str) -> bool:
    """True if a peer can be started without downloads."""
    if name == "nats":
        return (fetch.KEPT / "nats/nats-server").exists()
    if name in ("kafka", "original"):
        return fetch.are_fetched(name) and shutil.which("java") is not None
    if name == "postgres":
        return bool(list(Path("/usr/lib/postgresql").glob("*/bin/initdb")))
    return name == "plainsong" or shutil.which(f"{name}-server") is not None


@pytest.fixture(scope="module", params=PEERS)
def warm(request):
    """The comparison with each available peer, after its warm-up."""
    if not _is_here(request.param):
        pytest.skip(f"{request.param} has not been fetched: make bench-peers")
    with open_directory() as home, started(home, PEERS[request.param]()) as comparison:
        assert comparison.lacking == {}
        comparison.warm_up()
        yield comparison


def test_every_peer_returns_all_acknowledged_messages(warm):
    # A peer that fails is removed in the warm-up.
    assert warm.lacking == {}
    assert warm.sides[0].running.cpu_s() > 0


@contextmanager
def traced(pid: int, output: Path):
    """Write the syncs of a process and of its later children to a file, with strace."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace: etc/tools")
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,msync", "-o", str(output), "-p", str(pid)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process, process.stderr as said:
        line = said.readline()
        if "attached" not in line:
            pytest.skip(f"strace may not attach: {line}")
        yield
        process.terminate()
        said.read()


def test_every_peer_syncs_each_of_a_hundred_consecutive_publishes(warm, tmp_path):
    (side,) = warm.sides
    asked = [side.peer.publish(topic, payloads(1, 100)) for topic in side.topic()]
    with traced(side.running.pid, tmp_path / "syncs"):
        assert side.load(asked, 1, 1, "--requests", "100").result["requests"] == 100
    calls = re.findall(r"(?:fsync|fdatasync|msync)\(", (tmp_path / "syncs").read_text(encoding="utf-8"))
    assert len(calls) >= 100


def _transacts(side):
    """Skip unless the peer runs transactions here."""
    if not side.peer.transacts:
        assert side.peer.transact(side.running, ["t"], connections=1, seconds=0.1, size=100) is None
        pytest.skip("it has no transactions")
    if side.peer.name == "plainsong" and not _is_here("original"):
        pytest.skip("their client has not been fetched: make bench-peers")


def test_a_transaction_of_the_peers_own_client_is_committed_in_all_its_topics(warm):
    (side,) = warm.sides
    _transacts(side)
    topics = side.topic(2)
    result = side.peer.transact(side.running, topics, connections=2, seconds=1, size=100)
    assert result["requests"] >= 0
    assert result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
    for topic in topics:
        assert (
            side.load([side.peer.walk(side.running, topic, 10)], 1, 0, "--messages", "--requests", "1").result[
                "messages"
            ]
            > 0
        )


def test_a_peer_syncs_each_of_its_transactions_and_kafka_its_log_of_them_too(warm, tmp_path):
    (side,) = warm.sides
    _transacts(side)
    with traced(side.running.pid, tmp_path / "syncs"):
        result = side.peer.transact(side.running, side.topic(), connections=1, seconds=1, size=100)
    calls = re.findall(r"(?:fsync|fdatasync|msync)\((.*)", (tmp_path / "syncs").read_text(encoding="utf-8"))
    syncs = 2 if side.peer.name == "plainsong" else 1
    assert len(calls) >= syncs * result["requests"]
    if side.peer.name == "kafka":
        assert sum("__transaction_state" in call for call in calls) >= result["requests"]


def test_a_load_whose_client_is_missing_is_named_with_the_reason():
    class Clientless(Plainsong):
        name = "clientless"

        def transact(self, running, topics, connections, seconds, size):
            raise Lacking("there is no\nclient")

    with open_directory() as home, started(home, Clientless()) as comparison:
        comparison.warm_up()
        comparison.profile = replace(SMALL, singles=(), batches=())
        rates, _ = comparison.measure(lambda: None)
        section = comparison.overview()
    assert not [row for row in rates.rows if row.what["load"].startswith("transaction")]
    reasons = {row.what["peer"]: row.what["synced"] for row in section.rows}
    assert reasons["clientless, transaction, 1 topic, 1 connection"] == "there is no client"


def test_every_load_runs_against_a_peer_and_is_reported():
    command = [sys.executable, "-m", "bench.peers", "--quick", "--json", "--only", "plainsong"]
    with open_directory() as home:
        command += ["--report", str(home / "report"), "--scratch", str(home / "scratch")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not list((home / "scratch").iterdir())
        assert (home / "report/report.md").read_text(encoding="utf-8").startswith("# Benchmark\n")
    results = json.loads(done.stdout)
    assert {"processor", "kernel", "a synced append of 200 B", "load before", "load after", "date"} <= results[
        "facts"
    ].keys()
    sections = results["sections"]
    assert list(sections) == ["peers", "peers-rates", "peers-waits", "peers-open"]
    loads = [row["what"]["load"] for row in sections["peers-rates"]["rows"]]
    assert loads == [
        *("single, 1 connection", "single, 16 connections", "batch, 4 connections"),
        *("batch over 4 topics, 4 connections", "batch for 0.2 s, 4 connections"),
        *("page", "page of 10", "walk", "walk by 100"),
    ]
    rates = [row["what"]["rate"] for row in sections["peers-open"]["rows"]]
    assert rates == ["100 a second", "1/4 of its highest", "1/2 of its highest", "3/4 of its highest"]


def test_record_batches_use_the_castagnoli_checksum():
    # From RFC 3720, B.4 (32 zero bytes), and the usual check value of nine digits.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"123456789") == 0xE3069283


class Another(Plainsong):
    """The daemon again, in place of the original."""

    name = "original"


def test_loads_that_both_support_run_in_turn_and_are_compared():
    with open_directory() as home:
        overview, section = both.measure([Another(), Plainsong()], SMALL, home, lambda line: None)
    assert [row.what["peer"] for row in overview.rows] == ["original", "plainsong"]
    loads = [row.what["load"] for row in section.rows]
    assert len(set(loads)) == len(loads) > 20
    for row in section.rows:
        assert row.values["original/s"].median > 0, row.what
        assert row.values["plainsong/s"].median > 0, row.what
        assert "÷ original" in row.values


def test_a_load_that_one_side_refuses_has_no_rate():
    class Refuses(Plainsong):
        def pointer(self, running):
            return 1

    with open_directory() as home, pytest.raises(RuntimeError, match="statuses other than 200"):
        both.measure([Refuses()], SMALL, home, lambda line: None)
