"""Every method of the original programmatic API has a counterpart in both clients."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import plainsong
from plainsong import AsyncClient, Client

NAMES = (Path(__file__).parents[2] / "docs" / "names.md").read_text(encoding="utf-8")
TABLE = NAMES.partition("## The original service's methods and the client's")[2].partition("\n## ")[0]
CALLS = re.findall(r"`client\.([\w.]+)\(([^`]*?)\)`", TABLE)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_call_that_is_listed_can_be_made(kind: type, name: str, arguments: str):
    client = kind("http://127.0.0.1:1")
    method = client
    for part in name.partition("(")[0].split("."):
        method = getattr(method, part)
    given = [argument.strip() for argument in arguments.partition(")")[0].split(",") if argument.strip(" …")]
    keywords = dict.fromkeys(each.partition("=")[0] for each in given if "=" in each)
    positional = [each for each in given if "=" not in each and not each.startswith("**")]
    inspect.signature(method).bind(*positional, **keywords)


def test_everything_that_can_be_done_with_a_topic_is_listed():
    assert len(re.findall(r"^\| `\w+\(topicId", TABLE, re.MULTILINE)) == 21
    assert {name for name, _ in CALLS} >= {
        "create_topic",
        "admin.replace_properties",
        "admin.delete_topic",
        "store",
        "rollback",
        "poll",
    }


def test_names_of_the_second_table_exist():
    names = ["TransactionAware", "TransactionContext", "LightweightTransaction"]
    for name in [*names, *(f"Async{name}" for name in names)]:
        kind = getattr(plainsong, name)
        row = next(
            line
            for line in TABLE.splitlines()
            if f"| `{name.removeprefix('Async')}`:" in line or line.startswith(f"| `{name.removeprefix('Async')}`")
        )
        for method in re.findall(r"`(\w+)`", row.split("|")[2]):
            assert method == name.removeprefix("Async") or hasattr(kind, method), method


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_method_of_a_topic_has_the_signature_and_help_of_the_client_method_without_the_topic(kind: type):
    topic = kind("http://127.0.0.1:1").topic("t")
    administration = type(kind("http://127.0.0.1:1").admin)
    for home, name in ((kind, "publish"), (kind, "read"), (kind, "producer"), (administration, "set_properties")):
        of_client, of_topic = getattr(home, name), getattr(topic, name)
        names = list(inspect.signature(of_client).parameters)
        assert list(inspect.signature(of_topic).parameters) == names[2:]
        assert names[:2] in (["self", "topic"], ["self", "topics"])
        assert inspect.getdoc(of_topic) == inspect.getdoc(of_client)


#: Names of version 0.1 that moved to ``client.admin``.
MOVED = [
    "overview",
    "deleted_topics",
    "attention",
    "events",
    "history",
    "properties",
    "set_properties",
    "replace_properties",
    "delete_topic",
    "undelete_topic",
    "set_aside",
    "chain_head",
    "verify_chain",
    "stats",
    "messages",
    "message",
    "readers",
    "reader",
    "set_reader",
    "delete_reader",
    "producers",
    "producer_state",
    "delete_producer",
]


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_name_that_moved_to_the_administration_warns_and_calls_it(kind: type, name: str, monkeypatch):
    client = kind("http://127.0.0.1:1")
    called = []
    monkeypatch.setattr(type(client.admin), name, lambda _, *arguments, **options: called.append((arguments, options)))
    with pytest.warns(DeprecationWarning, match=f"client.{name} is now client.admin.{name}"):
        getattr(client, name)("t", an_option=5)
    assert called == [(("t",), {"an_option": 5})]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_namespaces_moved_to_the_administration(kind: type):
    client = kind("http://127.0.0.1:1")
    with pytest.warns(DeprecationWarning, match="client.admin.namespaces"):
        assert type(client.namespaces) is type(client.admin.namespaces)
