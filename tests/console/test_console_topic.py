"""A topic's page: figures, who holds it, readers, properties, deletion."""

from __future__ import annotations

import pytest

from plainsong import Client
from plainsong.errors import TopicNotFound
from tests.console.screen import Screen


def publish(client: Client, topic: str, *payloads: bytes, **more) -> None:
    client.publish(topic, list(payloads), **more)


def test_a_topic_shows_its_figures(screen: Screen, client: Client, ns: str):
    client.create_topic("t", ttl_s=3600)
    publish(client, "t", *[b"x" * 100] * 12)
    screen.open(f"/console/topics/{ns}/t", "stat-messages")
    assert screen.one("topic-name").text == f"{ns}:t"
    screen.says("stat-messages", "12")
    screen.says("stat-generation", "1")
    assert "KiB" in screen.one("stat-bytes").text
    assert screen.browser.title == f"{ns}:t · Plainsong"


def test_a_topic_that_is_not_there_says_so_with_its_request(screen: Screen, ns: str):
    screen.open(f"/console/topics/{ns}/none")
    said = screen.says("error", "does not exist")
    assert "create it" in said
    assert "request" in said


def test_figures_follow_what_is_published_without_moving_anything(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    publish(client, "t", *[b"%d" % n for n in range(40)])
    screen.open(f"/console/topics/{ns}/t", "message-row")
    rows = screen.rows()
    screen.click("message-row", id=rows[30])
    screen.one("copy-id")
    screen.run("window.scrollTo(0, 500)")
    screen.run("arguments[0].focus()", screen.one("jump"))
    at = screen.run("return scrollY")
    publish(client, "t", b"more")
    screen.says("stat-messages", "41")
    assert screen.rows() == rows
    assert screen.run("return scrollY") == at
    assert screen.focused("data-testid") == "jump"
    assert screen.one("copy-id").is_displayed()


def test_a_held_topic_says_who_holds_it_since_when_and_how_much_and_leads_there(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    transaction = client.transactions.begin(client_id="checkout-7", timeout_s=300)
    publish(client, "t", b"in it", b"in it too", transaction=transaction)
    publish(client, "t", b"behind it")
    screen.open(f"/console/topics/{ns}/t")
    said = screen.says("held-banner", "checkout-7", "3 messages hidden")
    assert "since" in said
    screen.click("held-open")
    screen.one("tx-row", id=str(transaction.id))
    assert screen.path == f"/console/transactions?open={transaction.id}"
    client.transactions.abort(transaction)
    screen.browser.back()
    screen.one("stat-messages")
    screen.gone("held-banner")


def test_readers_show_what_is_to_come_what_is_hidden_and_when_they_were_seen(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    publish(client, "t", *[b"%d" % n for n in range(10)])
    client.set_reader("t", "billing", client.position_of_last("t", 4))
    transaction = client.transactions.begin(client_id="slow", timeout_s=300)
    publish(client, "t", b"held", transaction=transaction)
    publish(client, "t", b"behind")
    screen.open(f"/console/topics/{ns}/t", "reader-row")
    screen.until(
        "what is before it",
        lambda: screen.one("reader-row", reader="billing").text.split()[:3] == ["billing", "4", "2"],
    )
    client.transactions.abort(transaction)


def test_a_change_of_properties_is_previewed_with_what_it_hides_and_then_applied(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t", ttl_s=3600, max_bytes=1 << 20)
    publish(client, "t", b"a", b"b")
    screen.open(f"/console/topics/{ns}/t", "property-ttl")
    assert not screen.one("preview").is_enabled()
    screen.type("property-ttl", "7200")
    screen.choose("property-transactional", "required")
    screen.click("preview")
    screen.says("preview-effect", "ttl", "transactional")
    assert client.properties("t")["ttl"] == "3600"
    screen.click("apply")
    screen.says("toast", "changed")
    after = client.properties("t")
    assert (after["ttl"], after["transactional"], after["max_bytes"]) == ("7200", "required", str(1 << 20))


def test_what_was_changed_by_somebody_else_meanwhile_is_not_overwritten(screen: Screen, client: Client, ns: str):
    client.create_topic("t", ttl_s=3600)
    screen.open(f"/console/topics/{ns}/t", "property-ttl")
    screen.type("property-ttl", "7200")
    screen.click("preview")
    screen.one("apply")
    client.set_properties("t", ttl_s=60)
    screen.click("apply")
    screen.says("error", "changed")
    assert client.properties("t")["ttl"] == "60"


def test_a_property_that_is_not_allowed_is_said_with_its_hint(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    screen.open(f"/console/topics/{ns}/t", "property-ttl")
    screen.type("property-ttl", "0")
    screen.click("preview")
    screen.says("error", "ttl")


def test_a_topic_is_deleted_only_after_its_name_was_typed(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    publish(client, "orders", b"a", b"b", b"c")
    screen.open(f"/console/topics/{ns}/orders", "message-row")
    screen.click("topic-delete")
    screen.says("confirm-text", "3 messages", "removed")
    assert not screen.one("confirm").is_enabled()
    screen.type("confirm-name", "order")
    assert not screen.one("confirm").is_enabled()
    screen.type("confirm-name", "orders")
    screen.click("confirm")
    screen.says("toast", "deleted")
    assert screen.path == "/console"
    with pytest.raises(TopicNotFound):
        client.properties("orders")


def test_a_deletion_that_is_called_off_deletes_nothing(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    screen.open(f"/console/topics/{ns}/orders", "messages-empty")
    screen.click("topic-delete")
    screen.click("cancel")
    screen.gone("confirm")
    assert client.properties("orders")


def test_producers_are_listed_and_forgotten(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    with client.producer("t", "importer/1") as producer:
        producer.publish([b"a", b"b"])
    screen.open(f"/console/producers/{ns}/t")
    screen.says("producer-row", "importer/1", producer="importer/1")
    screen.click("producer-delete")
    screen.says("confirm-text", "taken as new")
    screen.click("confirm")
    screen.one("producers-empty")
    assert client.producers("t")["producers"] == []
