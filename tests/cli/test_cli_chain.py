"""`plainsong topic head` and `plainsong topic verify`."""

from __future__ import annotations

import json

import pytest

from plainsong.cli.command import Exit


@pytest.fixture
def ledger(cli):
    """A chained topic with two messages."""
    cli("topic", "create", "ledger", "chain=sha256")
    cli("publish", "ledger", "in 100", "out 30")


def test_the_chain_property_is_shown_and_can_be_set_back(cli, ledger):
    assert "chain          sha256" in cli("topic", "show", "ledger").out
    cli("topic", "create", "ledger", "chain=sha256", "--if-not-exists")
    cli("topic", "set", "ledger", "ttl=1h")
    assert "chain          sha256" in cli("topic", "show", "ledger").out
    cli("topic", "set", "ledger", "chain=none")
    assert "chain" not in cli("topic", "show", "ledger").out
    cli("topic", "create", "ledger", "ttl=1h", "chain=none", "--if-not-exists")


def test_a_head_is_shown_and_a_kept_one_verifies_the_topic(cli, ledger, home):
    shown = cli("topic", "head", "ledger", "--json")
    head = shown.json
    assert (head["generation"], head["signature"]) == (1, None)
    (home / "ledger.head").write_text(shown.out)
    assert head["hash"] in cli("topic", "head", "ledger").out
    cli("publish", "ledger", "later")
    said = cli("topic", "verify", "ledger", "--known", "ledger.head")
    assert said.lines[0].startswith("verified 3 messages of ledger in ")
    assert "the earlier head is part of the chain" in said.out
    found = cli("topic", "verify", "ledger", "--known", "ledger.head", "--json").json
    assert (found["good"], found["messages"], found["known"], found["faults"]) == (True, 3, "found", [])


def test_a_topic_that_does_not_match_a_head_exits_with_1_and_names_the_fault(cli, ledger, home):
    head = cli("topic", "head", "ledger", "--json").json
    (home / "other.head").write_text(json.dumps({**head, "count": head["count"] + 7}))
    said = cli("topic", "verify", "ledger", "--known", "other.head", code=Exit.FAILED)
    assert f"{head['id']}  cut-off: " in said.out
    assert f"the first at {head['id']}" in said.err
    found = cli("topic", "verify", "ledger", "--known", "other.head", "--json", code=Exit.FAILED)
    told = json.loads(found.out.splitlines()[0])
    assert (told["good"], [each["kind"] for each in told["faults"]]) == (False, ["cut-off"])


def test_an_invalid_head_is_refused(cli, ledger, home):
    (home / "no.head").write_text("{}")
    assert "not the head of a chain" in cli("topic", "verify", "ledger", "--known", "no.head", code=Exit.USAGE).err
    assert "cannot read" in cli("topic", "verify", "ledger", "--known", "nowhere", code=Exit.USAGE).err


def test_a_topic_without_a_chain_is_not_verified(cli):
    cli("topic", "create", "plain")
    assert "not chained" in cli("topic", "verify", "plain", code=Exit.NOT_FOUND).err
    assert "not chained" in cli("topic", "head", "plain", code=Exit.NOT_FOUND).err
