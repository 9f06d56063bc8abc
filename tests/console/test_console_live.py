"""Live updates: the daemon becomes unavailable and returns, the tab is hidden, and the page does not jump."""

from __future__ import annotations

from plainsong import Client
from tests.console.screen import Screen
from tests.daemon.harness import Daemon

SEEN = """Object.defineProperty(document, 'visibilityState', {value: '%s', configurable: true});
document.dispatchEvent(new Event('visibilitychange'));"""
HIDE, SHOW = SEEN % "hidden", SEEN % "visible"
#: Counts the page's calls, and those that have not been answered yet.
COUNTED = """const real = window.fetch;
window.asked = window.underWay = 0;
window.fetch = async (path, more) => {
  window.asked += 1;
  if (path.startsWith("/v1/events")) return real(path, more);
  window.underWay += 1;
  try {
    const answer = await real(path, more);
    const body = await answer.arrayBuffer();
    return new Response(body.byteLength ? body : null, answer);
  } finally {
    window.underWay -= 1;
  }
};"""
#: True if no call is in progress and none followed within a second.
ENDED = """const before = window.asked;
return new Promise(done => setTimeout(() => done(window.underWay === 0 && window.asked === before), 1000));"""


def test_after_a_kill_the_page_keeps_its_content_and_finds_the_daemon_again(
    screen: Screen, daemon: Daemon, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"%d" % n for n in range(30)])
    screen.open(f"/console/topics/{ns}/t", "message-row")
    rows = screen.rows()
    screen.click("message-row", id=rows[3])
    screen.one("copy-id")
    screen.says("connection", "live")
    daemon.kill()
    said = screen.says("connection", "disconnected since")
    assert screen.rows() == rows
    assert screen.one("copy-id").is_displayed()
    daemon.start()
    screen.says("connection", "live")
    assert said.startswith("disconnected since")
    client.publish("t", [b"after"])
    screen.says("stat-messages", "31")
    assert screen.rows() == rows


def test_a_hidden_page_sends_no_requests(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    with screen.scripted(COUNTED):
        screen.open(f"/console/topics/{ns}/t", "stat-messages")
    screen.says("connection", "live")
    page = screen.browser.current_window_handle
    screen.browser.switch_to.new_window("tab")
    try:
        screen.browser.switch_to.window(page)
        # Another tab is in front, but the script must also tell the page that it is hidden.
        screen.run(HIDE)
        screen.until(
            "paused",
            lambda: screen.run("return document.querySelector('[data-testid=connection]').textContent") == "paused",
        )
        asked = "return window.asked"
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


def test_slow_counts_of_readers_are_not_requested_while_the_page_is_hidden(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    # The page pauses ten times as long as a count took, so the next count is due while the page is hidden.
    script = """const counted = window.fetch;
    window.counts = 0;
    window.fetch = async (path, more) => {
      if (!path.includes("/lag")) return counted(path, more);
      window.counts += 1;
      window.underWay += 1;
      await new Promise(done => setTimeout(done, 300));
      window.underWay -= 1;
      return counted(path, more);
    };"""
    with screen.scripted(COUNTED + script):
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


def test_a_page_whose_daemon_left_before_its_messages_arrived_shows_them_when_it_is_back(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"a"])
    (message,) = client.admin.messages("t")
    script = """const real = window.fetch;
    window.away = true;
    window.fetch = (path, more) =>
      window.away && path.includes("/messages") ? Promise.reject(new TypeError("refused")) : real(path, more);"""
    with screen.scripted(script):
        screen.open(f"/console/topics/{ns}/t?open={message.id.hex()}", "stat-messages")
    screen.says("connection", "disconnected since")
    assert screen.rows() == []
    screen.run("window.away = false")
    screen.click("refresh")
    screen.one("message-row")
    screen.until("the one that is open", lambda: screen.payload() == "a")


def test_messages_that_failed_to_load_twice_appear_later_although_nothing_happened(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"a", b"b"])
    script = """const real = window.fetch;
    window.away = 0;
    window.fetch = (path, more) => {
      if (path.includes("payloadBytes=256") && window.away > 0) {
        window.away -= 1;
        return Promise.reject(new TypeError("refused"));
      }
      // A new stream would report news, which would load the messages: subscribe to nothing.
      return path.startsWith("/v1/events") ? real(path.replace(/kinds=.*/, "kinds="), more) : real(path, more);
    };"""
    with screen.scripted(script):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    rows = screen.rows()
    screen.run("window.away = 2")
    screen.click("from-oldest")
    screen.until("the oldest first", lambda: screen.rows() == rows[::-1])
    screen.says("connection", "live")


