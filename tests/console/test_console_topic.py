"""A topic's page: figures, the transaction that blocks readers, readers, properties, deletion."""

from __future__ import annotations

from urllib.request import Request, urlopen

import pytest

from plainsong import Client
from plainsong.errors import TopicNotFound
from tests.console.screen import LATE, Screen
from tests.daemon.harness import Daemon


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


def test_a_missing_topic_is_reported_with_its_request(screen: Screen, ns: str):
    screen.open(f"/console/topics/{ns}/none")
    said = screen.says("error", "does not exist")
    assert "create it" in said
    assert "request" in said


def test_figures_follow_publishes_without_moving_anything(screen: Screen, client: Client, ns: str):
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


def test_a_held_topic_shows_its_transaction_age_and_hidden_count_with_a_link(screen: Screen, client: Client, ns: str):
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


def test_readers_show_unread_and_hidden_messages_and_when_they_were_last_seen(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    publish(client, "t", *[b"%d" % n for n in range(10)])
    client.admin.set_reader("t", "billing", client.position_of_last("t", 4))
    transaction = client.transactions.begin(client_id="slow", timeout_s=300)
    publish(client, "t", b"held", transaction=transaction)
    publish(client, "t", b"behind")
    screen.open(f"/console/topics/{ns}/t", "reader-row")
    screen.until(
        "what is before it",
        lambda: screen.one("reader-row", reader="billing").text.split()[:3] == ["billing", "4", "2"],
    )
    client.transactions.abort(transaction)


def test_a_typed_message_is_published_after_confirmation(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    screen.open(f"/console/topics/{ns}/t", "publish-text")
    assert not screen.one("publish").is_enabled()
    screen.type("publish-text", "gr\u00fcn <b>1</b>")
    screen.click("publish")
    screen.says("confirm-text", "One message of 14 B", "cannot be undone")
    assert client.poll("t").messages == []
    screen.click("confirm")
    screen.says("toast", f"Published one message to {ns}:t")
    assert [message.payload for message in client.poll("t")] == ["gr\u00fcn <b>1</b>".encode()]
    screen.says("message-payload", "gr\u00fcn <b>1</b>")
    assert screen.one("publish-text").get_attribute("value") == ""


def test_a_refused_message_is_not_shown_as_published(screen: Screen, client: Client, ns: str):
    client.create_topic("t", transactional="required")
    screen.open(f"/console/topics/{ns}/t", "publish-text")
    screen.type("publish-text", "x")
    screen.click("publish")
    screen.click("confirm")
    screen.says("error", "write pointer")
    screen.click("cancel")
    assert screen.one("publish-text").get_attribute("value") == "x"
    assert client.poll("t").messages == []


def test_a_change_of_properties_is_previewed_with_its_hidden_messages_and_then_applied(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t", ttl_s=3600, max_bytes=1 << 20)
    publish(client, "t", b"a", b"b")
    screen.open(f"/console/topics/{ns}/t", "property-ttl")
    assert not screen.one("preview").is_enabled()
    screen.type("property-ttl", "7200")
    screen.choose("property-transactional", "required")
    screen.click("preview")
    screen.says("preview-effect", "Changes transactional from optional to required, ttl from 3600 to 7200")
    assert client.admin.properties("t")["ttl"] == "3600"
    screen.click("apply")
    screen.says("toast", "changed")
    after = client.admin.properties("t")
    assert (after["ttl"], after["transactional"], after["max_bytes"]) == ("7200", "required", str(1 << 20))


def test_a_change_made_elsewhere_since_is_not_overwritten(screen: Screen, client: Client, ns: str):
    client.create_topic("t", ttl_s=3600)
    screen.open(f"/console/topics/{ns}/t", "property-ttl")
    screen.type("property-ttl", "7200")
    screen.click("preview")
    screen.one("apply")
    client.admin.set_properties("t", ttl_s=60)
    screen.click("apply")
    screen.says("error", "changed")
    assert client.admin.properties("t")["ttl"] == "60"


def test_the_preview_of_a_change_that_was_edited_since_is_discarded(screen: Screen, client: Client, ns: str):
    client.create_topic("t", ttl_s=3600)
    with screen.scripted(LATE):
        screen.open(f"/console/topics/{ns}/t", "property-ttl")
    screen.type("property-ttl", "7200")
    with screen.late("dryRun", lambda: screen.click("preview")):
        screen.type("property-ttl", "9000")
    assert not screen.all("apply")
    screen.click("preview")
    screen.says("preview-effect", "ttl from 3600 to 9000")
    screen.click("apply")
    screen.says("toast", "changed")
    assert client.admin.properties("t")["ttl"] == "9000"


def test_an_invalid_property_is_reported_with_its_hint(screen: Screen, client: Client, ns: str):
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
        client.admin.properties("orders")


def test_a_deletion_names_the_first_few_it_affects(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    publish(client, "orders", b"a")
    for number in range(5):
        client.admin.set_reader("orders", f"reader{number}", client.admin.messages("orders")[0].id)
    with client.producer("orders", "importer/1") as producer:
        producer.publish(b"b")
    transaction = client.transactions.begin(client_id="checkout-7", timeout_s=300)
    client.publish("orders", b"c", transaction=transaction)
    screen.open(f"/console/topics/{ns}/orders", "held-banner")
    screen.click("topic-delete")
    screen.says(
        "confirm-text",
        "5 readers (reader0, reader1, reader2 and 2 more)",
        "1 producer (importer/1)",
        "1 open transaction (checkout-7)",
    )
    screen.click("cancel")
    client.transactions.abort(transaction)


def test_a_cancelled_deletion_deletes_nothing(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    screen.open(f"/console/topics/{ns}/orders", "messages-empty")
    screen.click("topic-delete")
    screen.click("cancel")
    screen.gone("confirm")
    assert client.admin.properties("orders")


def test_producers_are_listed_and_forgotten(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    with client.producer("t", "importer/1") as producer:
        producer.publish([b"a", b"b"])
    screen.open(f"/console/producers/{ns}/t")
    screen.says("producer-row", "importer/1", producer="importer/1")
    screen.click("producer-delete")
    screen.says("confirm-text", "stored as new")
    screen.click("confirm")
    screen.one("producers-empty")
    assert client.admin.producers("t")["producers"] == []


# --- undeletion ------------------------------------------------------------------------------------


def test_a_deleted_topic_is_shown_as_deleted_and_undeleted_after_a_preview(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    publish(client, "orders", b"a", b"b", b"c")
    client.admin.delete_topic("orders")
    screen.open(f"/console/topics/{ns}/orders")
    screen.says("deleted-banner", "3 messages", "restored")
    assert not screen.all("stat-messages")
    screen.click("topic-undelete")
    screen.says("confirm-text", "3 messages", "reappear")
    assert client.admin.deleted_topics()
    screen.click("confirm")
    screen.says("toast", "was restored", "3 messages")
    screen.says("stat-messages", "3")
    screen.gone("deleted-banner")
    assert len(client.poll("orders").messages) == 3


def test_deleted_topics_are_listed_latest_first_and_undeleted_from_there(screen: Screen, client: Client, ns: str):
    for name in ("first", "second"):
        client.create_topic(name)
        publish(client, name, b"a")
        client.admin.delete_topic(name)
    screen.open("/console").says("topics-total")  # until the topics are there, the page may move
    screen.click("topics-deleted")
    assert screen.path == "/console?deleted=1"
    screen.type("topic-filter", f"{ns}:")
    screen.until("only its own", lambda: screen.one("topics-total").text == "2")
    assert [each.get_attribute("data-topic") for each in screen.all("deleted-row")] == [f"{ns}:second", f"{ns}:first"]
    screen.click_in("css selector", "[data-testid=topic-undelete]", "deleted-row", topic=f"{ns}:first")
    screen.says("confirm-text", "1 message")
    screen.click("confirm")
    screen.says("toast", "was restored")
    assert screen.path == f"/console/topics/{ns}/first"
    assert client.topics() == ["first"]


def test_only_the_previewed_generation_is_undeleted(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    publish(client, "orders", b"old")
    client.admin.delete_topic("orders")
    screen.open(f"/console/topics/{ns}/orders", "deleted-banner")
    screen.click("topic-undelete")
    screen.one("confirm")
    client.create_topic("orders")
    client.admin.delete_topic("orders")
    screen.click("confirm")
    screen.says("error", "changed since the preview")
    assert client.topics() == []


def test_the_effect_of_a_change_is_shown(screen: Screen, client: Client, ns: str):
    client.create_topic("orders")
    publish(client, "orders", b"a", b"b")
    screen.open(f"/console/topics/{ns}/orders", "message-row")
    screen.click("topic-delete")
    screen.type("confirm-name", "orders")
    screen.click("confirm")
    screen.says("toast", "was deleted", "2 messages", "removed")


# --- many readers ----------------------------------------------------------------------------------


def test_readers_beyond_a_page_are_reached_by_the_pager_which_is_in_the_address(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    publish(client, "t", b"a")
    first = client.admin.messages("t")[0].id
    for number in range(30):
        client.admin.set_reader("t", f"r{number:02}", first)
    screen.open(f"/console/topics/{ns}/t", "reader-row")
    assert screen.one("readers-total").text == "30"
    assert len(screen.all("reader-row")) == 25
    assert not screen.one("readers-previous").is_enabled()
    screen.click("readers-next")
    screen.one("reader-row", reader="r29")
    assert len(screen.all("reader-row")) == 5
    assert screen.path == f"/console/topics/{ns}/t?readers=r24"
    screen.click("readers-previous")
    screen.one("reader-row", reader="r00")


def test_readers_that_name_themselves_in_their_polls_are_shown_with_who_asked(
    screen: Screen, daemon: Daemon, client: Client, ns: str
):
    client.create_topic("t")
    publish(client, "t", *[b"%d" % n for n in range(4)])
    url = "http://{}:{}/v1/namespaces/{}/topics/t/poll".format(*daemon.address, ns)
    headers = {"Plainsong-Reader": "dashboards", "Content-Type": "application/json"}
    urlopen(Request(url, data=b'{"limit": 3}', headers=headers)).read()
    screen.open(f"/console/topics/{ns}/t", "reader-row")
    row = screen.one("reader-row", reader="dashboards", kind="named")
    assert row.text.split()[:3] == ["dashboards", "1", "0"]
    assert "by anonymous" in row.text
