"""Accessibility: both themes, keyboard only, a narrow window; axe-core finds nothing serious."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from plainsong import Client
from tests.console.screen import Screen


@pytest.fixture
def pages(client: Client, ns: str) -> Iterator[dict[str, str]]:
    """Every page with some content, and the element that appears when it has loaded."""
    client.create_topic("orders", ttl_s=3600)
    client.publish("orders", [b'{"n": 1}', b"\xff\xfe", b"text"], attributes={"traceparent": "00-1"})
    client.admin.set_reader("orders", "billing", client.position_of_last("orders", 1))
    with client.producer("orders", "importer") as producer:
        producer.publish([b"a"])
    transaction = client.transactions.begin(client_id="checkout", timeout_s=300)
    client.publish("orders", [b"in it"], transaction=transaction)
    seen = client.admin.messages("orders")[0].id.hex()
    client.create_topic("gone")
    client.admin.delete_topic("gone")
    invalid = client.transactions.begin(client_id="lost", timeout_s=300)
    client.publish("orders", [b"hidden"], transaction=invalid)
    client.transactions.invalidate(invalid)
    yield {
        "/console": "topic-filter",
        f"/console/topics/{ns}/orders?open={seen}": "copy-id",
        "/console?deleted=1": "deleted-row",
        f"/console/topics/{ns}/gone": "deleted-banner",
        f"/console/transactions?open={transaction.id}": "tx-holds",
        "/console/transactions?state=invalid": "tx-truncate",
        f"/console/producers/{ns}/orders": "producer-row",
        "/console/cluster": "instance-row",
        "/console/audit": "audit-empty",
        "/console/lineage": "lineage-empty",
    }
    client.transactions.abort(transaction)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page(screen: Screen, pages: dict[str, str], theme: str):
    screen.theme(theme)
    for path, shows in pages.items():
        screen.open(path, shows)
        screen.says("connection", "live")
        assert screen.accessibility() == [], path


def test_axe_finds_nothing_serious_in_dialogs(screen: Screen, pages: dict[str, str], ns: str):
    screen.open(f"/console/topics/{ns}/orders", "topic-delete")
    screen.click("help")
    screen.one("help-dialog")
    assert screen.accessibility() == []
    screen.press(Keys.ESCAPE)
    screen.gone("help-dialog")
    screen.click("topic-delete")
    screen.one("confirm")
    assert screen.accessibility() == []


def test_the_theme_is_that_of_the_system_until_one_is_chosen_and_then_stays(screen: Screen):
    background = "return getComputedStyle(document.body).backgroundColor"
    screen.theme("dark")
    screen.open("/console/cluster", "theme")
    dark = screen.run(background)
    screen.theme("light")
    light = screen.run(background)
    assert dark != light
    screen.choose("theme", "dark")
    assert screen.run(background) == dark
    screen.open("/console/audit", "theme")
    assert screen.run(background) == dark
    assert screen.run("return localStorage.getItem('plainsong-theme')") == "dark"
    assert screen.one("theme").get_attribute("value") == "dark"


def test_no_page_scrolls_sideways_in_a_narrow_window(screen: Screen, pages: dict[str, str]):
    screen.size(320, 640)
    for path, shows in pages.items():
        screen.open(path, shows)
        assert screen.run("return document.documentElement.scrollWidth") <= 320, path


def test_everything_works_with_the_keyboard_alone(screen: Screen, client: Client, pages: dict[str, str], ns: str):
    screen.open(f"/console/topics/{ns}/orders?sort=asc", "message-row")
    rows = screen.rows()
    # Open and close a row.
    screen.press("j", "j", Keys.ENTER)
    screen.one("copy-id")
    assert screen.path.endswith(f"open={rows[1]}")
    screen.press(Keys.ESCAPE)
    screen.gone("copy-id")
    # Enter the filter, and leave it.
    screen.press("/")
    assert screen.focused("data-testid") == "message-filter"
    screen.press(Keys.ESCAPE)
    assert screen.focused("data-testid") != "message-filter"
    # Show the list of keys.
    screen.press("?")
    screen.one("help-dialog")
    screen.press(Keys.ESCAPE)
    screen.gone("help-dialog")
    # Change a property: Tab to its field, type, preview, apply.
    tab_to(screen, "property-ttl")
    screen.browser.switch_to.active_element.send_keys(Keys.CONTROL, "a")
    screen.press("7200")
    tab_to(screen, "preview")
    screen.press(Keys.ENTER)
    screen.one("apply")
    tab_to(screen, "apply")
    screen.press(Keys.ENTER)
    screen.says("toast", "changed")
    assert client.admin.properties("orders")["ttl"] == "7200"
    # Cancel a deletion: the focus returns.
    tab_to(screen, "topic-delete")
    screen.press(Keys.ENTER)
    screen.one("confirm-name")
    screen.press(Keys.ESCAPE)
    screen.gone("confirm-name")
    screen.until("the focus is back", lambda: screen.focused("data-testid") == "topic-delete")
    # Go back to the previous page.
    screen.press(Keys.ESCAPE)
    screen.one("topic-filter")
    assert screen.path == "/console"


def tab_to(screen: Screen, testid: str) -> None:
    """Press Tab until this element has the focus, which must be visible."""
    for _ in range(120):
        if screen.focused("data-testid") == testid:
            outline = screen.run("const s = getComputedStyle(document.activeElement); return s.outlineStyle")
            assert outline != "none", testid
            return
        screen.press(Keys.TAB)
    raise AssertionError(f"Tab never reaches {testid}")


def test_the_pages_in_the_header_are_links_and_mark_the_open_one(screen: Screen):
    screen.open("/console", "nav")
    for name, path in (
        ("transactions", "/console/transactions"),
        ("cluster", "/console/cluster"),
        ("audit", "/console/audit"),
    ):
        screen.click(f"nav-{name}")
        screen.until("it is open", lambda path=path: screen.path == path)
        screen.until(
            "it is announced", lambda name=name: screen.one(f"nav-{name}").get_attribute("aria-current") == "page"
        )
        screen.until("its head has the focus", lambda: screen.focused("tagName") == "H1")
    screen.browser.back()
    screen.until("back", lambda: screen.path == "/console/cluster")
    screen.one("instance-row")
