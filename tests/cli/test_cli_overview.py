"""Listings of many topics, findings that need attention, and dry runs, from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plainsong import Client
from plainsong.cli import stats
from plainsong.cli.dry_run import effect_lines
from plainsong.cli.events import Changes
from tests.cli.conftest import Said
from tests.daemon.harness import eventually

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli) -> Iterator[Client]:
    """A client in the command line's namespace, with topics of one, three and no messages."""
    with Client.from_environment() as client:
        for topic, count in (("b", 1), ("a", 3), ("c", 0)):
            client.create_topic(topic)
            if count:
                client.publish(topic, [b"x"] * count)
        yield client


def test_topics_are_listed_in_the_order_of_a_column(cli: Cli, client: Client):
    said = cli("topic", "list", "--sort", "messages", code=0)
    assert said.lines[0].split() == ["TOPIC", "TTL", "MESSAGES", "SIZE", "OLDEST", "IN", "OUT", "HIDDEN"]
    assert [line.split()[0] for line in said.lines[1:]] == ["a", "b", "c"]
    found = cli("topic", "list", "--sort", "name", "[bc]", "--json", code=0).json
    assert [(each["name"], each["messages"]) for each in found] == [("b", 1), ("c", 0)]
    assert client.admin.overview(namespace=client.namespace, sort="messages", descending=True, limit=1)["total"] == 3


def test_deleted_topics_are_listed_until_they_are_restored(cli: Cli, client: Client):
    assert cli("topic", "list", "--deleted", "--json", code=0).json == []
    client.admin.delete_topic("a")
    (line,) = cli("topic", "list", "--deleted", code=0).lines[1:]
    assert line.split()[0] == "a"
    (found,) = client.admin.deleted_topics()
    assert (found["name"], found["messages"], found["state"]) == ("a", 3, "kept")
    cli("topic", "undelete", "a", code=0)
    assert client.admin.deleted_topics() == []
    cli("topic", "list", "--deleted", "--long", code=2)


def test_a_dry_run_reports_the_changes_and_makes_none(cli: Cli, client: Client):
    said = cli("topic", "delete", "a", "--dry-run", code=0)
    assert "removes 3 messages" in said.out
    assert "can be restored until" in said.out
    said = cli("topic", "set", "a", "ttl=1h", "max_bytes=1MiB", "--dry-run", code=0)
    assert "ttl: 7d -> 1h" in said.out
    assert "max_bytes: unset -> 1MiB" in said.out
    told = cli("topic", "set", "a", "ttl=1h", "--dry-run", "--json", code=0).json
    assert (told["dryRun"], told["changed"]) == (True, ["ttl"])
    assert client.admin.properties("a")["ttl"] == "604800"
    assert len(client.poll("a")) == 3
    begun = client.transactions.begin()
    client.publish("a", b"y", transaction=begun)
    said = cli("tx", "abort", str(begun.id), "--dry-run", code=0)
    assert "removes 1 message of" in said.out
    assert client.transactions.get(begun.id).state == "in_progress"
    client.transactions.abort(begun)
    assert "is aborted" in cli("tx", "invalidate", str(begun.id), "--dry-run", code=1).err


def test_a_change_reports_its_effect(cli: Cli, client: Client):
    assert "hid" not in cli("topic", "set", "a", "ttl=1h", code=0).out
    done = cli("topic", "delete", "a", "--yes", "--json", code=0).json
    assert (done["deleted"], done["dryRun"], done["effect"]["removes"]["messages"]) == ("a", False, 3)
    done = cli("topic", "undelete", "a", "--json", code=0).json
    assert (done["name"], done["messages"], done["effect"]["returns"]["messages"]) == ("a", 3, 3)
    assert "  removed 3 messages" in cli("topic", "delete", "a", "--yes", code=0).out


def test_clients_return_the_effect_of_their_changes(client: Client):
    assert client.admin.set_properties("a", ttl_s=3600)["changed"] == ["ttl"]
    assert client.admin.replace_properties("a")["after"]["ttl"] == "604800"
    begun = client.transactions.begin()
    client.publish("a", b"y", transaction=begun)
    done = client.transactions.end(begun)
    assert (done["state"], done["effect"]["topics"]) == (
        "aborted",
        [{"topic": f"{client.namespace}:a", "messages": 1}],
    )
    assert client.admin.delete_topic("a")["effect"]["removes"]["messages"] == 3 + 1
    assert client.admin.undelete_topic("a")["effect"]["returns"]["messages"] == 3 + 1


def test_a_healthy_service_needs_no_attention(cli: Cli, client: Client):
    said = cli("doctor", "--attention", code=0)
    assert said.out == "nothing needs attention\n" or said.lines[0].split()[0] == "SEVERITY"
    assert cli("doctor", "--attention", "--json", code=0).json == client.admin.attention()


def test_messages_are_shown_from_the_newest_by_a_text_and_one_at_a_time(client: Client):
    client.publish("c", [b"an order", b"else", b"order 2"])
    assert [each.payload for each in client.admin.messages("c", newest_first=True, limit=1)] == [b"order 2"]
    found = client.admin.messages("c", containing="order", payload_bytes=2)
    assert [(each.payload, each.size) for each in found] == [(b"an", 8), (b"or", 7)]
    assert client.admin.message("c", found[0].id).payload == b"an order"
    assert sum(client.admin.history("c")["published"]) == 3


