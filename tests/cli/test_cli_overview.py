"""What the daemon says about many topics, what needs attention, and what a change would do, from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plainsong import Client
from tests.cli.conftest import Said

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli) -> Iterator[Client]:
    """A client in the namespace of the command line, with topics of one, three and no messages."""
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
    assert client.overview(namespace=client.namespace, sort="messages", descending=True, limit=1)["total"] == 3


def test_deleted_topics_are_listed_until_they_come_back(cli: Cli, client: Client):
    assert cli("topic", "list", "--deleted", "--json", code=0).json == []
    client.delete_topic("a")
    (line,) = cli("topic", "list", "--deleted", code=0).lines[1:]
    assert line.split()[0] == "a"
    (found,) = client.deleted_topics()
    assert (found["name"], found["messages"], found["state"]) == ("a", 3, "kept")
    cli("topic", "undelete", "a", code=0)
    assert client.deleted_topics() == []
    cli("topic", "list", "--deleted", "--long", code=2)


def test_a_dry_run_says_what_would_happen_and_changes_nothing(cli: Cli, client: Client):
    said = cli("topic", "delete", "a", "--dry-run", code=0)
    assert "removes 3 messages" in said.out
    assert "can be restored until" in said.out
    said = cli("topic", "set", "a", "ttl=1h", "max_bytes=1MiB", "--dry-run", code=0)
    assert "ttl: 7d -> 1h" in said.out
    assert "max_bytes: unset -> 1MiB" in said.out
    told = cli("topic", "set", "a", "ttl=1h", "--dry-run", "--json", code=0).json
    assert (told["dryRun"], told["changed"]) == (True, ["ttl"])
    assert client.properties("a")["ttl"] == "604800"
    assert len(client.poll("a")) == 3
    begun = client.transactions.begin()
    client.publish("a", b"y", transaction=begun)
    said = cli("tx", "abort", str(begun.id), "--dry-run", code=0)
    assert "removes 1 message of" in said.out
    assert client.transactions.get(begun.id).state == "in_progress"
    client.transactions.abort(begun)
    assert "is aborted" in cli("tx", "invalidate", str(begun.id), "--dry-run", code=1).err


def test_nothing_needs_attention_where_all_is_well(cli: Cli, client: Client):
    said = cli("attention", code=0)
    assert said.out == "nothing needs attention\n" or said.lines[0].split()[0] == "SEVERITY"
    assert cli("attention", "--json", code=0).json == client.attention()


def test_messages_are_looked_at_from_the_newest_by_a_text_and_one_at_a_time(client: Client):
    client.publish("c", [b"an order", b"else", b"order 2"])
    assert [each.payload for each in client.messages("c", newest_first=True, limit=1)] == [b"order 2"]
    found = client.messages("c", containing="order", payload_bytes=2)
    assert [(each.payload, each.size) for each in found] == [(b"an", 8), (b"or", 7)]
    assert client.message("c", found[0].id).payload == b"an order"
    assert sum(client.history("c")["published"]) == 3
