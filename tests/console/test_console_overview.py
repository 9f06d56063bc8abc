"""The overview: what needs attention, and all topics, sorted, filtered and cut into pages by the daemon."""

from __future__ import annotations

import json
import time

from selenium.webdriver.remote.webelement import WebElement

from plainsong import Client
from tests.console.conftest import MANY
from tests.console.screen import Screen


def names(screen: Screen) -> list[str]:
    """The topics in sight, from top to bottom."""
    return list(
        screen.run("""return [...document.querySelectorAll('[data-testid="topic-row"]')].map(e => e.dataset.topic)""")
    )


def cell(screen: Screen, topic: str, name: str) -> str:
    row = screen.one("topic-row", topic=topic)
    return row.find_element("css selector", f"[data-testid=cell-{name}]").text


def test_every_topic_has_its_figures(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.publish("a", [b"x"] * 7)
    transaction = client.transactions.begin(client_id="c", timeout_s=300)
    client.publish("a", [b"x"] * 2, transaction=transaction)
    screen.open(f"/console?q={ns}:", "topic-row")
    screen.until("what is hidden", lambda: cell(screen, f"{ns}:a", "hidden") == "2")
    assert cell(screen, f"{ns}:a", "messages") == "9"
    assert "B" in cell(screen, f"{ns}:a", "bytes")
    assert cell(screen, f"{ns}:a", "age").endswith("s")
    client.transactions.abort(transaction)


def test_figures_change_where_they_stand(screen: Screen, client: Client, ns: str):
    for each in ("a", "b"):
        client.create_topic(each)
        client.publish(each, [b"x"])
    screen.open(f"/console?q={ns}:&sort=messages&order=desc", "topic-row")
    screen.says("connection", "live")
    before = names(screen)
    client.publish(before[1].split(":")[1], [b"x"] * 5)
    screen.until("six", lambda: cell(screen, before[1], "messages") == "6")
    assert names(screen) == before
    screen.click("refresh")
    screen.until("sorted anew", lambda: names(screen) == before[::-1])


def test_what_expired_unread_needs_attention_and_leads_to_its_topic(screen: Screen, client: Client, ns: str):
    client.create_topic("orders", ttl_s=1)
    client.publish("orders", [b"x"] * 3)
    client.set_reader("orders", "late", "0" * 40)
    screen.until("they have expired", lambda: client.stats("orders")["messages"] == 0)
    client.publish("orders", [b"later"])
    screen.open("/console", "attention")

    def items() -> list[WebElement]:
        return [each for each in screen.all("attention-item", kind="expired-unread") if ns in each.text]

    screen.until("it is there", items)
    (item,) = items()
    assert "warning" in item.text
    assert "late" in item.text
    item.find_element("css selector", "a").click()
    screen.says("topic-name", f"{ns}:orders")
    client.delete_topic("orders")


def test_topics_are_filtered_as_one_types_and_the_address_says_how(screen: Screen, client: Client, ns: str):
    for each in ("orders", "order-lines", "prices"):
        client.create_topic(each)
    screen.open("/console", "topic-filter")
    screen.type("topic-filter", f"{ns}:order")
    screen.until("two of them", lambda: names(screen) == [f"{ns}:order-lines", f"{ns}:orders"])
    screen.says("topics-total", "2")
    assert "q=" in screen.path
    screen.type("topic-filter", f"{ns}:nothing")
    screen.one("topics-empty")


def test_columns_sort_in_both_directions_and_say_so(screen: Screen, client: Client, ns: str):
    for each, count in (("a", 3), ("b", 9), ("c", 6)):
        client.create_topic(each)
        client.publish(each, [b"x"] * count)
    screen.open(f"/console?q={ns}:", "topic-row")
    screen.click("sort-messages")
    screen.until("most first", lambda: names(screen) == [f"{ns}:b", f"{ns}:c", f"{ns}:a"])
    head = screen.one("sort-messages").find_element("xpath", "..")
    assert head.get_attribute("aria-sort") == "descending"
    screen.click("sort-messages")
    screen.until("fewest first", lambda: names(screen) == [f"{ns}:a", f"{ns}:c", f"{ns}:b"])
    assert "sort=messages&order=asc" in screen.path


def test_a_topic_is_made_after_a_preview(screen: Screen, client: Client, ns: str):
    screen.open("/console", "topic-create")
    screen.click("topic-create")
    screen.type("create-name", f"{ns}:fresh")
    screen.type("create-ttl", "600")
    screen.click("preview")
    screen.says("preview-effect", f"{ns}:fresh")
    assert client.topics() == []
    screen.click("apply")
    screen.says("topic-name", f"{ns}:fresh")
    assert client.properties("fresh")["ttl"] == "600"


def test_ten_thousand_topics_are_as_quick_as_three_and_never_more_than_a_page_of_rows(screen: Screen):
    ns = MANY
    with Client(screen.url, namespace=ns) as client:
        client.publish("t07777", [b"x"] * 5)
    screen.open(f"/console?q={ns}:", "topic-row")
    screen.says("topics-total", "10,000")
    assert names(screen) == [f"{ns}:t{number:05}" for number in range(100)]
    for press, first in (("page-next", 100), ("page-next", 200), ("page-previous", 100)):
        screen.click(press)
        screen.until("the page", lambda first=first: names(screen)[:1] == [f"{ns}:t{first:05}"])
    began = time.monotonic()
    screen.click("sort-messages")
    screen.until("the one with messages first", lambda: names(screen)[:1] == [f"{ns}:t07777"])
    assert time.monotonic() - began < 2.0
    assert len(names(screen)) == 100
    # What the browser got for it was one page.
    sizes = screen.run(
        "return performance.getEntriesByType('resource').filter(e => e.name.includes('/v1/topics?')).map(e => e.decodedBodySize)"
    )
    assert max(sizes) < 60_000, json.dumps(sizes)