def test_rows_are_set_aside_after_confirmation_and_peek_shows_it(
    cli: Cli, client: Client, caplog: pytest.LogCaptureFixture
):
    first, second, third = [str(each.id) for each in client.poll("a")]
    cli("topic", "set-aside", "a", first, second, code=2)  # without a terminal it cannot ask for confirmation
    said = cli("topic", "set-aside", "a", first, second, "--dry-run", code=0)
    assert "removes 2 messages" in said.out
    said = cli("topic", "set-aside", f"{client.namespace}:a", first, second, "--yes", code=0)
    assert said.out.startswith("set aside 2 rows, copied to set-aside/")
    assert [str(each.id) for each in client.poll("a")] == [third]
    shown = [(str(each.id), each.state, each.detail) for each in client.admin.messages("a")]
    assert shown == [(first, "set-aside", f"2 rows up to {second}"), (third, "plain", "")]
    assert "set-aside" in cli("peek", "a", code=0).out
    passed = "a: skipped 2 damaged rows that an operator has set aside"
    assert passed in cli("poll", "a", code=0).err
    cli("tail", "a", "--from", "oldest", "--limit", "1", code=0)
    assert passed in caplog.messages  # a warning, which goes to standard error
    cli("topic", "set-aside", "a", first, second, "--yes", code=4)


def test_events_print_what_appears_changes_and_ends():
    changes = Changes()

    def said(kind: str, data: object) -> list[str]:
        return list(changes.lines(kind, data))

    disk = {"kind": "disk", "severity": "warning", "subject": "a", "text": "nearly full", "sinceMs": None}
    assert said("attention", []) == ["nothing needs attention"]
    assert said("attention", [disk]) == ["disk a  warning: nearly full"]
    assert said("attention", [disk]) == []
    assert said("attention", [{**disk, "severity": "critical"}]) == ["disk a  critical: nearly full"]
    assert said("attention", []) == ["disk a  gone"]

    one = {"id": "7", "startedMs": 0, "clientId": "x\ny", "hiddenMessages": 0}
    assert said("transactions", {"open": [], "total": 0}) == ["no open transactions"]
    assert said("transactions", {"open": [one], "total": 1}) == ["7  open since 1970-01-01T00:00:00.000Z, of x y"]
    (line,) = said("transactions", {"open": [{**one, "hiddenMessages": 1}], "total": 1})
    assert line.endswith(", hides 1 message")
    assert said("transactions", {"open": [one] * 100, "total": 3000}) == ["all  3000 open transactions", "7  gone"]

    instance = {"name": "a", "leaving": False, "drained": False, "topicsOpen": 2}
    assert said("cluster", {"instances": [instance]}) == ["a  available, 2 open topics"]
    assert said("cluster", {"instances": [{**instance, "drained": True}]}) == ["a  drained, 2 open topics"]
    assert said("later", {"a": 1}) == ["{'a': 1}"]


def test_a_drain_is_previewed(cli: Cli):
    assert "single instance" in cli("cluster", "drain", "host-1", "--dry-run", code=1).err
    nothing = {"messages": 0, "bytes": 0, "estimated": False}
    effect = {"hides": nothing, "returns": nothing, "removes": nothing, "moves": {"topicsOpen": 3}}
    told = {"dryRun": True, "effect": effect, "warnings": ["no other instance would remain"]}
    assert effect_lines(told) == [
        "moves 3 open topics to other instances",
        "warning: no other instance would remain",
    ]


def test_top_shows_the_busiest_of_more_topics_than_it_can_show(cli: Cli, client: Client, monkeypatch):
    monkeypatch.setattr(stats, "MAX_TOPICS", 2)
    monkeypatch.setattr(stats, "MAX_PAGE", 1)
    for name, count in (("d", 7), ("e", 9)):
        client.create_topic(name)
        client.publish(name, [b"x"] * count)
    lines = cli("top", "--once", code=0).lines
    assert [line.split()[0] for line in lines[4:6]] == ["e", "d"]
    assert lines[-1] == "and 3 more"
    assert [each["topic"] for each in cli("top", "[b-d]", "--once", "--json").json["topics"]] == ["d", "b"]


def test_events_of_topics_show_their_figures(cli: Cli, client: Client):
    # Streams share the state read within the last second, which may predate the topics.
    lines = eventually(
        "the topics are listed",
        lambda: [each for each in cli("events", "a", "c", "--kind", "topics", "--limit", "1").lines if ":a  " in each],
    )
    assert f"topics        {client.namespace}:a  3 messages, 39 B" in lines[0]
    assert "--kind topics needs the names of topics" in cli("events", "--kind", "topics", code=2).err
    said = cli("events", "--kind", "attention", "--limit", "1", code=0).out
    # Other tests use the same disk and daemon.
    assert said.endswith("nothing needs attention\n") or "warning: " in said
    assert f"{client.namespace}:" not in said


def test_instances_whose_grants_differ_are_reported_without_a_terminal(cli: Cli, monkeypatch):
    """Programs run the command without a terminal."""
    common = {"address": "a:1", "leaving": False, "drained": False, "slices": 64, "weight": 100, "topicsOpen": 1}
    instances = [
        {"name": name, **common, "security": {"grants": digest, "tokens": "same"}} for name, digest in ("ax", "by")
    ]
    answer = {
        "instance": "a",
        "instances": instances,
        "zookeeper": None,
        "transactions": "a",
        "topic": None,
        "pins": {},
    }
    monkeypatch.setattr("plainsong.cli.cluster.run_call", lambda *_: answer)
    assert "warning: the grants of the instances differ" in cli("cluster", "status").err
    assert cli("cluster", "status", "--json").json == answer
