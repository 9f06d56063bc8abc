"""The daemon under TLS: its own certificate, renewed while it runs."""

from __future__ import annotations

import datetime
import http.client
import json
import os
import random
import signal
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from broker.security.files import write_guarded
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from plainsong.cli.command import Exit
from tests.certificates import DAY, Authority
from tests.daemon.harness import Daemon, eventually, run_plainsong
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

#: The time between now and an invalid certificate's validity.
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


def settings(authority: Authority, *names: str, **more: object) -> list[str]:
    pair = authority.issue("server", *names)
    given = {"certificate": pair.certificate, "key": pair.key, **more}
    return [f"tls.{name}={value}" for name, value in given.items()]


def ask(
    daemon: Daemon, context: ssl.SSLContext, method: str, path: str, body: str = "", host: str = "localhost"
) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(*daemon.address, context=context, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def served(daemon: Daemon, authority: Authority) -> int:
    """Return the serial number of the certificate on a new connection."""
    connection = http.client.HTTPSConnection(*daemon.address, context=authority.trusting(), timeout=PATIENCE_S)
    connection.connect()
    try:
        return int(str(connection.sock.getpeercert()["serialNumber"]), 16)
    finally:
        connection.close()


def gauge(daemon: Daemon, authority: Authority, name: str) -> float:
    text = ask(daemon, authority.trusting(), "GET", "/metrics")[1].decode()
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


TOPIC = "/v1/namespaces/ring/topics/t"
GRANTS = """format = 1
[[grant]]
to = ["me"]
verbs = ["admin"]
on = ["demo:*"]
"""


@pytest.mark.parametrize("names", [(), ("plainsong.example", "*.example")])
def test_the_banner_of_a_daemon_with_tls_and_names_has_a_command_that_works(daemon, authority, tmp_path, names):
    token = new_token(random.Random(7).choice)
    entries = [TokenEntry(id_of(hash_of(token)), "me", hash_of(token), 0, None)]
    write_guarded(tmp_path / "tokens.json", format_tokens(entries))
    write_guarded(tmp_path / "grants.toml", GRANTS.encode())
    running = daemon(
        *settings(authority, *names),
        "log.format=text",
        "security.authentication=required",
        f"security.tokens_file={tmp_path}/tokens.json",
        f"security.grants_file={tmp_path}/grants.toml",
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    banner = dict(running.stdout.readline().decode().strip().split(maxsplit=1) for _ in range(7))
    port = banner["plainsong"].rpartition(":")[2]
    host = "plainsong.example" if names else "127.0.0.1"
    assert banner["console"] == f"https://{host}:{port}/console"
    assert banner["names"].startswith("required: $TOKEN is your token")
    command = ["sh", "-c", f"{banner['try']} -sSf"]
    environ = {"PATH": os.environ["PATH"], "TOKEN": token, "NO_PROXY": "*"}
    done = subprocess.run(command, env=environ, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("processes", [1, 2])
def test_every_route_is_served_over_tls_and_none_without(daemon, authority, processes):
    running = daemon(*settings(authority), f"http.processes={processes}")
    assert running.serving["addresses"] == [f"https://127.0.0.1:{running.address[1]}"]
    context = authority.trusting()
    assert ask(running, context, "PUT", TOPIC)[0] == 200
    for _ in range(5):
        assert ask(running, context, "POST", f"{TOPIC}/publish", '{"messages": ["m"]}')[0] == 200
    assert ask(running, context, "POST", f"{TOPIC}/poll", "{}")[1].count(b'"m"') == 5
    plain = http.client.HTTPConnection(*running.address, timeout=PATIENCE_S)
    plain.request("GET", "/ping")
    answer = plain.getresponse()
    assert (answer.status, b'"tls_required"' in answer.read()) == (400, True)
    plain.close()
    eventually("handshakes are counted", lambda: gauge(running, authority, "plainsong_tls_handshakes_total") >= 9)


def test_a_unix_socket_stays_unencrypted(daemon, authority, tmp_path):
    path = tmp_path / "a.sock"
    running = daemon(*settings(authority), bind=f"unix:{path},127.0.0.1:0")
    assert [url.partition(":")[0] for url in running.serving["addresses"]] == ["unix", "https"]
    asked = subprocess.run(
        ["curl", "-s", "--unix-socket", str(path), "http://localhost/ping"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert asked.stdout.strip() == b"OK"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_renewed_pair_is_served_without_a_signal_and_open_connections_stay_open(daemon, authority, processes):
    running = daemon(*settings(authority, "old.example"), f"http.processes={processes}")
    context = authority.trusting()
    kept = http.client.HTTPSConnection(*running.address, context=context, timeout=PATIENCE_S)
    kept.request("GET", "/ping")
    kept.getresponse().read()
    before, expires_s = served(running, authority), not_after(running, authority)
    assert ask(running, context, "GET", "/ping", host="old.example")[0] == 200
    assert ask(running, context, "GET", "/ping", host="new.example")[0] == 403
    authority.issue("server", "new.example", ends=20 * DAY)
    eventually("the new certificate is served", lambda: served(running, authority) != before)
    eventually("by every process", lambda: served_by_all(running, authority) == {200})
    eventually("the metric follows", lambda: not_after(running, authority) > expires_s + 9 * 86_400)
    kept.request("GET", "/ping")
    assert kept.getresponse().status == 200
    kept.close()


def served_by_all(running: Daemon, authority: Authority) -> set[int]:
    return {ask(running, authority.trusting(), "GET", "/ping", host="new.example")[0] for _ in range(8)}


def not_after(running: Daemon, authority: Authority) -> float:
    return gauge(running, authority, "plainsong_tls_certificate_not_after_seconds")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_reloads_at_once(daemon, authority, processes):
    running = daemon(*settings(authority), "security.reload_s=0", f"http.processes={processes}")
    before = served(running, authority)
    authority.issue("server")
    assert {served(running, authority) for _ in range(4)} == {before}
    running.signal(signal.SIGHUP)
    eventually("the new certificate is served", lambda: all(served(running, authority) != before for _ in range(6)))


@pytest.mark.parametrize("what", ["no pair", "expired", "not yet valid", "garbage", "gone", "readable by all"])
def test_an_unusable_certificate_changes_nothing_and_is_counted(daemon, authority, tmp_path, what):
    running = daemon(*settings(authority))
    before = served(running, authority)
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    if what == "no pair":
        certificate.write_bytes(authority.issue("other").certificate.read_bytes())
    elif what == "expired":
        authority.issue("server", begins=-2 * DAY, ends=-HOUR)
    elif what == "not yet valid":
        authority.issue("server", begins=HOUR)
    elif what == "garbage":
        certificate.write_text("-----BEGIN CERTIFICATE-----\nnonsense")
    elif what == "gone":
        key.unlink()
    else:
        key.chmod(0o604)
        running.signal(signal.SIGHUP)  # a change of mode does not change the content
    failures = "plainsong_tls_reload_failures_total"
    eventually("it is counted", lambda: gauge(running, authority, failures) == 1)
    assert served(running, authority) == before
    (found,) = needed(running, authority)
    assert (found["severity"], found["subject"]) == ("warning", "tls.certificate")
    assert "the previous certificate stays in force" in found["text"]
    running.wait_for_line("the certificate could not be reloaded")
    authority.issue("server")
    eventually("a valid one is served", lambda: served(running, authority) != before)
    assert gauge(running, authority, failures) == 1
    assert needed(running, authority) == []


def needed(running: Daemon, authority: Authority) -> list[dict[str, Any]]:
    """Return the findings about failed reloads."""
    found = json.loads(ask(running, authority.trusting(), "GET", "/v1/attention")[1])
    return [each for each in found if each["kind"] == "reload"]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("no key", "TLS needs tls.key"),
        ("no pair", "tls.key: "),
        ("mode", "can be read by all users"),
        ("writable", "can be written"),
        ("expired", "which is not now"),
        ("missing", "No such file"),
        ("authority", "tls.client_ca: "),
        ("demand", "TLS needs tls.client_ca"),
    ],
)
def test_a_daemon_whose_certificate_cannot_be_used_does_not_start(authority, tmp_path, what, error):
    given = settings(authority)
    if what == "no key":
        given = given[:1]
    elif what == "no pair":
        given[1] = f"tls.key={authority.issue('other').key}"
    elif what in ("mode", "writable"):
        (tmp_path / "server.key").chmod(0o604 if what == "mode" else 0o620)
    elif what == "expired":
        authority.issue("server", begins=-2 * DAY, ends=-HOUR)
    elif what == "missing":
        (tmp_path / "server.pem").unlink()
    elif what == "authority":
        given.append(f"tls.client_ca={tmp_path}/none.pem")
    else:
        given.append("tls.client_certificates=required")
    ended = serve(tmp_path / "data", *given)
    assert (ended.returncode, error in ended.stderr) == (Exit.USAGE, True), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert not (tmp_path / "data").exists()


def serve(data_dir: Path, *sets: str) -> subprocess.CompletedProcess[str]:
    given = [word for each in sets for word in ("--set", each)]
    return run_plainsong("serve", "--bind", "127.0.0.1:0", "--data-dir", data_dir, *given, timeout_s=PATIENCE_S)
