"""`poll` and `tail` as of a moment: exactly what had been committed by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.cli.conftest import Said

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli) -> Iterator[Client]:
    """A client in the namespace of the command line, with a topic."""
    with Client.from_environment() as client:
        client.create_topic("orders")
        yield client


@pytest.fixture
def moment_ms(client: Client) -> int:
    """Publish one message before the moment, one undecided at the moment, and one after it; return the moment."""
    undecided = client.transactions.begin(type="long")
    client.publish("orders", b"before")
    client.publish("orders", b"open", transaction=undecided)
    at_ms = client.poll("orders", isolation="uncommitted").messages[-1].id.publish_time_ms
    client.poll("orders", as_of=at_ms)  # after this, every publish and commit gets a later time
    client.transactions.commit(undecided)
    client.publish("orders", b"behind")
    return at_ms


def test_poll_as_of_a_moment_prints_what_was_committed_by_then(cli: Cli, moment_ms: int):
    assert cli("poll", "orders").lines == ["before", "open", "behind"]
    assert cli("poll", "orders", "--as-of", str(moment_ms)).lines == ["before"]
    assert cli("poll", "orders", "--as-of", str(moment_ms), "--until-empty", "--wait", "1h").lines == ["before"]
    assert cli("poll", "orders", "--as-of", str(moment_ms), "--last", "5").lines == ["before"]


def test_tail_as_of_a_moment_prints_what_was_committed_by_then_and_stops(cli: Cli, moment_ms: int):
    said = cli("tail", "orders", "--as-of", str(moment_ms))
    assert said.lines == ["before"]
    assert "following" not in said.err
    assert cli("tail", "orders", "--as-of", str(moment_ms), "--last", "1").lines == ["before"]
    assert cli("tail", "ord*", "--as-of", str(moment_ms)).lines == ["orders before"]


def test_a_duration_ago_and_a_date_are_moments(cli: Cli, moment_ms: int):
    assert cli("poll", "orders", "--as-of", "-52w").lines == []
    assert cli("poll", "orders", "--as-of", "2001-01-01T00:00Z").lines == []


@pytest.mark.parametrize("given", ["oldest", "now", "00" * 20, "yesterday"])
def test_an_invalid_moment_is_refused(cli: Cli, client: Client, given: str):
    said = cli("poll", "orders", "--as-of", given, code=Exit.USAGE)
    assert "invalid time" in said.err


def test_uncommitted_as_of_a_moment_is_a_contradiction(cli: Cli, client: Client):
    said = cli("poll", "orders", "--as-of", "-1m", "--isolation", "uncommitted", code=Exit.USAGE)
    assert "exclude each other" in said.err
