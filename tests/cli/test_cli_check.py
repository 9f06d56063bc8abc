"""`doctor --check`: one line, figures, and Nagios' exit codes; `doctor --bundle`: facts without a secret."""

from __future__ import annotations

import http.server
import json
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli import bundle
from plainsong.cli.check import samples_in
from tests.cli.conftest import Said, url_of
from tests.daemon.harness import Daemon
from tests.freezing import freeze, thaw
from tests.patience import PATIENCE_S

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli) -> Iterator[Client]:
    with Client.from_environment() as client:
        yield client


# --- check -------------------------------------------------------------------------------------------


def test_a_healthy_daemon_is_one_line_with_figures_and_exit_code_0(alone: Cli, tmp_path: Path):
    with Daemon(tmp_path / "data") as daemon:
        said = alone("doctor", "--check", "--url", url_of(daemon), code=0)
        (line,) = said.lines
        text, _, figures = line.partition(" | ")
        assert text == "PLAINSONG OK - 1 instance, 0 topics"
        assert figures == "instances=1 topics=0 scrub_findings=0;0 oldest_tx=0s;600 hidden=0"
        told = alone("doctor", "--check", "--url", url_of(daemon), "--json", code=0).json
        assert (told["status"], told["findings"]) == ("OK", [])
        assert told["figures"]["oldest_tx"] == {"value": "0s", "warning": 600}
        said = alone("doctor", "--check", "--url", url_of(daemon), "--backup-age", "26h", code=1)
        assert said.out.startswith("PLAINSONG WARNING - no complete backup exists | ")


def test_an_old_transaction_and_a_slow_reader_are_warnings(cli: Cli, client: Client):
    client.create_topic("t")
    client.publish("t", [b"a", b"b", b"c"])
    first = client.poll("t", limit=1)[0].id
    client.admin.set_reader("t", "billing", first)
    lag = f"{client.namespace}:t/billing"
    behind = f"reader billing of {client.namespace}:t is 2 messages behind"
    said = cli(
        "doctor", "--check", "--max-lag", f"{lag}=2", code=None
    )  # a disk that was slow in the last minutes is a warning too
    assert f"lag_{lag}=2;2" in said.out
    assert behind not in said.out
    said = cli("doctor", "--check", "--max-lag", f"{lag}=1", code=1)
    assert said.out.startswith("PLAINSONG WARNING - ")
    assert behind in said.out
    with client.transaction():
        deadline_s = time.monotonic() + PATIENCE_S
        # Ages are in milliseconds, and the first check may be that fast.
        while (
            "a transaction has been open for"
            not in (said := cli("doctor", "--check", "--max-transaction-age", "1s", code=None)).out
        ):
            assert time.monotonic() < deadline_s, said
        assert said.code == 1


def test_every_sample_of_a_name_counts_whatever_its_labels_are():
    text = (
        "# HELP plainsong_x Text.\n"
        "# TYPE plainsong_x gauge\n"
        'plainsong_x{topic="a",reader="} 7"} 1.0\n'
        'plainsong_x{topic="b\\""} 2.5e+09\n'
        "plainsong_x +Inf\n"
        "plainsong_y NaN\n"
        "python_x 3.0\n"
    )
    assert samples_in(text) == [("plainsong_x", 1.0), ("plainsong_x", 2.5e9), ("plainsong_x", inf)]


def test_a_backup_is_shown_with_its_age(cli: Cli, running: Daemon, tmp_path: Path):
    cli("backup", "create", str(tmp_path / "backups"))
    text, _, figures = cli("doctor", "--check", "--backup-age", "1h", code=None).out.partition(" | ")
    assert "backup_age=" in figures
    assert "backup" not in text


def test_a_daemon_that_refuses_the_connection_is_critical(alone: Cli, tmp_path: Path):
    said = alone("doctor", "--check", "--url", "http://127.0.0.1:1", code=2)
    assert said.out.startswith("PLAINSONG CRITICAL - http://127.0.0.1:1: ")
    assert alone("doctor", "--check", "--url", f"unix:{tmp_path}/none.sock", code=2).err == ""


