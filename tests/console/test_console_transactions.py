"""The page of transactions: open ones, what they hide and block, and how to end them after a confirmation."""

from __future__ import annotations

from plainsong import Client
from tests.console.screen import LATE, Screen


def held(client: Client, name: str, *topics: str, hidden: int = 0):
    """Begin a transaction with this client id and two messages in each topic, followed by plain messages."""
    transaction = client.transactions.begin(client_id=name, timeout_s=300)
    for topic in topics:
        client.publish(topic, [b"in it"] * 2, transaction=transaction)
        if hidden:
            client.publish(topic, [b"behind"] * hidden)
    return transaction


def click_in_row(screen: Screen, button: str, transaction) -> None:
    """Click a button in this transaction's row; others may be listed before it."""
    screen.click_in("css selector", f"[data-testid={button}]", "tx-row", id=str(transaction.id))


def test_the_page_says_that_no_reader_is_held(screen: Screen, client: Client, ns: str):
    screen.open("/console/transactions?state=aborted")
    screen.open("/console/transactions?state=in_progress", "transactions-empty")


def test_an_open_transaction_shows_its_client_its_age_and_what_it_hides(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.create_topic("b")
    transaction = held(client, "checkout-7", "a", "b", hidden=5)
    screen.open("/console/transactions")
    said = screen.says("tx-row", "checkout-7", "open", f"{ns}:a", f"{ns}:b", id=str(transaction.id))
    assert str(transaction.id) in said

    def hides() -> str:
        row = screen.one("tx-row", id=str(transaction.id))
        return row.find_element("css selector", "[data-testid=tx-hidden]").text

    screen.until("what it hides", lambda: hides() == "14")
    assert screen.one("timeline")
    assert screen.one("tx-bar", id=str(transaction.id))
    client.transactions.abort(transaction)
    screen.gone("tx-row", id=str(transaction.id))


def test_its_age_advances_without_events(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "quiet", "a")
    screen.open("/console/transactions")
    screen.says("connection", "live")
    screen.says("tx-row", "quiet", id=str(transaction.id))
    # From here on no answer can tell the page the time.
    screen.run("window.fetch = () => new Promise(() => {})")
    seen: set[str] = set()

    def goes_on() -> bool:
        seen.add(screen.one("tx-row", id=str(transaction.id)).text)
        return len(seen) > 3

    screen.until("time passes", goes_on)
    client.transactions.abort(transaction)


def test_a_transaction_shows_which_readers_it_holds(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.publish("a", [b"before"])
    client.admin.set_reader("a", "billing", client.admin.messages("a")[0].id)
    transaction = held(client, "slow", "a", hidden=3)
    screen.open(f"/console/transactions?open={transaction.id}")
    screen.says("tx-holds", f"{ns}:a", "billing", "5 messages hidden")
    client.transactions.abort(transaction)


def test_a_transaction_shown_as_ended_stays_so_when_an_older_answer_arrives_late(
    screen: Screen, client: Client, ns: str
):
    client.create_topic("a")
    transaction = held(client, "slow", "a")
    with screen.scripted(LATE):
        screen.open("/console/transactions")
    screen.says("connection", "live")
    screen.says("tx-row", "slow", id=str(transaction.id))
    with screen.late("/lag", lambda: screen.click("tx-bar", id=str(transaction.id))):
        client.transactions.commit(transaction)
        screen.one("tx-row", id=str(transaction.id), state="committed")
    assert screen.one("tx-row", id=str(transaction.id)).get_attribute("data-state") == "committed"


#: Makes requests for the list of committed transactions fail.
REFUSES = """const allowed = window.fetch;
window.fetch = (path, more) => path.includes("state=committed")
  ? Promise.resolve(new Response('{"detail": "not now"}', {status: 503})) : allowed(path, more);"""


def test_a_transaction_closed_before_its_answer_arrived_stays_closed(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "slow", "a")
    with screen.scripted(LATE + REFUSES):
        screen.open("/console/transactions")
    screen.says("tx-row", "slow", id=str(transaction.id))
    with screen.late("/lag", lambda: screen.click("tx-bar", id=str(transaction.id))):
        screen.click("state-committed")
        screen.says("error", "not now")
    assert not screen.all("tx-holds")
    client.transactions.abort(transaction)


def test_another_list_closes_an_open_transaction_even_if_the_list_is_refused(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "slow", "a")
    with screen.scripted(REFUSES):
        screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    screen.click("state-committed")
    screen.says("error", "not now")
    assert not screen.all("tx-holds")
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


def test_an_abort_shows_what_disappears_and_happens_after_confirmation(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "gone", "a", hidden=4)
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    click_in_row(screen, "tx-abort", transaction)
    said = screen.says("confirm-text", "gone", f"{ns}:a")
    assert "disappear" in said
    assert "Committed readers continue: 4 messages after it become visible." in said
    screen.click("cancel")
    screen.gone("confirm")
    assert client.transactions.get(transaction.id).state == "in_progress"
    click_in_row(screen, "tx-abort", transaction)
    screen.click("confirm")
    screen.says("toast", "rolled back", "2 messages taken away", "4 messages released")
    assert client.transactions.get(transaction.id).state == "aborted"
    assert len(client.poll("a", isolation="committed").messages) == 4


def test_the_confirmation_names_the_waiting_readers(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    client.publish("a", [b"before"])
    for reader in ("billing", "shipping"):
        client.admin.set_reader("a", reader, client.admin.messages("a")[0].id)
    transaction = held(client, "slow", "a", hidden=1)
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    for button in ("tx-abort", "tx-invalidate"):
        click_in_row(screen, button, transaction)
        screen.says("confirm-text", f"Waiting readers: billing of {ns}:a, shipping of {ns}:a.")
        screen.click("cancel")
        screen.gone("confirm")
    client.transactions.abort(transaction)


def test_an_invalidation_hides_forever(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "gone", "a")
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    click_in_row(screen, "tx-invalidate", transaction)
    screen.says("confirm-text", "forever")
    screen.click("confirm")
    screen.says("toast", "invalid")
    assert client.transactions.get(transaction.id).state == "invalid"
    screen.one("tx-row", id=str(transaction.id), state="invalid")


def test_an_invalid_transaction_is_removed_from_the_list_after_a_preview(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    first, second = held(client, "first", "a"), held(client, "second", "a")
    for each in (first, second):
        client.transactions.invalidate(each)
    screen.open(f"/console/transactions?state=invalid&open={first.id}")
    screen.click_in("css selector", "[data-testid=tx-truncate]", "tx-row", id=str(first.id), state="invalid")
    screen.says("confirm-text", "first", "1 transaction leaves the list")
    screen.click("cancel")
    screen.gone("confirm")
    assert client.transactions.pruning().invalid >= 2
    screen.click("tx-truncate-all")
    said = screen.says("confirm-text", "leave the list")
    assert "1 transaction " not in said
    screen.click("confirm")
    screen.says("toast", "removed from the list")
    # The service will forget only transactions that have left the list.
    assert all(client.transactions.get(each.id).kept_until_ms is not None for each in (first, second))


def test_a_transaction_decided_since_is_reported_as_decided(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "quick", "a")
    screen.open(f"/console/transactions?open={transaction.id}", "tx-holds")
    click_in_row(screen, "tx-abort", transaction)
    screen.one("confirm")
    client.transactions.commit(transaction)
    screen.click("confirm")
    screen.says("error", "commit")


#: Makes the preview of an abort fail.
NO_PREVIEW = """const open = window.fetch;
window.fetch = (path, more) => path.includes("/abort")
  ? Promise.resolve(new Response('{"detail": "not now"}', {status: 409})) : open(path, more);"""


def test_the_error_of_an_action_stays_while_events_refresh_the_page(screen: Screen, client: Client, ns: str):
    client.create_topic("a")
    transaction = held(client, "slow", "a")
    with screen.scripted(NO_PREVIEW):
        screen.open("/console/transactions")
    screen.says("connection", "live")
    click_in_row(screen, "tx-abort", transaction)
    screen.says("error", "not now")
    other = held(client, "other", "a")
    screen.one("tx-row", id=str(other.id))
    screen.says("error", "not now")
    screen.click("state-committed")
    screen.gone("error")
    for each in (transaction, other):
        client.transactions.abort(each)


def test_a_single_instance_cannot_be_drained_and_says_why(screen: Screen):
    screen.open("/console/cluster", "instance-row")
    screen.says("instance-row", "alone", "64 of 64", "serving")
    drain = screen.one("drain")
    assert not drain.is_enabled()
    assert "single instance" in str(drain.get_attribute("title"))
    assert not screen.one("pin").is_enabled()
    screen.says("stat-ready", "yes")


#: Makes the daemon look like one of two instances; ``window.changed`` collects requests for changes.
TWO = """const real = window.fetch;
window.changed = [];
const members = ["a", "b"].map(name => ({name, address: name + ":7420", weight: 100, leaving: false, drained: false,
  slices: 32, topicsOpen: 3, security: null}));
const pins = {};
window.fetch = async (path, more) => {
  const {pathname, searchParams} = new URL(path, location.href);
  if (!pathname.startsWith("/v1/cluster")) return real(path, more);
  const [what, name, topic] = pathname.split("/").slice(3);
  const answer = value => new Response(JSON.stringify(value), {headers: {"Content-Type": "application/json"}});
  if ((more.method ?? "GET") === "GET") {
    return answer({instance: "a", address: "a:7420", zookeeper: {connected: true, since: 0}, instances: members, pins,
      transactions: "a", topic: null});
  }
  const effect = {moves: {topicsOpen: 3}};
  if (searchParams.has("dryRun")) return answer({dryRun: true, effect, warnings: []});
  window.changed.push(`${more.method} ${pathname} ${more.body ?? ""}`.trim());
  if (what === "instances") members.find(each => each.name === name).drained = more.method === "PUT";
  else if (more.method === "PUT") pins[`${name}:${topic}`] = JSON.parse(more.body).instance;
  else delete pins[`${name}:${topic}`];
  return answer(more.method === "PUT" && what === "instances" ? {effect, warnings: []} : {});
};"""


def test_instances_are_drained_and_undrained_and_topics_pinned_and_unpinned_after_confirmation(screen: Screen):
    added = screen.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": TWO})
    try:
        screen.open("/console/cluster", "instance-row")
        screen.click_in("css selector", "[data-testid=drain]", "instance-row", instance="b")
        screen.says(
            "confirm-text", "All its topics move to the other instances", "3 open topics move to other instances."
        )
        screen.click("cancel")
        screen.gone("confirm")
        assert screen.run("return window.changed") == []
        screen.click_in("css selector", "[data-testid=drain]", "instance-row", instance="b")
        screen.click("confirm")
        screen.says("toast", "b is being drained", "3 open topics moving to other instances")
        screen.says("instance-row", "drained", instance="b")
        screen.click("undrain")
        screen.says("confirm-text", "Topics move back to it")
        screen.click("confirm")
        screen.says("instance-row", "serving", instance="b")
        screen.gone("confirm")  # until the page has loaded, the dialog is open and gets the keys that are typed
        screen.type("pin-topic", "shop:orders")
        screen.choose("pin-instance", "b")
        screen.click("pin")
        screen.click("confirm")
        screen.says("pin-row", "shop:orders", "b")
        screen.click("unpin")
        screen.click("confirm")
        screen.gone("pin-row")
        assert screen.run("return window.changed") == [
            "PUT /v1/cluster/instances/b/drain",
            "DELETE /v1/cluster/instances/b/drain",
            'PUT /v1/cluster/pins/shop/orders {"instance":"b"}',
            "DELETE /v1/cluster/pins/shop/orders",
        ]
    finally:
        screen.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
