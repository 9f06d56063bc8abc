"""``plainsong tx``, transactional publishing and committed reading, against a real daemon."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from plainsong import Client
from plainsong.cli import tx
from plainsong.cli.command import Exit
from plainsong.errors import TransactionNotInProgress
from tests.cli.conftest import Said
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli, running: Daemon) -> Iterator[Client]:
    """A client in the namespace of the command line, with a topic; no transaction is open before the test or after it.

    There may be invalid ones: transactions that another test left open time out on a busy machine.
    """
    client = Client.from_environment()
    client.create_topic("orders")
    _end_all(client)
    yield client
    _end_all(client)
    client.close()


def _end_all(client: Client) -> None:
    for each in client.transactions.list(state="in_progress"):
        client.transactions.abort(each.id)


def published(client: Client, *payloads: bytes, client_id: str = "shop") -> int:
    """Publish payloads in a new transaction and return its id."""
    transaction = client.transactions.begin(client_id=client_id)
    client.publish("orders", list(payloads), transaction=transaction)
    return transaction.id


# --- listing -----------------------------------------------------------------------------------------


def test_ls_names_client_age_time_left_topics_and_hidden_messages(cli: Cli, client: Client):
    number = published(client, b"a", b"b")
    heading, *rows = cli("tx", "ls").lines  # includes invalid transactions of other tests
    (row,) = [each for each in rows if str(number) in each]
    assert heading.split() == ["CLIENT", "ID", "STATE", "TYPE", "AGE", "LEFT", "TOPICS", "HIDDEN"]
    assert row.split()[:5] == ["shop", str(number), "in", "progress", "short"]
    assert row.split()[-2:] == ["1", "2"]
    (told,) = [each for each in cli("tx", "ls", "--json").json if each["id"] == str(number)]
    assert (told["id"], told["clientId"], told["state"], told["hiddenMessages"]) == (
        str(number),
        "shop",
        "in_progress",
        2,
    )
    assert told["topics"] == [f"{client.namespace}:orders"]
    assert cli("tx", "ls", "--state", "committed", "--limit", "1000", "--json").json is not None
    assert str(number) not in cli("tx", "ls", "--state", "aborted").out


def test_ls_continues_after_a_transaction_and_names_the_one_to_continue_after(cli: Cli, client: Client):
    numbers = [str(client.transactions.begin().id) for _ in range(3)]
    before = str(int(numbers[0]) - 1)
    first = cli("tx", "ls", "--state", "in_progress", "--after", before, "--limit", "2")
    assert f"--after {numbers[1]}" in first.err
    rest = cli("tx", "ls", "--state", "in_progress", "--after", numbers[1], "--json")
    assert [each["id"] for each in rest.json] == numbers[2:]
    assert "--after" not in cli("tx", "ls", "--state", "in_progress", "--after", numbers[1]).err


def test_blame_finds_a_transaction_beyond_the_first_page(cli: Cli, client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tx, "MAX_LIMIT", 2)
    begun = [client.transactions.begin() for _ in range(3)]
    holder, other = published(client, b"a"), published(client, b"b")
    told = cli("tx", "blame", "orders").out
    assert str(holder) in told
    assert str(other) in told
    for each in begun:
        client.transactions.abort(each)


def test_show_prints_transactions_in_every_state(cli: Cli, client: Client):
    number = published(client, b"a")
    assert "in progress" in cli("tx", "show", str(number)).out
    assert "times out" in cli("tx", "show", str(number)).out
    client.transactions.commit(number)
    assert cli("tx", "show", str(number), "--json").json["state"] == "committed"
    assert "remembered" in cli("tx", "show", str(number)).out
    assert "this daemon did not begin it" in cli("tx", "show", "17").out
    assert cli("tx", "show", "17", "--json").json["state"] == "unknown"


@pytest.mark.parametrize("wrong", ["x", "0", "-1", "9" * 30, "9223372036854775808"])
def test_an_invalid_id_is_refused(cli: Cli, wrong: str):
    said = cli("tx", "show", "--", wrong, code=Exit.USAGE)
    assert "invalid transaction id" in said.err


def test_blame_names_the_transaction_that_holds_a_topic_with_its_age_and_end(cli: Cli, client: Client):
    client.publish("orders", b"before")
    first, second = published(client, b"a"), published(client, b"b", client_id="other")
    client.publish("orders", b"behind")
    said = cli("tx", "blame", "orders")
    assert said.lines[0].startswith(f"readers of orders are held by transaction {first} since ")
    assert said.lines[0].endswith(", 3 messages hidden")
    assert "client       shop" in said.out
    assert f"plainsong tx abort {first}" in said.out
    assert said.lines[-1].split()[:2] == ["other", str(second)]
    told = cli("tx", "blame", "orders", "--json").json
    assert (told["heldBy"], told["hiddenMessages"], told["hiddenMore"]) == (str(first), 3, False)
    assert told["transaction"]["clientId"] == "shop"
    assert [each["id"] for each in told["others"]] == [str(second)]


def test_a_piped_list_shows_the_whole_name_of_the_client(cli: Cli, client: Client, monkeypatch):
    name = "billing-service-" + "x" * 60
    published(client, b"a", client_id=name)
    assert name in cli("tx", "ls").out
    monkeypatch.setenv("COLUMNS", "80")
    assert name not in cli("tx", "ls").out


def test_a_held_poll_says_so_without_a_terminal(cli: Cli, client: Client):
    client.publish("orders", b"before")
    pointer = published(client, b"a")
    client.publish("orders", b"behind")
    said = cli("poll", "orders")
    assert said.out == "before\n"
    assert str(pointer) in said.err


def test_blame_reports_that_nothing_holds_a_topic(cli: Cli, client: Client):
    assert cli("tx", "blame", "orders").out == "no transaction holds readers of orders\n"
    assert cli("tx", "blame", "orders", "--json").json["heldBy"] is None
    assert "did you mean 'orders'?" in cli("tx", "blame", "order", code=Exit.NOT_FOUND).err


def test_blame_finds_the_transaction_of_a_checkpoint(cli: Cli, client: Client):
    begun = client.transactions.begin(client_id="shop")
    later = client.transactions.checkpoint(begun)
    client.publish("orders", b"a", transaction=later)
    told = cli("tx", "blame", "orders", "--json").json
    assert (told["heldBy"], told["transaction"]["id"]) == (str(later.write_pointer), str(begun.id))
    assert "since its last checkpoint" in cli("tx", "blame", "orders").out


def test_a_pointer_that_this_daemon_did_not_issue_holds_no_reader(cli: Cli, client: Client):
    pointer = client.transactions.begin().id + 3_600_000 * 1_000_000  # from a service whose clock is ahead
    with pytest.raises(TransactionNotInProgress, match="not issued by this service"):
        client.publish("orders", b"a", transaction=pointer)
    assert cli("tx", "blame", "orders").out == "no transaction holds readers of orders\n"


# --- ending ------------------------------------------------------------------------------------------


def test_abort_rolls_back_and_releases_readers(cli: Cli, client: Client):
    number = published(client, b"a")
    client.publish("orders", b"behind")
    assert "confirmation needed, but stdin is not a terminal" in cli("tx", "abort", str(number), code=Exit.USAGE).err
    assert cli("tx", "abort", str(number), "--yes").lines == [
        f"{number} is aborted: its messages are rolled back",
        f"  removed 1 message of {client.namespace}:orders",
        "  released 1 message and 0 waiting polls",
    ]
    assert cli("poll", "orders", "--isolation", "committed").lines == ["behind"]
    again = cli("tx", "abort", str(number), "-y", "--json").json
    assert (again["id"], again["state"], again["effect"]["topics"]) == (str(number), "aborted", [])


def test_a_committed_transaction_cannot_be_aborted(cli: Cli, client: Client):
    number = published(client, b"a")
    client.transactions.commit(number)
    said = cli("tx", "abort", str(number), "--yes", "--json", code=Exit.FAILED)
    assert json.loads(said.err)["code"] == "transaction_not_in_progress"


def test_ending_an_unknown_transaction_is_not_found(cli: Cli, client: Client):
    for verb in ("abort", "invalidate"):
        assert cli("tx", verb, "17", "--yes", code=Exit.NOT_FOUND).err.startswith("error: ")


def test_invalidate_hides_and_truncate_removes_from_the_list(cli: Cli, client: Client):
    first, second = published(client, b"a"), published(client, b"b")
    for number in (first, second):
        assert f"{number} is invalid" in cli("tx", "invalidate", str(number), "--yes").out
    invalid = [each["id"] for each in cli("tx", "ls", "--state", "invalid", "--json").json]
    assert {str(first), str(second)} <= set(invalid)
    assert cli("tx", "truncate", str(first), "--yes").out == "removed 1 from the list\n"
    assert cli("tx", "truncate", "--before", "now", "--yes", "--json").json["removed"] >= 1
    assert cli("poll", "orders", "--isolation", "committed").out == ""


@pytest.mark.parametrize("arguments", [(), ("17", "--before", "now"), ("--before", "oldest"), ("--before", "0" * 40)])
def test_truncate_requires_ids_or_a_time(cli: Cli, arguments: tuple[str, ...]):
    assert cli("tx", "truncate", *arguments, "--yes", code=Exit.USAGE).err


# --- pruning -----------------------------------------------------------------------------------------


def test_pruning_explains_the_list_of_a_daemon(cli: Cli, client: Client):
    number = published(client, b"a")
    client.transactions.invalidate(number)
    out = cli("tx", "pruning").out
    for name in ("invalid", "last complete pass", "safe bound", "longest lifetime", "pruned automatically"):
        assert f"\n{name} " in f"\n{out}"
    assert f"{client.namespace}:orders" in out
    told = cli("tx", "pruning", "--json").json
    assert told["invalid"] >= 1
    assert isinstance(told["oldestInvalid"], str)
    client.transactions.truncate([number])


def test_pruning_says_why_nothing_is_pruned_automatically_and_how_to_do_it():
    figures = {
        "invalid": 3,
        "oldestInvalid": 1_700_000_000_000_000_000,
        "safeBound": 1_700_000_100_000_000_000,
        "lastPassMs": 1_700_000_200_000,
        "maxLifetimeMs": 0,
        "keptBecause": "transactions.max_lifetime_s is 0",
        "topics": 2,
        "oldestByTopic": [{"topic": "shop:orders", "oldestPointer": 1_700_000_300_000_000_000}],
    }
    lines = tx._explained(figures)
    text = "\n".join(lines)
    assert "no: transactions.max_lifetime_s is 0" in text
    assert "unlimited" in text
    assert "and 1 more topic" in text
    assert lines[-1] == "  plainsong tx truncate --before 2023-11-14T22:15:00.000Z"
    assert "Wait for a complete cleaning pass" in "\n".join(tx._explained({**figures, "safeBound": None}))
    assert "yes, after each complete pass" in "\n".join(tx._explained({**figures, "keptBecause": None}))


def test_recover_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("plainsong.sql")]:
        monkeypatch.delitem(sys.modules, name)
    import plainsong

    monkeypatch.delattr(plainsong, "sql", raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    said = cli("tx", "recover", "--database", "postgresql://h/d", code=Exit.FAILED)
    assert "plainsong.sql needs the package sqlalchemy" in said.err
    assert "pip install 'plainsong-client[sql]'" in said.err


# --- transactional publishes, committed reads --------------------------------------------------------


def test_publish_in_a_transaction_is_all_or_nothing(cli: Cli, client: Client, monkeypatch: pytest.MonkeyPatch):
    assert cli("publish", "orders", "--tx", "a", "b").out.startswith(
        "published 2 messages in one transaction, last id "
    )
    assert cli("poll", "orders", "--isolation", "committed").lines == ["a", "b"]
    lines = b'"c"\n{"payload": "d"\n'
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines), isatty=lambda: False, fileno=lambda: 99)
    )
    said = cli("publish", "orders", "--tx", "--ndjson", "--json", code=Exit.USAGE)
    assert "nothing was published" in said.err
    assert cli("poll", "orders", "--isolation", "committed").lines == ["a", "b"]
    told = cli("publish", "orders", "--tx", "--json", "e").json
    state = cli("tx", "show", told["transaction"], "--json").json
    assert (told["messages"], told["firstId"], state["state"]) == (1, told["lastId"], "committed")
    assert state["clientId"] == "plainsong publish"


def test_publish_in_a_transaction_that_is_interrupted_publishes_nothing(
    client: Client, cli: Cli, spawn: Callable[..., Any]
):
    process = spawn("publish", "orders", "--tx")
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()
    while not client.transactions.list(state="in_progress"):
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == Exit.INTERRUPTED
    assert b"nothing was published" in err
    assert cli("poll", "orders", "--isolation", "committed").out == ""


def test_a_missing_topic_ends_the_transaction_of_publish(cli: Cli, client: Client):
    said = cli("publish", "order", "--tx", "a", code=Exit.NOT_FOUND)
    assert "did you mean 'orders'?" in said.err
    assert client.transactions.list(state="in_progress") == []


def test_tx_timeout_requires_tx(cli: Cli):
    assert "--tx-timeout needs --tx" in cli("publish", "orders", "--tx-timeout", "1m", "a", code=Exit.USAGE).err


def test_committed_readers_end_at_the_first_undecided_message(cli: Cli, client: Client):
    client.publish("orders", b"before")
    number = published(client, b"a")
    client.publish("orders", b"behind")
    assert cli("poll", "orders", "--isolation", "uncommitted").lines == ["before", "a", "behind"]
    assert cli("poll", "orders", "--isolation", "uncommitted", "--last", "1").lines == ["behind"]
    assert cli("poll", "orders", "--last", "1").lines == ["before"]
    assert cli("poll", "orders", "--until-empty").lines == ["before"]
    assert cli("tail", "orders", "--from", "oldest", "--limit", "1").lines == ["before"]
    client.transactions.commit(number)
    assert cli("poll", "orders", "--isolation", "committed").lines == ["before", "a", "behind"]


def test_peek_and_stats_show_undecided_messages(cli: Cli, client: Client):
    done, open_ = published(client, b"a"), published(client, b"b")
    client.transactions.commit(done)
    client.publish("orders", b"c")
    states = [(row["state"], row["writePointer"]) for row in cli("peek", "orders", "--json").rows]
    assert states == [("committed", str(done)), ("open", str(open_)), ("plain", None)]
    assert f"open by {open_}" in cli("peek", "orders").out
    told = cli("stats", "orders", "--json").json
    assert (told["visible"], told["hidden"], told["openTransactions"]) == (1, 2, 1)
    assert cli("stats").lines[1].split()[-2:] == ["1", "2"]
    client.transactions.abort(open_)
    assert cli("peek", "orders", "--json").rows[1]["state"] == "rolled-back"


def test_a_client_id_cannot_control_the_terminal(cli: Cli, client: Client):
    number = published(client, b"a", client_id="shop\x1b[31m\n0 committed")
    for words in (("ls",), ("show", str(number)), ("blame", "orders")):
        shown = cli("tx", *words).out
        assert "\x1b" not in shown
        assert "\n0 committed" not in shown
        assert "shop" in shown


def test_top_and_stats_show_what_an_open_transaction_hides(cli: Cli, client: Client):
    pointer = published(client, b"undecided")
    client.publish("orders", [b"behind it"])
    for verb in (("top", "--once"), ("stats",)):
        assert cli(*verb).lines[-1].split()[-2:] == ["1", "2"]
    assert cli("top", "--once", "--json").json["topics"][0]["hidden"] == 2
    client.transactions.abort(pointer)
    assert cli("stats").lines[-1].split()[-2:] == ["0", "0"]
