"""The command line over TLS, by options, variables and contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from plainsong.cli.command import Exit
from tests.certificates import Authority
from tests.daemon.harness import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a daemon that requires client certificates, and the files that give access."""
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory)
    server, client = authority.issue("server"), authority.issue("client")
    values = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
    sets = [f"tls.{name}={path}" for name, path in values.items()]
    with Daemon(directory / "data", *sets, "tls.client_certificates=required") as daemon:
        files = {"ca_file": authority.file, "certificate": client.certificate, "key": client.key}
        yield f"https://127.0.0.1:{daemon.address[1]}", {name: str(file) for name, file in files.items()}


def test_options_variables_and_contexts_name_the_files(alone, guarded, monkeypatch):
    url, files = guarded
    options = [word for name, file in files.items() for word in (f"--{name.replace('_', '-')}", file)]
    alone("topic", "create", "t", "--url", url, *options, code=0)
    alone("--url", url, *options, "publish", "t", "hello", code=0)
    alone("doctor", "--ready", "--url", url, *options, code=0)
    for name, file in {"url": url, **files}.items():
        monkeypatch.setenv(f"PLAINSONG_{name.upper()}", file)
    assert "hello" in alone("poll", "t", code=0).out
    for name in ("url", *files):
        monkeypatch.delenv(f"PLAINSONG_{name.upper()}")
    alone("context", "add", "guarded", "--url", url, *options, code=0)
    assert "hello" in alone("poll", "t", code=0).out
    shown = alone("context", "show", "--json", code=0).json
    assert (shown["caFile"], shown["certificate"], shown["key"]) == tuple(files.values())
    assert files["key"] in alone("context", "show", code=0).out
    assert alone("poll", "t", "--url", url).code == Exit.UNAVAILABLE  # a context's files are only for its own daemons


def test_a_certificate_needs_its_key(alone, guarded):
    url, files = guarded
    for option in ("certificate", "key"):
        said = alone("topic", "list", "--url", url, f"--{option}", files[option])
        assert (said.code, "a certificate needs its key" in said.err) == (Exit.USAGE, True)


def test_a_token_is_sent_unencrypted_to_another_machine_only_on_request(alone, tmp_path):
    file = tmp_path / "token"
    file.write_text("psg_secret")
    where = ("--url", "http://192.0.2.1:7420", "--token-file", str(file), "--timeout", "0.2s")
    said = alone("topic", "list", *where)
    assert (said.code, "--insecure" in said.err, "psg_secret" in said.err) == (Exit.USAGE, True, False)
    said = alone("topic", "list", *where, "--insecure")
    assert said.code == Exit.UNAVAILABLE


def test_a_certificate_that_is_not_trusted_is_named(alone, guarded):
    url, files = guarded
    said = alone("topic", "list", "--url", url, "--certificate", files["certificate"], "--key", files["key"])
    assert said.code == Exit.UNAVAILABLE
    assert "its certificate is not trusted: " in said.err
    assert "--ca-file" in said.err
