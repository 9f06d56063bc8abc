"""Staying up to date: the daemon goes away and comes back, nobody looks, and nothing moves meanwhile."""

from __future__ import annotations

from plainsong import Client
from tests.console.screen import Screen
from tests.daemon.harness import Daemon

SEEN = """Object.defineProperty(document, 'visibilityState', {value: '%s', configurable: true});
document.dispatchEvent(new Event('visibilitychange'));"""
HIDE, SHOW = SEEN % "hidden", SEEN % "visible"
#: Whether nothing has been answered for a second.
ENDED = """const before = performance.getEntriesByType('resource').length;
return new Promise(done => setTimeout(() => done(before === performance.getEntriesByType('resource').length), 1000));"""


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
        screen.run(HIDE)
        screen.until(
            "paused",
            lambda: screen.run("return document.querySelector('[data-testid=connection]').textContent") == "paused",
        )
        asked = "return performance.getEntriesByType('resource').length"
        screen.until("what was under way has ended", lambda: screen.run(ENDED))
        before = screen.run(asked)
        client.publish("t", [b"b"])
        screen.run("return new Promise(done => setTimeout(done, 1500))")
        assert screen.run(asked) == before
        screen.run(SHOW)
        screen.says("connection", "live")
        screen.says("stat-messages", "2")
    finally:
        for handle in screen.browser.window_handles:
            if handle != page:
                screen.browser.switch_to.window(handle)
                screen.browser.close()
        screen.browser.switch_to.window(page)


def test_readers_that_take_long_to_count_are_not_counted_while_nobody_looks(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    # The page rests ten times as long as a count has taken: the next one is due while nobody looks.
    script = """const real = window.fetch;
    window.counts = 0;
    window.fetch = async (path, more) => {
      if (!path.includes("/lag")) return real(path, more);
      window.counts += 1;
      await new Promise(done => setTimeout(done, 300));
      return real(path, more);
    };"""
    added = screen.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        screen.open(f"/console/topics/{ns}/t", "readers")
        screen.says("connection", "live")
        client.publish("t", [b"b"])
        screen.says("stat-messages", "2")
        screen.run(HIDE)
        screen.says("connection", "paused")
        screen.until("what was under way has ended", lambda: screen.run(ENDED))
        before = screen.run("return window.counts")
        screen.run("return new Promise(done => setTimeout(done, 3500))")
        assert screen.run("return window.counts") == before
        screen.run(SHOW)
        screen.until("they are counted again", lambda: screen.run("return window.counts") > before)
    finally:
        screen.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_what_is_said_aloud_is_at_most_one_thing_at_a_time(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    screen.open(f"/console/topics/{ns}/t", "stat-messages")
    assert len(screen.browser.find_elements("css selector", "[aria-live]")) == 1
    assert screen.browser.find_element("css selector", "[aria-live]").get_attribute("aria-live") == "polite"