def test_a_daemon_that_is_not_ready_is_critical(alone: Cli, tmp_path: Path):
    with Daemon(tmp_path / "data", "storage.min_free_bytes=1024TiB") as daemon:
        said = alone("doctor", "--check", "--url", url_of(daemon), code=2)
    assert said.out.startswith(f"PLAINSONG CRITICAL - {url_of(daemon)} is not ready: ")
    assert "storage.min_free_bytes" in said.out


def test_one_unreachable_daemon_of_several_is_critical_and_the_others_are_checked(cli: Cli, running: Daemon):
    said = cli("doctor", "--check", "--url", f"{url_of(running)},http://127.0.0.1:1", code=2)
    assert "http://127.0.0.1:1" in said.out
    assert "instances=1" in said.out


def test_a_daemon_that_does_not_answer_in_time_is_unknown(alone: Cli, tmp_path: Path):
    with Daemon(tmp_path / "data") as daemon:
        freeze(daemon.pid)
        try:
            said = alone("doctor", "--check", "--url", url_of(daemon), "--timeout", "300ms", code=3)
        finally:
            thaw(daemon.pid)
    assert said.out.startswith("PLAINSONG UNKNOWN - ")
    assert "no answer within 0.3 s" in said.out


def test_a_server_that_is_not_plainsong_is_unknown(alone: Cli):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        said = alone("doctor", "--check", "--url", f"http://127.0.0.1:{server.server_port}", code=3)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "not a Plainsong daemon" in said.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-lag", "orders=1"),
        ("--max-lag", "ns:t/r"),
        ("--max-transaction-age", "soon"),
        ("--certificate-days", "-1"),
        ("--nonsense",),
        ("extra",),
        ("--context", "none"),
        ("--url", "ftp://x"),
        ("--certificate", "alone.pem"),
    ],
)
def test_wrong_arguments_are_unknown_and_reported_on_standard_output(alone: Cli, arguments: tuple[str, ...]):
    said = alone("doctor", "--check", *arguments, code=3)
    assert said.out.startswith("PLAINSONG UNKNOWN - ")
    assert len(said.lines) == 1


def test_a_name_without_the_verb_inspect_is_unknown(alone: Cli, tmp_path: Path):
    tokens, grants, token = tmp_path / "tokens.json", tmp_path / "grants.toml", tmp_path / "token"
    grants.write_text('format = 1\n[[grant]]\nto = ["robot"]\nverbs = ["poll"]\non = ["a:b"]\n')
    alone(
        *("token", "create", "--name", "robot", "--expires", "1d"), *("--file", str(tokens), "--write-to", str(token))
    )
    settings = ("security.authentication=required", f"security.tokens_file={tokens}", f"security.grants_file={grants}")
    with Daemon(tmp_path / "data", *settings) as daemon:
        said = alone("doctor", "--check", "--url", url_of(daemon), "--token-file", str(token), code=3)
        assert "/v1/cluster: " in said.out
        assert alone("doctor", "--check", "--url", url_of(daemon), code=3).out.startswith("PLAINSONG UNKNOWN - ")


def test_text_from_a_daemon_cannot_end_the_line_or_begin_the_figures(monkeypatch: pytest.MonkeyPatch):
    from plainsong.cli.check import WARNING, Report

    report = Report()
    report.found(WARNING, "a\nb | c=1")
    assert report.line == "PLAINSONG WARNING - a b / c=1"


# --- doctor --bundle ---------------------------------------------------------------------------------

TOKEN = "psg_PlainsongPlainsongPlainsongPlainsong00001Kckda"
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"
PLANTED = (TOKEN, JWT, "hunter2hunter2", "the-payload-of-it", "the-attribute-of-it", "the-client-of-it", "pass-in-url")


def held(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("plainsong-bundle/")] = file.read().decode()
        return found


