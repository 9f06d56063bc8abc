"""Staying up to date: the daemon goes away and comes back, nobody looks, and nothing moves meanwhile."""

from __future__ import annotations

from plainsong import Client
from tests.console.screen import Screen
from tests.daemon.harness import Daemon


def test_a_daemon_that_is_killed_leaves_what_was_shown_and_is_found_again(
    screen: Screen, daemon: Daemon, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"%d" % n for n in range(30)])
    screen.open(f"/console/topics/{ns}/t", "message-row")
    rows = screen.rows()
    screen.click("message-row", id=rows[3])
    screen.one("copy-id")
    screen.says("connection", "live")
    address = "{}:{}".format(*daemon.address)
    daemon.kill()
    said = screen.says("connection", "away since")
    assert screen.rows() == rows
    assert screen.one("copy-id").is_displayed()
    # The same address again: that is where the page looks.
    daemon.command[daemon.command.index("--bind") + 1] = address
    daemon.start()
    screen.says("connection", "live")
    assert said.startswith("away since")
    client.publish("t", [b"after"])
    screen.says("stat-messages", "31")
    assert screen.rows() == rows


def test_a_page_that_nobody_looks_at_asks_for_nothing(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    screen.open(f"/console/topics/{ns}/t", "stat-messages")
    screen.says("connection", "live")
    page = screen.browser.current_window_handle
    screen.browser.switch_to.new_window("tab")
    try:
        screen.browser.switch_to.window(page)
        # Another tab is in front: what the page itself sees is what counts.
        screen.run(
            """Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true});
            document.dispatchEvent(new Event('visibilitychange'));"""
        )
        screen.until(
            "paused",
            lambda: screen.run("return document.querySelector('[data-testid=connection]').textContent") == "paused",
        )
        asked = "return performance.getEntriesByType('resource').length"
        # What was under way may end.
        screen.run("return new Promise(done => setTimeout(done, 500))")
        before = screen.run(asked)
        client.publish("t", [b"b"])
        screen.run("return new Promise(done => setTimeout(done, 1500))")
        assert screen.run(asked) == before
        screen.run(
            """Object.defineProperty(document, 'visibilityState', {value: 'visible', configurable: true});
            document.dispatchEvent(new Event('visibilitychange'));"""
        )
        screen.says("connection", "live")
        screen.says("stat-messages", "2")
    finally:
        for handle in screen.browser.window_handles:
            if handle != page:
                screen.browser.switch_to.window(handle)
                screen.browser.close()
        screen.browser.switch_to.window(page)


def test_what_is_said_aloud_is_at_most_one_thing_at_a_time(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    screen.open(f"/console/topics/{ns}/t", "stat-messages")
    assert len(screen.browser.find_elements("css selector", "[aria-live]")) == 1
    assert screen.browser.find_element("css selector", "[aria-live]").get_attribute("aria-live") == "polite"
