"""The page of transactions: who is open, what they hide and hold, and ending them after a confirmation."""

from __future__ import annotations

from plainsong import Client
from tests.console.screen import Screen


def held(client: Client, name: str, *topics: str, hidden: int = 0):
    """An open transaction of a client of this name, with two messages in each topic, and others behind them."""
    transaction = client.transactions.begin(client_id=name, timeout_s=300)
    for topic in topics:
        client.publish(topic, [b"in it"] * 2, transaction=transaction)
        if hidden:
            client.publish(topic, [b"behind"] * hidden)
    return transaction


def test_nobody_is_held_up(screen: Screen, client: Client, ns: str):
    screen.open("/console/transactions?state=aborted")
    screen.open("/console/transactions?state=in_progress", "transactions-empty")


def test_an_open_transaction_says_whose_it_is_how_old_and_what_it_hides(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.create_topic("b")
    transaction = held(client, "checkout-7", "a", "b", hidden=5)
    screen.open("/console/transactions")
    said = screen.says("tx-row", "checkout-7", "open", f"{ns}:a", f"{ns}:b", id=str(transaction.id))
    assert str(transaction.id) in said
    assert (
        screen.one("tx-row", id=str(transaction.id)).find_element("css selector", "[data-testid=tx-hidden]").text == "7"
    )
    assert screen.one("timeline")
    assert screen.one("tx-bar", id=str(transaction.id))
    client.transactions.abort(transaction)
    screen.gone("tx-row", id=str(transaction.id))


def test_it_says_which_readers_it_holds(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.publish("a", [b"before"])
    client.set_reader("a", "billing", client.messages("a")[0].id)
    transaction = held(client, "slow", "a", hidden=3)
    screen.open(f"/console/transactions?open={transaction.id}")
    screen.says("tx-holds", f"{ns}:a", "billing", "5 messages hidden")
    client.transactions.abort(transaction)


def test_a_bar_of_the_timeline_opens_its_transaction(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    first, second = held(client, "first", "a"), held(client, "second", "a")
    screen.open("/console/transactions")
    screen.click("tx-bar", id=str(second.id))
    screen.one("tx-holds")
    assert screen.path == f"/console/transactions?open={second.id}"
    for each in (first, second):
        client.transactions.abort(each)


def test_an_abort_says_what_disappears_and_happens_after_its_confirmation(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "gone", "a", hidden=4)
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    screen.click("tx-abort")
    said = screen.says("confirm-text", "gone", f"{ns}:a")
    assert "disappear" in said
    screen.click("cancel")
    screen.gone("confirm")
    assert client.transactions.get(transaction.id).state == "in_progress"
    screen.click("tx-abort")
    screen.click("confirm")
    screen.says("toast", "rolled back")
    assert client.transactions.get(transaction.id).state == "aborted"
    assert len(client.poll("a", isolation="committed").messages) == 4


def test_an_invalidation_hides_for_ever(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "gone", "a")
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    screen.click("tx-invalidate")
    screen.says("confirm-text", "for ever")
    screen.click("confirm")
    screen.says("toast", "invalid")
    assert client.transactions.get(transaction.id).state == "invalid"
    screen.one("tx-row", id=str(transaction.id), state="invalid")


def test_a_transaction_that_was_decided_meanwhile_is_said_to_be(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "quick", "a")
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    screen.click("tx-abort")
    screen.one("confirm")
    client.transactions.commit(transaction)
    screen.click("confirm")
    screen.says("error", "commit")


def test_an_instance_that_is_alone_cannot_be_drained_and_says_why(screen: Screen):
    screen.open("/console/cluster", "instance-row")
    screen.says("instance-row", "alone", "64 of 64", "serving")
    drain = screen.one("drain")
    assert not drain.is_enabled()
    assert "alone" in str(drain.get_attribute("title"))
    assert not screen.one("pin").is_enabled()
    screen.says("stat-ready", "yes")
