"""The verb `definitions`: an export recreates everything at another daemon, in both formats, and loses nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.cli.conftest import url_of
from tests.daemon.harness import Daemon


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with every property, at its default and otherwise, in several namespaces."""
    with Daemon(tmp_path / "source") as daemon:
        with Client(url_of(daemon), namespace="shop") as client:
            client.create_topic("plain")
            client.create_topic(
                "orders", ttl_s=3600, max_bytes=1 << 30, transactional="required", deduplication="disabled"
            )
            client.create_topic("gone")
            client.admin.delete_topic("gone")
            client.admin.namespaces.set("shop", deduplication="enabled")
        with Client(url_of(daemon), namespace="empty_of_topics") as client:
            client.admin.namespaces.set("empty_of_topics", deduplication="disabled")
        with Client(url_of(daemon), namespace="another_one") as client:
            client.create_topic("a_b", transactional="disabled", deduplication="enabled")
        yield daemon


@pytest.mark.parametrize("name", ["defs.toml", "defs.json"])
def test_an_export_of_one_daemon_is_imported_by_another_and_exported_again(alone, filled, tmp_path, name):
    first, second = tmp_path / name, tmp_path / f"again-{name}"
    alone("definitions", "export", str(first), "--url", url_of(filled), code=0)
    with Daemon(tmp_path / "target") as target:
        url = url_of(target)
        done = alone("definitions", "import", str(first), "--url", url, "--json", code=0).json
        assert done["created"] == [
            "namespaces/empty_of_topics", "namespaces/shop",
            "topics/another_one:a_b", "topics/shop:orders", "topics/shop:plain",
        ]  # fmt: skip
        alone("definitions", "export", str(second), "--url", url, code=0)
        assert second.read_bytes() == first.read_bytes()
        again = alone("definitions", "import", str(first), "--url", url, "--json", code=0).json
        assert (again["created"], again["changed"], again["deleted"]) == ([], [], [])
        assert again["unchanged"] == done["created"]
        for namespace, topic in (("shop", "orders"), ("shop", "plain"), ("another_one", "a_b")):
            found = []
            for place in (url_of(filled), url):
                with Client(place, namespace=namespace) as client:
                    found.append(
                        {name: said for name, said in client.admin.properties(topic).items() if name != "generation"}
                    )
            assert found[0] == found[1]


def test_both_forms_are_equivalent(alone, filled, tmp_path):
    for name in ("defs.toml", "defs.json"):
        alone("definitions", "export", str(tmp_path / name), "--url", url_of(filled), code=0)
    assert tomllib.loads((tmp_path / "defs.toml").read_text()) | {"pins": {}} == json.loads(
        (tmp_path / "defs.json").read_text()
    )


def test_topics_of_the_system_are_never_exported(alone, tmp_path):
    """The daemon makes its own, and never accepts them from a file."""
    grants = tmp_path / "grants.toml"
    grants.write_text(
        'format = 1\n[[grant]]\nto = ["operator"]\nverbs = ["all"]\non = ["*:*", "system:*", "service"]\n'
    )
    made = ["token", "create", "--file", str(tmp_path / "tokens.json"), "--name", "operator", "--expires", "1d"]
    token = tmp_path / "token"
    token.write_text(alone(*made, code=0).out)
    token.chmod(0o600)
    settings = (
        "security.authentication=required",
        f"security.tokens_file={tmp_path / 'tokens.json'}",
        f"security.grants_file={grants}",
    )
    with Daemon(tmp_path / "data", *settings) as daemon:
        where = ("--url", url_of(daemon), "--token-file", str(token))
        alone("topic", "create", "orders", *where, code=0)
        audited = alone("topic", "list", *where, "--namespace", "system", code=0).out
        assert "audit" in audited
        file = tmp_path / "defs.toml"
        alone("definitions", "export", str(file), *where, code=0)
        assert list(tomllib.loads(file.read_text())["topics"]) == ["default:orders"]
        alone("definitions", "import", str(file), *where, code=0)


def test_a_file_that_begins_with_a_byte_order_mark_is_read(cli, tmp_path):
    (tmp_path / "topics.toml").write_bytes(b"\xef\xbb\xbf[topics.marked]\nttl = 60\n")
    cli("definitions", "import", str(tmp_path / "topics.toml"))
    assert "marked" in cli("topic", "list").out


def test_settings_that_begin_with_a_byte_order_mark_are_read(alone, tmp_path):
    (tmp_path / "plainsong.toml").write_bytes(b'\xef\xbb\xbf[http]\nbind = "127.0.0.1:7421"\n')
    alone("config", "check", "--config", str(tmp_path / "plainsong.toml"), code=0)
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbfpsg_token\n")
    said = alone("topic", "list", "--url", "http://127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    assert said.code == Exit.UNAVAILABLE  # and not a complaint about the token's first bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[topics.a]\nttl = 1979-05-27\n", "ttl"),
        ("[topics.a]\nttl = inf\n", "ttl"),
        ("[topics.a]\nttl = 0x" + "f" * 6000, "ttl"),
        ("[topics.a]\nttl" + ".a" * 5000 + " = 1\n", "ttl"),
        ("[namespaces.shop]\ndeduplication = 1979-05-27\n", "unsupported type"),
        ("[namespaces.shop]\ndeduplication = 0x" + "f" * 6000, "unsupported type"),
        ("[namespaces.shop]\ndeduplication" + ".a" * 5000 + " = 1\n", "unsupported type"),
        ("[pins]\na = 07:32:00\n", "unsupported type"),
        ('{"topics": ' + "[" * 100_000 + "]" * 100_000 + "}", "neither TOML nor JSON"),
        ("x = " + "[" * 100_000 + "]" * 100_000, "neither TOML nor JSON"),
        ('[topics.a]\nttl = 60\n[topics."twice:a"]\nttl = 90\n', "topic twice:a twice"),
        ('[pins]\na = "x"\n"twice:a" = "y"\n', "pin twice:a twice"),
    ],
    ids=lambda value: value[:40],
)
def test_a_file_that_no_request_can_carry_is_refused_in_words_and_changes_nothing(cli, tmp_path, text, words):
    file = tmp_path / "definitions"
    file.write_text(text)
    said = cli("definitions", "import", str(file), "--namespace", "twice", code=Exit.USAGE)
    assert words in said.err
    assert "Traceback" not in said.err
    assert cli("topic", "list", "--namespace", "twice", "--json").json == []
