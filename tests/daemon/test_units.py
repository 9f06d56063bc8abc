"""The systemd units: their sandbox's score, and a daemon that runs inside it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plainsong import Client, errors
from tests.certificates import Authority
from tests.daemon.harness import PLAINSONG, ROOT, Daemon, eventually
from tests.daemon.talk import metric
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

DAEMONS = ("etc/plainsong.service", "etc/cluster/plainsong@.service")
UNITS = (*DAEMONS, "etc/plainsong-on@.service")
#: On systemd-analyze's scale from 0 (completely isolated) to 10 (everything allowed).
MOST_EXPOSED = 1.5

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="NOT TESTED: systemd-analyze is not installed here; etc/tools fetches it",
)
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="NOT TESTED: strace is not installed here")


def directives(*files: str) -> Iterator[tuple[str, str]]:
    for file in files:
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                yield name, value


def analyzed(*arguments: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.stdout + done.stderr


@needs_analyze
@pytest.mark.parametrize("unit", DAEMONS)
def test_the_sandbox_of_a_daemon_leaves_little_open(unit):
    said = analyzed("security", "--offline=true", str(ROOT / unit))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+) OK", said)
    assert found is not None, said
    assert float(found[1]) <= MOST_EXPOSED


@needs_analyze
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_every_line_of_a_unit(unit, tmp_path):
    text = (ROOT / unit).read_text(encoding="utf-8").replace("/opt/plainsong/.venv/bin/plainsong", str(PLAINSONG))
    copy = tmp_path / Path(unit).name
    copy.write_text(text.replace("file:/opt/plainsong/docs/commands.md", f"file:{ROOT}/docs/commands.md"))
    said = analyzed("verify", "--man=no", "--recursive-errors=no", str(copy))
    assert [line for line in said.splitlines() if copy.name.split(".")[0].rstrip("@") in line] == []


@needs_analyze
def test_systemd_reports_a_line_that_it_does_not_understand(tmp_path):
    broken = tmp_path / "plainsong.service"
    broken.write_text((ROOT / DAEMONS[0]).read_text().replace("PrivateUsers=", "PrivateUser="))
    assert "PrivateUser" in analyzed("verify", "--man=no", "--recursive-errors=no", str(broken))


def allowed_calls() -> set[str]:
    """Return the system calls that the unit allows."""
    allowed: set[str] = set()
    for name, value in directives(DAEMONS[0]):
        if name == "SystemCallFilter":
            listed = {call for each in value.lstrip("~").split() for call in calls_of(each)}
            allowed = allowed - listed if value.startswith("~") else allowed | listed
    return allowed | calls_of("@default")  # systemd always allows these


def calls_of(name: str) -> set[str]:
    if not name.startswith("@"):
        return {name}
    lines = [line.strip() for line in analyzed("syscall-filter", name).splitlines()]
    return {call for line in lines[1:] if line and line[0] != "#" for call in calls_of(line)}


@needs_analyze
@needs_strace
def test_a_daemon_makes_no_system_call_that_its_unit_refuses(tmp_path):
    trace = tmp_path / "trace"
    wrapper = ["strace", "-D", "-f", "-qq", "-c", "-o", str(trace)]
    # As in the unit, where the limit on open files need not be raised.
    settings = ("http.processes=2", "http.max_connections=100")
    with Daemon(tmp_path / "data", *settings, wrapper=wrapper) as daemon:
        with Client("http://{}:{}".format(*daemon.address)) as client:
            client.create_topic("orders")
            with client.transaction():
                client.publish("orders", [b"one", b"two"])
            assert [message.payload for message in client.read("orders")] == [b"one", b"two"]
        assert metric(daemon.address, "plainsong_low_space") == 0
        daemon.stop()
    eventually("strace has counted", lambda: trace.exists() and trace.read_text().endswith(" total\n"))
    made = set(re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +\d+ +(?:\d+ +)?(\w+)$", trace.read_text(), re.MULTILINE)) - {
        "total"
    }
    assert {"fsync", "fdatasync"} & made
    assert made - allowed_calls() == set()


#: From linux/prctl.h. After this call writable memory cannot become executable, even in children and after exec.
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
WITHOUT_CODE_FROM_DATA = (
    "import ctypes, os, sys\n"
    f"if ctypes.CDLL(None, use_errno=True).prctl({PR_SET_MDWE}, {REFUSE_EXEC_GAIN}, 0, 0, 0): sys.exit('no prctl')\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def test_a_daemon_needs_no_memory_that_is_both_written_and_run(tmp_path):
    wrapper = [sys.executable, "-c", WITHOUT_CODE_FROM_DATA]
    needs_it = "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)"
    refused = subprocess.run([*wrapper, sys.executable, "-c", needs_it], capture_output=True, text=True, check=False)
    if "no prctl" in refused.stderr:
        pytest.skip("NOT TESTED: this kernel cannot refuse it")
    assert "PermissionError" in refused.stderr
    assert ("MemoryDenyWriteExecute", "yes") in set(directives(DAEMONS[0]))
    pair = Authority(tmp_path).issue("server", "localhost")
    settings = (f"tls.certificate={pair.certificate}", f"tls.key={pair.key}")
    with Daemon(tmp_path / "data", *settings, wrapper=wrapper) as daemon:
        url = f"https://localhost:{daemon.address[1]}"
        with Client(url, ca_file=str(tmp_path / "authority.pem")) as client:
            client.create_topic("orders")
            client.publish("orders", b"one")
            assert [message.payload for message in client.read("orders")] == [b"one"]


def test_the_secured_drop_in_starts_a_daemon_with_names_grants_and_tls_from_its_credentials(tmp_path):
    """The daemon has the drop-in's settings, and its files as under systemd: mode 0400, in their own directory."""
    given, etc = tmp_path / "credentials", tmp_path / "etc"
    given.mkdir(mode=0o700)
    etc.mkdir()
    pair = Authority(tmp_path).issue("server", "localhost")
    made = subprocess.run(
        [PLAINSONG, "token", "create", "--file", etc / "tokens.json", "--name", "operator", "--expires", "1d"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sources = {"tls.pem": pair.certificate, "tls.key": pair.key, "tokens.json": etc / "tokens.json"}
    dropped = list(directives("etc/plainsong-secured.conf"))
    for name, value in dropped:
        if name == "LoadCredential":
            credential, _, source = value.partition(":")
            assert source == f"/etc/plainsong/{credential}"
            shutil.copy(sources[credential], given / credential)
            (given / credential).chmod(0o400)
    (etc / "grants.toml").write_text(
        'format = 1\n[[grant]]\nto = ["operator"]\nverbs = ["all"]\non = ["*:*", "service"]\n'
    )
    environ = dict(value.split("=", 1) for name, value in dropped if name == "Environment")
    assert environ.pop("PLAINSONG_HTTP__BIND") == "0.0.0.0:7420"
    environ = {
        name: value.replace("%d", str(given)).replace("/etc/plainsong", str(etc)) for name, value in environ.items()
    }
    with Daemon(tmp_path / "data", bind="0.0.0.0:0", environ=environ) as daemon:
        url, authority = f"https://localhost:{daemon.address[1]}", str(tmp_path / "authority.pem")
        with Client(url, ca_file=authority) as stranger, pytest.raises(errors.Unauthenticated):
            stranger.create_topic("orders")
        with Client(url, token=made.stdout.strip(), ca_file=authority) as client:
            client.create_topic("orders")
            client.publish("orders", b"one")
            assert [message.payload for message in client.read("orders")] == [b"one"]