def test_the_daemons_clock_is_used_unless_its_answer_was_slow(screen: Screen):
    screen.open("/console/cluster", "instance-row")
    # The seconds from the request to the time in the daemon's answer, and to the answer's arrival.
    ahead = """const [dated, comes] = arguments;
    return import("/console/api.js").then(async ({ask, now}) => {
      const [realNow, realFetch] = [Date.now, window.fetch];
      const asked = realNow();
      try {
        Date.now = () => asked;
        window.fetch = async () => {
          Date.now = () => asked + 1000 * comes;
          return new Response("{}", {headers: {Date: new Date(asked + 1000 * dated).toUTCString()}});
        };
        await ask("/version");
        return now() - Date.now();
      } finally {
        Date.now = realNow;
        window.fetch = realFetch;
      }
    });"""
    hour = 3600
    for dated, comes in ((0, 0), (0, 20), (10, 20), (20, 20), (-1, 0), (1, 0)):
        assert screen.run(ahead, dated, comes) == 0, (dated, comes)
    for dated, comes in ((hour, 0), (hour, 20), (-hour, 0), (-hour, 20)):
        assert abs(screen.run(ahead, dated, comes) - 1000 * dated) <= 21_000, (dated, comes)
    screen.run(ahead, 0, 0)


def test_at_most_one_message_at_a_time_is_read_aloud(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    screen.open(f"/console/topics/{ns}/t", "stat-messages")
    assert len(screen.browser.find_elements("css selector", "[aria-live]")) == 1
    assert screen.browser.find_element("css selector", "[aria-live]").get_attribute("aria-live") == "polite"


#: Calls with ``window.hangs`` in their path get no answer, and long timers expire when ``OVER`` runs.
HANGS = """const [later, never, asked] = [window.setTimeout, window.clearTimeout, window.fetch];
const long = new Map();
let last = 0;
window.setTimeout = (call, ms, ...more) => (ms >= 30000 ? (long.set(--last, call), last) : later(call, ms, ...more));
window.clearTimeout = (id) => long.delete(id) || never(id);
window.over = () => {
  const calls = [...long.values()];
  long.clear();
  for (const call of calls) call();
};
window.hangs = %s;
window.hung = 0;
window.fetch = (path, more) => {
  if (!window.hangs || !path.includes(window.hangs)) return asked(path, more);
  window.hung += 1;
  return new Promise((_, failed) => more.signal?.addEventListener("abort", () => failed(more.signal.reason)));
};"""
OVER = "window.over()"


def test_a_call_on_a_silently_dead_connection_does_not_freeze_the_page(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    with screen.scripted(HANGS % "null"):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    screen.run("window.hangs = '/stats'")
    client.publish("t", [b"b"])
    screen.until("the page waits for it", lambda: screen.run("return window.hung > 0"))
    screen.run("window.hangs = null")
    screen.run(OVER)
    screen.says("stat-messages", "2")
    screen.says("connection", "live")


def test_a_page_without_an_event_stream_polls(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    with screen.scripted(HANGS % "'/v1/events'"):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.until("the stream is requested", lambda: screen.run("return window.hung > 0"))
    screen.run(OVER)
    screen.says("connection", "live")
    client.publish("t", [b"b"])
    screen.says("stat-messages", "2")
    client.publish("t", [b"c"])
    screen.says("stat-messages", "3")
