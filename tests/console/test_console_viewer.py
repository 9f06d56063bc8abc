"""The viewer: users find, open and copy messages with any content, and consume none."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from plainsong import Client
from tests.console.screen import LATE, Screen

MIB = 1 << 20


@pytest.fixture
def hundred(client: Client) -> list[str]:
    """The ids of a hundred and twenty messages of the topic ``t``, oldest first."""
    client.create_topic("t")
    client.publish("t", [b"message %03d" % n for n in range(120)])
    return [seen.id.hex() for seen in client.admin.messages("t", limit=1000)]


def opened(screen: Screen, message_id: str) -> None:
    screen.click("message-row", id=message_id)
    inside = f'[data-id="{message_id}"] [data-testid="copy-id"]'  # another message may be open until this one is
    screen.until("it is open", lambda: screen.browser.find_elements("css selector", inside))


def test_the_viewer_begins_with_the_newest_page_and_turns_to_older_and_newer_ones(screen: Screen, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    assert screen.rows() == hundred[:-51:-1]
    screen.click("older")
    screen.until("the page before", lambda: screen.rows() == hundred[-51:-101:-1])
    screen.click("older")
    screen.until("the first page", lambda: screen.rows() == hundred[-101::-1])
    screen.click("newer")
    screen.until("the second page", lambda: screen.rows() == hundred[20:70][::-1])
    screen.click("from-oldest")
    screen.until("oldest first", lambda: screen.rows() == hundred[:50])
    screen.click("newer")
    screen.until("the next page", lambda: screen.rows() == hundred[50:100])
    screen.click("from-newest")
    screen.until("newest first", lambda: screen.rows() == hundred[:-51:-1])


def test_the_view_is_in_the_address(screen: Screen, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.click("from-oldest")
    screen.until("oldest first", lambda: screen.rows()[:1] == hundred[:1])
    opened(screen, hundred[7])
    screen.click("view-hex")
    path = screen.path
    screen.open("/console/cluster", "instance-row")
    screen.open(path, "copy-id")
    assert screen.rows() == hundred[:50]
    assert screen.one("message-row", id=hundred[7]).find_elements("css selector", "pre.hex")


def test_a_jump_goes_to_an_id_to_a_time_and_to_a_duration_ago(screen: Screen, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.type("jump", hundred[40], enter=True)
    screen.until("from that id", lambda: screen.rows() == hundred[40:90])
    screen.type("jump", str(int(hundred[0][:16], 16)), enter=True)
    screen.until("from that time", lambda: screen.rows() == hundred[:50])
    screen.type("jump", "1d", enter=True)
    screen.until("from a day ago", lambda: "from=" in screen.path and screen.rows() == hundred[:50])
    before = screen.path
    screen.type("jump", "yesterday-ish", enter=True)
    assert screen.path == before


def test_following_adds_new_messages_on_top_and_an_open_message_stays(screen: Screen, client: Client, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, hundred[-1])
    screen.click("follow")
    client.publish("t", [b"news"])
    screen.until("it is there", lambda: len(screen.rows()) == 51)
    assert screen.rows()[1] == hundred[-1]
    assert "message 119" in screen.says("message-row", "message 119", id=hundred[-1])
    assert screen.one("copy-id").is_displayed()


def test_messages_that_contain_a_text_are_found(screen: Screen, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.type("message-filter", "message 07", enter=True)
    screen.until("ten of them", lambda: screen.rows() == hundred[70:80][::-1])


def words(screen: Screen) -> list[str]:
    """Return the states of the visible messages, from top to bottom."""
    return list(
        screen.run("""return [...document.querySelectorAll('[data-testid="message-state"]')].map(e => e.innerText)""")
    )


def test_states_of_a_search_are_refreshed_however_many_other_messages_are_between(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"needle 1"])
    client.publish("t", [b"hay"] * 700)
    transaction = client.transactions.begin(client_id="slow", timeout_s=300)
    client.publish("t", [b"needle 2"], transaction=transaction)
    screen.open(f"/console/topics/{ns}/t?filter=needle", "message-row")
    screen.says("connection", "live")
    assert words(screen) == ["open", "plain"]
    client.transactions.commit(transaction)
    screen.until("it is committed", lambda: words(screen) == ["committed", "plain"])


def test_states_are_shown_as_words(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"plain"])
    aborted, committed, held = (client.transactions.begin(client_id=name, timeout_s=300) for name in "abc")
    client.publish("t", [b"aborted"], transaction=aborted)
    client.publish("t", [b"committed"], transaction=committed)
    client.publish("t", [b"open"], transaction=held)
    client.transactions.abort(aborted)
    client.transactions.commit(committed)
    screen.open(f"/console/topics/{ns}/t?sort=asc", "message-row")
    assert words(screen) == ["plain", "rolled back", "committed", "open"]
    client.transactions.commit(held)
    screen.until("it is committed", lambda: words(screen) == ["plain", "rolled back", "committed", "committed"])


def test_states_from_before_a_commit_are_refreshed_when_they_arrive_late(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    held = client.transactions.begin(client_id="slow", timeout_s=300)
    client.publish("t", [b"in it"], transaction=held)
    with screen.scripted(LATE):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    screen.one("held-banner")
    screen.note('[data-testid="message-state"]')
    with screen.late("payloadBytes=256", lambda: screen.click("from-oldest")):
        client.transactions.commit(held)
        screen.gone("held-banner")
        # Nothing else on the page waits for the load. A new load shows that the previous one has finished.
        client.publish("t", [b"later"])
        screen.says("stat-messages", "2")
    screen.until("it is committed", lambda: words(screen)[:1] == ["committed"])
    assert screen.noted() == ["open", "committed"]


#: Refuses, each for a second, ``refusals`` calls whose path contains a given part.
REFUSED = """const allowed = window.fetch;
window.refusals = 0;
window.fetch = async (path, more) => {
  if (!path.includes("%s") || window.refusals <= 0) return allowed(path, more);
  window.refusals -= 1;
  return new Response('{"detail": "not now"}', {status: 503, headers: {"Retry-After": "1"}});
};"""


def test_a_message_that_failed_to_open_opens_later_and_the_error_disappears(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a"])
    with screen.scripted(REFUSED % "payloadBytes=65536"):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    screen.note('[data-testid="error"]')
    screen.run("window.refusals = 1")
    screen.click("message-row")
    screen.until("it is refused", screen.noted)
    client.publish("t", [b"b"])
    screen.until("it is open", lambda: screen.payload() == "a")
    screen.gone("error")


def test_states_that_failed_to_refresh_are_refreshed_later_and_the_error_disappears(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"a"])
    with screen.scripted(LATE + REFUSED % "payloadBytes=1&"):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    screen.note('[data-testid="error"]')
    with screen.late("payloadBytes=256", lambda: screen.click("from-oldest")):
        client.publish("t", [b"b"])
        screen.says("stat-messages", "2")
        screen.run("window.refusals = 1")
    screen.until("it is refused", screen.noted)
    client.publish("t", [b"c"])
    screen.says("stat-messages", "3")
    screen.gone("error")


def test_following_shows_the_newest_even_if_more_arrive_than_one_request_returns(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    client.publish("t", [b"first"])
    screen.open(f"/console/topics/{ns}/t?follow=1", "message-row")
    screen.says("connection", "live")
    screen.note('[data-testid="message-payload"]')
    client.publish("t", [b"%d" % number for number in range(400)])
    screen.until("the newest", lambda: screen.noted()[-1] == "399")
    assert "99" not in screen.noted()  # the last of the first hundred is skipped


def test_following_a_text_without_matches_shows_the_first_one(screen: Screen, client: Client, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t?follow=1&filter=needle", "messages-empty")
    screen.says("connection", "live")
    client.publish("t", [b"hay", b"a needle"])
    screen.until("it is there", lambda: len(screen.rows()) == 1)
    client.publish("t", [b"hay", b"another needle", b"hay"])
    screen.until("the next on top", lambda: len(screen.rows()) == 2)
    assert "another" in screen.all("message-row")[0].text


def test_following_a_text_shows_it_however_much_else_arrives_in_between(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [b"a needle"])
    screen.open(f"/console/topics/{ns}/t?follow=1&filter=needle", "message-row")
    screen.says("connection", "live")
    # Publish more than the daemon searches for one answer.
    for _ in range(12):
        client.publish("t", [b"hay"] * 5_000)
    client.publish("t", [b"another needle"])
    screen.until("it is there", lambda: len(screen.rows()) == 2)


#: Reduces the page's events to those that keep the connection alive.
QUIET = """const loud = window.fetch;
window.fetch = async (path, more) => {
  if (!path.startsWith("/v1/events")) return loud(path, more);
  const ping = new TextEncoder().encode(":\\n\\n");
  return new Response(new ReadableStream({start: (stream) => setInterval(() => stream.enqueue(ping), 1000)}));
};"""


def test_rows_that_are_refused_for_now_appear_when_the_daemon_may_be_asked_again(screen: Screen, hundred, ns: str):
    with screen.scripted(QUIET + REFUSED % "payloadBytes=256"):
        screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("connection", "live")
    screen.note('[data-testid="error"]')
    screen.run("window.refusals = 1")
    screen.click("from-oldest")
    screen.until("oldest first, though nothing has happened", lambda: screen.rows() == hundred[:50])
    screen.gone("error")
    assert screen.noted() == ["not now"]


def test_text_is_shown_exactly_and_json_keeps_its_numbers_as_they_were_written(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    text = b'  {"big": 12345678901234567890123,\t"small": 1.10, "e": 1e5, "z": 1, "a": "\\u0041 \\" x"}  \n\n'
    client.publish("t", [text])
    (message,) = client.admin.messages("t")
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, message.id.hex())
    assert screen.payload() == text.decode()
    screen.click("view-json")
    screen.until("it is formatted", lambda: screen.payload() != text.decode())
    assert screen.payload() == (
        '{\n  "big": 12345678901234567890123,\n  "small": 1.10,\n  "e": 1e5,\n  "z": 1,\n  "a": "\\u0041 \\" x"\n}'
    )
    screen.click("view-hex")
    screen.until("bytes", lambda: screen.payload().startswith("00000000  20 20 7b 22"))


def test_binary_data_is_shown_as_bytes(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    client.publish("t", [bytes(range(256))])
    (message,) = client.admin.messages("t")
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, message.id.hex())
    lines = screen.payload().splitlines()
    assert len(lines) == 16
    assert lines[15] == "000000f0  f0 f1 f2 f3 f4 f5 f6 f7  f8 f9 fa fb fc fd fe ff  ................"


HOSTILE = [
    b"<script>window.hurt = 1</script>",
    b"<img src=x onerror='window.hurt = 1'>",
    b'"><svg onload=window.hurt=1>',
    b"javascript:window.hurt=1",
    b"</pre></td></tr></table><h1>hello</h1>",
    "\u202e right to left \u0000 nothing \u2028 line".encode(),
    b"{" * 5000,
    b"",
    b"\xef\xbb\xbfwith a mark",
    b"\xff\xfe" * 100,
]


def test_hostile_payloads_and_attributes_are_text(screen: Screen, client: Client, ns: str):
    client.create_topic("t")
    for payload in HOSTILE:
        client.publish(
            "t", [payload], attributes={"<b>name</b>": "<img src=x onerror='window.hurt=1'>", "__proto__": "x"}
        )
    screen.open(f"/console/topics/{ns}/t?sort=asc", "message-row")
    for message in client.admin.messages("t"):
        for view in ("text", "json", "hex"):
            screen.click(f"view-{view}")
            if f"open={message.id.hex()}" not in screen.path:
                opened(screen, message.id.hex())
            screen.until("the payload", lambda: screen.all("message-payload"))
        screen.click("view-text")
        try:
            text = message.payload.decode().replace("\u202e", "\\u202e")  # escaped, so that the text is not reversed
        except UnicodeDecodeError:
            continue
        screen.until("its exact text", lambda text=text: screen.payload() == text)
        assert "<b>name</b>" in screen.one("message-attributes").text
    assert screen.run("return window.hurt") is None
    assert not screen.browser.find_elements("css selector", "main script, main img, main h1 ~ h1")


def test_eight_mebibytes_show_their_first_64_kib_at_once_and_all_of_it_within_two_seconds(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("t")
    line = b'{"n": "' + b"abcdefgh" * 120 + b'"}\n'
    large = (line * (8 * MIB // len(line) + 1))[: 8 * MIB - 1000]
    client.publish("t", [large])
    client.publish("t", [b"x" * 100_000])
    ids = [seen.id.hex() for seen in client.admin.messages("t")]
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.says("message-row", "8.0 MiB", id=ids[0])
    opened(screen, ids[0])
    screen.until("the beginning", lambda: len(screen.payload()) == 64 * 1024)
    began_s, before_s = time.monotonic(), screen.worked_s()
    screen.click("message-whole")
    # Count in the page, since transferring the whole text would add work.
    length = "return document.querySelector('pre[data-testid=message-payload]')?.textContent.length"
    screen.until("all of it", lambda: screen.run(length) == len(large))
    screen.run("return document.querySelector('pre').getBoundingClientRect().height")  # forces the layout
    worked_s = screen.worked_s() - before_s
    print(f"all of it: {worked_s:.2f} s of work in {time.monotonic() - began_s:.2f} s")
    assert 0 < worked_s < 2.0
    assert screen.payload() == large.decode()
    screen.click("view-hex")
    screen.until("a page of bytes", lambda: len(screen.payload().splitlines()) == 256)
    screen.click("hex-next")
    screen.until("the next page", lambda: screen.payload().startswith("00001000"))
    assert len(screen.browser.find_elements("css selector", "main *")) < 3000


def test_copied_commands_fetch_this_very_message(screen: Screen, client: Client, hundred, ns: str, tmp_path):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, hundred[-3])
    curl = screen.one("copy-curl").get_attribute("title")
    python = screen.one("copy-python").get_attribute("title")
    assert subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, check=True).stdout == b"message 117"
    program = tmp_path / "program.py"
    program.write_text(python)
    assert subprocess.run([sys.executable, program], capture_output=True, check=True).stdout == b"b'message 117'\n"
    for kind, says in (("curl", "curl command copied"), ("python", "Python program copied"), ("id", "Id copied")):
        screen.click(f"copy-{kind}")
        screen.says("toast", says)  # until then the clipboard has the previous text
    screen.run("document.querySelector('[data-testid=jump]').focus()")
    screen.one("jump").send_keys(Keys.CONTROL, "v")
    screen.until("the id is in the clipboard", lambda: screen.one("jump").get_attribute("value") == hundred[-3])


def test_a_download_has_the_bytes_of_the_message(screen: Screen, client: Client, ns: str, tmp_path):
    client.create_topic("t")
    payload = bytes(range(256)) * 1000
    client.publish("t", [payload])
    (message,) = client.admin.messages("t")
    screen.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, message.id.hex())
    screen.click("message-download")
    saved = tmp_path / f"t-{message.id.hex()}.bin"
    screen.until("it is saved", lambda: saved.exists() and saved.stat().st_size == len(payload))
    assert saved.read_bytes() == payload


def test_the_slider_goes_to_a_time(screen: Screen, client: Client, hundred, ns: str):
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.run(
        "const s = document.querySelector('[data-testid=slider]'); s.value = 0; s.dispatchEvent(new Event('change'))"
    )
    screen.until("from the oldest", lambda: screen.rows() == hundred[:50])


def test_viewing_consumes_nothing(screen: Screen, client: Client, hundred, ns: str):
    client.admin.set_reader("t", "r", "0" * 40)
    screen.open(f"/console/topics/{ns}/t", "message-row")
    opened(screen, hundred[-1])
    assert client.admin.reader("t", "r")["position"] == "0" * 40
    assert client.admin.stats("t")["pollPerSecond"] == 0


def test_answers_keep_long_numbers_and_fractions_with_many_digits(screen: Screen):
    screen.open("/console", "topic-filter")
    parse = "const text = arguments[0]; return import('/console/format.js').then(m => JSON.stringify(m.parse(text)))"
    answer = '{"id":12345678901234567890,"below":-1234567890123456789,"share":0.30000000000000004,"text":"0123456789012345678"}'
    assert screen.run(parse, answer) == (
        '{"id":"12345678901234567890","below":"-1234567890123456789","share":0.30000000000000004,"text":"0123456789012345678"}'
    )


def test_characters_that_change_the_direction_of_text_are_escaped(screen: Screen, client: Client, ns: str):
    client.create_topic("t", if_not_exists=True)
    client.publish("t", ["pay \u202e001 to Bob\u202c".encode()], attributes={"k": "a\u2066b"})
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.until("on one line", lambda: screen.one("message-payload").text == r"pay \u202e001 to Bob\u202c")
    screen.click("message-row")
    screen.until("whole", lambda: screen.payload() == r"pay \u202e001 to Bob\u202c")
    assert r"a\u2066b" in screen.one("message-attributes").text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_hovered_view_is_readable(screen: Screen, client: Client, ns: str, theme: str):
    client.create_topic("t", if_not_exists=True)
    client.publish("t", [b"x"])
    screen.open(f"/console/topics/{ns}/t", "message-row")
    screen.theme(theme)
    button = screen.one("view-text")
    assert button.get_attribute("aria-pressed") == "true"
    colours = [button.value_of_css_property(name) for name in ("color", "background-color")]
    ActionChains(screen.browser).move_to_element(button).perform()
    assert screen.run("return arguments[0].matches(':hover')", button)
    assert [button.value_of_css_property(name) for name in ("color", "background-color")] == colours


def test_the_two_ends_of_a_time_line_stay_apart_in_a_narrow_window(screen: Screen, client: Client, ns: str):
    client.create_topic("t", if_not_exists=True)
    client.publish("t", [b"x"])
    screen.open(f"/console/topics/{ns}/t", "message-row")
    apart = """
    const box = document.querySelector(".timeline .ends");
    const [first, last] = box.querySelectorAll("span");
    first.textContent = last.textContent = "2026-01-31 12:00:00, the last deadline";
    box.style.width = "20rem";
    const [a, b] = [first.getBoundingClientRect(), last.getBoundingClientRect()];
    return a.right + 4 <= b.left || a.bottom <= b.top;
    """
    assert screen.run(apart)
