"""Takes the screenshots of the documents: ``python -m tests.console.pictures [FOLDER]``, by default docs/pictures.

A daemon receives an hour of a small shop's messages, on a clock that is moved; a browser shows its console.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from plainsong import Client
from plainsong.testing import Broker, broker
from tests.console.screen import Screen, start_browser

ROOT = Path(__file__).parents[2]
#: Shifts the browser's clock to the daemon's, and shifts times in answers that come from the machine's clock.
CLOCK = """const [real, read, ahead] = [Date.now.bind(Date), Date.parse, %d];
Date.now = () => real() + ahead; Date.parse = text => read(text) + ahead;"""
#: The daemon counts the last hour on a clock that cannot be moved, so the page gets this count of messages per minute.
HISTORY = """const published = %s, fetched = window.fetch;
window.fetch = async (path, more) => {
  const topic = /topics\\/([^/]+)\\/history$/.exec(path)?.[1];
  if (!topic) return fetched(path, more);
  const history = await (await fetched(path, more)).json();
  return new Response(JSON.stringify({...history, published: published[topic]}));
};"""
WIDTH, HEIGHT = 1200, 760
TOPICS = {"orders": 90, "payments": 60, "shipments": 25, "stock-levels": 140, "mails": 8, "returns": 2}


def order(chance: random.Random, number: int) -> bytes:
    items = [{"sku": f"T-{chance.randrange(100, 180)}", "count": chance.randrange(1, 4)}]
    return json.dumps({"order": 480_000 + number, "customer": f"c-{chance.randrange(9000)}", "items": items}).encode()


def an_hour(daemon: Broker, client: Client) -> dict[str, list[int]]:
    """Publish a shop's messages of an hour, with two programs that have not ended their transactions.

    Returns:
      The number of messages in each minute, by topic.
    """
    published: dict[str, list[int]] = {name: [] for name in TOPICS}
    chance = random.Random(7)
    for name in TOPICS:
        client.create_topic(name, ttl_s=30 * 86_400 if name == "payments" else 86_400)
    for minute in range(56):
        for name, most in TOPICS.items():
            rush = 1 + 2 * (20 <= minute <= 32)
            count = chance.randrange(most // 2, most) * rush
            client.publish(name, [order(chance, 100 * minute + n) for n in range(count)])
            client.poll(name, limit=count)
            published[name].append(count)
        if minute == 50:
            client.admin.set_reader("orders", "invoicing", client.position_of_last("orders", 40) or "0" * 40)
            client.admin.set_reader("orders", "warehouse", client.position_of_last("orders", 9) or "0" * 40)
        daemon.clock.advance(60)
    held = client.transactions.begin(client_id="checkout-7", timeout_s=300)
    client.publish("orders", [order(chance, 9000 + n) for n in range(3)], transaction=held)
    client.publish("payments", [b'{"order": 489000, "paid": 129.90}'], transaction=held)
    daemon.clock.advance(75)
    other = client.transactions.begin(client_id="nightly-report", timeout_s=300)
    client.publish("mails", [b"{}"] * 12, transaction=other)
    client.publish("orders", [order(chance, 9100 + n) for n in range(38)], attributes={"traceparent": "00-4bf92f35-01"})
    with client.producer("orders", "web-shop") as producer:
        producer.publish([order(chance, 9200)])
    daemon.clock.advance(40)
    for name in published:
        published[name] += [0, 0]
    published["orders"][-1] += 39
    return published


def take(folder: Path) -> None:
    with broker() as daemon, daemon.client(namespace="shop") as client:
        published = an_hour(daemon, client)
        browser = start_browser(Path(tempfile.gettempdir()))
        try:
            browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": CLOCK % daemon.clock.ahead_ms})
            script = HISTORY % json.dumps(published)
            browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
            screen = Screen(browser, daemon.url)
            screen.size(WIDTH, HEIGHT)
            screen.theme("light")
            screen.open("/console?sort=messages&order=desc", "attention-item")
            screen.until("all sparks", lambda: len(screen.browser.find_elements("css selector", "svg.spark")) >= 5)
            shoot(screen, folder / "console-overview.png")
            screen.open("/console/topics/shop/orders?view=json", "message-row")
            newest = screen.rows()[1]
            screen.open(f"/console/topics/shop/orders?view=json&open={newest}", "copy-id")
            screen.until("density", lambda: screen.browser.find_elements("css selector", ".timeline rect"))
            screen.size(WIDTH, 1000)
            shoot(screen, folder / "console-topic.png")
            screen.theme("dark")
            screen.size(WIDTH, 560)
            oldest = client.transactions.list()[0].id
            screen.open(f"/console/transactions?open={oldest}")
            screen.says("tx-holds", "invoicing")
            shoot(screen, folder / "console-transactions.png")
            screen.click("tx-abort")
            screen.one("confirm-text")
            shoot(screen, folder / "console-abort.png")
        finally:
            browser.quit()


def shoot(screen: Screen, path: Path) -> None:
    screen.says("connection", "live")
    screen.run("document.activeElement.blur()")
    screen.browser.save_screenshot(str(path))
    print(path)


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/pictures")