@pytest.fixture
def planted(cli: Cli, client: Client, home: Path) -> list[str]:
    """Plant secrets wherever a bundle looks; return the arguments that make `doctor` look there."""
    client.create_topic("orders")
    client.publish("orders", [b"the-payload-of-it"], attributes={"the-attribute-of-it": "x"})
    begun = client.transactions.begin(timeout_s=120, client_id="the-client-of-it")
    client.publish("orders", [b"the-payload-of-it"], transaction=begun)
    client.admin.set_reader("orders", "billing", client.poll("orders")[0].id)
    config, log = home / "plainsong.toml", home / "plainsong.log"
    config.write_text(
        "[security.oidc]\n"
        'issuer = "https://user:pass-in-url@issuer.example"\naudience = "x"\n'
        'jwks = "https://user:pass-in-url@issuer.example/keys?token=hunter2hunter2"\n'
    )
    lines = [f"line {number}\n" for number in range(bundle.MAX_LOG_LINES)]
    lines += [
        f'{{"msg":"refused","topic":"{client.namespace}:orders","authorization":"Bearer hunter2hunter2"}}\n',
        f"a token {TOKEN} and {JWT} at https://user:pass-in-url@other.example\n",
        f"WARNING fell topic={client.namespace}:gone\n",
    ]
    log.write_text("".join(lines))
    return ["--config", str(config), "--log", str(log), "--data-dir", str(home)]


def test_a_bundle_has_exactly_the_listed_files_and_no_secret(cli: Cli, client: Client, planted: list[str], home: Path):
    path = home / "facts.tar.gz"
    said = cli("doctor", "--bundle", str(path), *planted, code=None)
    files = held(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listed = {line.split()[0] for line in said.lines[said.lines.index(f"{path} holds:") + 1 :]}
    assert listed == files.keys() - {"CONTENTS.txt"}
    assert all(name in files["CONTENTS.txt"] for name in listed)
    assert listed == {
        *(
            "versions.json",
            "checks.json",
            "settings.json",
            "version.json",
            "readyz.json",
            "metrics.txt",
            "cluster.json",
        ),
        *("attention.json", "scrub.json", "transactions.json", "log.txt"),
    }
    everything = "\n".join(files.values())
    assert not [secret for secret in PLANTED if secret in everything]
    assert "https://***@issuer.example" in files["settings.json"]
    assert json.loads(files["settings.json"])["http.bind"]["origin"]
    (shown,) = [
        each for each in json.loads(files["transactions.json"]) if f"{client.namespace}:orders" in each["topics"]
    ]
    assert "clientId" not in shown
    assert "plainsong_build_info" in files["metrics.txt"]
    assert len(files["log.txt"].splitlines()) == bundle.MAX_LOG_LINES
    assert files["log.txt"].endswith(f"topic={client.namespace}:gone\n")
    assert {each["what"] for each in json.loads(files["checks.json"])["checks"]} >= {"free space", "clock", "daemon"}


def test_without_names_topics_are_hashes_that_are_constant_within_one_bundle_only(
    cli: Cli, client: Client, planted: list[str], home: Path
):
    hashes = []
    for name in ("one.tar.gz", "two.tar.gz"):
        cli("doctor", "--bundle", str(home / name), "--no-names", *planted, code=None)
        files = held(home / name)
        everything = "\n".join(files.values())
        assert client.namespace not in everything
        assert "orders" not in everything
        assert ":gone" not in everything
        (topic,) = {
            topic for each in json.loads(files["transactions.json"]) for topic in each["topics"] if ":" in topic
        } & {
            line.partition('"topic":"')[2].partition('"')[0]
            for line in files["log.txt"].splitlines()
            if "refused" in line
        }
        hashes.append(topic)
    assert hashes[0] != hashes[1]


def test_a_bundle_overwrites_no_file(cli: Cli, home: Path):
    path = home / "there"
    path.write_text("mine")
    said = cli("doctor", "--bundle", str(path), code=1)
    assert said.err.startswith(f"error: {path} exists\n")
    assert path.read_text() == "mine"
    cli("doctor", "--no-names", code=2)


def test_a_bundle_without_a_daemon_is_made_and_says_so(alone: Cli, home: Path):
    alone("doctor", "--bundle", "b.tar.gz", "--url", "http://127.0.0.1:1", code=1)
    assert "notKnown" in held(home / "b.tar.gz")["metrics.txt"]


def test_the_log_in_a_bundle_is_bounded_however_long_its_lines_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_PART_BYTES", 1_000)
    made = bundle.Bundle(hides_names=False)
    made.add("log.txt", "the log", "x" * 5_000 + "end")
    says, data = made.files["log.txt"]
    assert len(data) == 1_000
    assert data.endswith(b"end")
    assert "the last" in says
