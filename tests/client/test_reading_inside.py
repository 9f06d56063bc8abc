"""Committed reads, and reads inside a transaction, which saves effects and position together or not at all."""

# ruff: noqa: PT012 - what is tested is a block

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_reading import FakeDaemon, payloads
from test_transactions import Rows, committed

from plainsong import Client, FilePosition, Held, ServerPosition, Transaction, calls
from plainsong.calls import Answer
from plainsong.errors import CommittedWithErrors, PositionNotSaved
from plainsong.messages import Origin
from plainsong.positions import read_plan
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.errors import InvalidParameter, TransactionsUnavailable
from plainsong.protocol.requests import PollRequest
from tests.client.simulation import Simulation, kind, problem, said
from tests.daemon.harness import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class RowPosition:
    """A position stored with the rows of a participant."""

    transactional = True

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.kept: dict[str, bytes] = {}
        self.saved_before_commit: list[bool] = []
        rows.post_tx_commit = self._keep  # type: ignore[method-assign]
        self.waiting: dict[str, bytes] = {}

    def load(self, daemon: Any, topics: Iterable[str]) -> dict[str, bytes]:
        return {topic: self.kept[topic] for topic in topics if topic in self.kept}

    def save(self, daemon: Any, positions: Mapping[str, bytes]) -> None:
        self.saved_before_commit.append(self.rows.calls[-1] != "commit")
        self.waiting = dict(positions)

    def _keep(self) -> None:
        self.kept.update(self.waiting)


# --- committed -----------------------------------------------------------------------------------


def test_a_committed_reader_stops_at_the_first_undecided_message_and_names_its_transaction(client: Client, topic: str):
    client.publish(topic, b"before")
    transaction = client.transactions.begin(client_id="slow")
    client.publish(topic, [b"undecided"] * 2, transaction=transaction)
    client.publish(topic, b"behind")
    page = client.poll(topic, isolation="committed")
    assert ([message.payload for message in page], page.end) == ([b"before"], "held")
    assert page.held.write_pointer == transaction.write_pointer
    assert (page.held.hidden_messages, page.held.hidden_more) == (3, False)
    (seen,) = client.admin.messages(topic, limit=2)[1:]
    assert page.held.since_ms == seen.publish_time_ms
    assert client.transactions.get(page.held.write_pointer).client_id == "slow"
    reader = client.read(topic, isolation="committed")
    assert [message.payload for message in reader] == [b"before"]
    assert reader.held == {topic: page.held}
    client.transactions.commit(transaction)
    assert [m.payload for m in client.poll(topic, page.last_id, isolation="committed")] == [b"undecided"] * 2 + [
        b"behind"
    ]


@pytest.mark.parametrize("decision", ["commit", "abort", "invalidate"])
def test_a_following_reader_continues_after_the_decision(client: Client, topic: str, decision: str):
    transaction = client.transactions.begin()
    client.publish(topic, b"first")
    client.publish(topic, b"undecided", transaction=transaction)
    client.publish(topic, b"last")

    def decide_when_parked() -> None:
        eventually("a poll is parked", lambda: client.admin.stats(topic)["parkedPolls"] or reader.held)
        getattr(client.transactions, decision)(transaction)

    reader = client.read(topic, isolation="committed", follow=True)
    thread = threading.Thread(target=decide_when_parked)
    thread.start()
    found = []
    for message in reader:
        found.append(message.payload)
        if message.payload == b"last":
            break
    thread.join()
    assert found == [b"first", *([b"undecided"] if decision == "commit" else []), b"last"]


def test_several_topics_are_followed_committed_each_in_its_order(client: Client):
    one, two = client.create_topic("follow-committed-1"), client.create_topic("follow-committed-2")
    transaction = client.transactions.begin()
    one.publish(b"1", transaction=transaction)
    one.publish(b"2")
    two.publish(b"3")
    reader = client.read(["follow-committed-1", "follow-committed-2"], isolation="committed", follow=True, limit=3)
    assert next(reader).payload == b"3"
    client.transactions.commit(transaction)
    assert [message.payload for message in reader] == [b"1", b"2"]


def test_a_reader_of_several_topics_names_the_transaction_that_holds_each():
    held = {"heldBy": 7, "heldSince": 5, "hiddenMessages": "1000+"}
    told = {
        "a": {"messages": [], "lastId": None, "end": "held", **held},
        "b": {"messages": [], "lastId": None, "end": "end"},
    }
    origins = {topic: Origin(topic) for topic in told}
    wanted = {topic: PollRequest(isolation="committed") for topic in told}
    call = calls.poll_many("default", origins, wanted, wait_ms=5, limit=9, isolation="committed")
    asked = json.loads(call.request.body)
    assert asked["isolation"] == "committed"
    assert not any("isolation" in each for each in asked["topics"].values())
    pages = call.read(said({"topics": told}))
    assert pages["a"].held == Held(7, 5, 1000, hidden_more=True)
    assert pages["b"].held is None


def test_an_invalid_isolation_is_refused(client: Client, topic: str):
    for call in (client.poll, client.read):
        with pytest.raises(InvalidParameter, match="isolation"):
            call(topic, isolation="serializable")
        with client.transaction(), pytest.raises(InvalidParameter, match="snapshot"):
            call(topic, isolation="committed")


# --- inside a transaction ------------------------------------------------------------------------


def test_a_transaction_reads_what_was_committed_before_it_began(client: Client, topic: str):
    client.publish(topic, b"old", transaction="own")
    with client.transaction():
        client.publish(topic, b"new", transaction="own")
        assert [message.payload for message in client.read(topic)] == [b"old"]
        page = client.poll(topic)
        assert (page.end, len(page)) == ("held", 1)
    assert committed(client, topic) == [b"old", b"new"]


def test_effects_and_position_are_committed_together(client: Client, topic: str):
    out = client.create_topic(topic + "-out").name
    client.publish(topic, [b"%d" % n for n in range(10)])
    rows = Rows()
    position = RowPosition(rows)

    def copy(limit: int, fails: bool = False) -> None:
        with client.transaction([rows]):
            for message in client.read(topic, position=position, limit=limit):
                client.publish(out, message.payload)
            if fails:
                raise KeyError

    copy(4)
    assert position.saved_before_commit == [True]
    with pytest.raises(KeyError):
        copy(3, fails=True)
    copy(3)
    copy(100)
    copy(100)
    assert committed(client, out) == [b"%d" % n for n in range(10)]


@pytest.mark.parametrize("kind", ["file", "server"])
def test_other_positions_are_saved_after_the_commit_and_not_without_one(
    client: Client, topic: str, kind: str, tmp_path: Path
):
    def position() -> Any:
        return FilePosition(tmp_path / "position") if kind == "file" else ServerPosition("inside")

    client.publish(topic, [b"%d" % n for n in range(6)])
    with pytest.raises(KeyError), client.transaction() as tx:
        assert len(list(tx.read(topic, position=position(), limit=4))) == 4
        raise KeyError
    with client.transaction():
        reader = client.read(topic, position=position(), limit=4, save_every=1)
        assert [message.payload for message in reader] == [b"0", b"1", b"2", b"3"]
        assert next(client.read(topic, position=position(), direct=True)).payload == b"0"
    with client.transaction(), client.read(topic, position=position()) as reader:
        for message in reader:
            assert message.payload == b"4"
            break
    assert [message.payload for message in client.read(topic, position=position())] == [b"5"]


def test_leaving_the_loop_delivers_the_current_message_again(client: Client, topic: str, tmp_path: Path):
    position = FilePosition(tmp_path / "position")
    client.publish(topic, [b"a", b"b", b"c"])
    with client.transaction():
        for message in client.read(topic, position=position):
            if message.payload == b"b":
                break
    assert [message.payload for message in client.read(topic, position=position)] == [b"b", b"c"]


def test_a_transaction_that_is_tried_again_reads_the_same_messages(client: Client, topic: str, tmp_path: Path):
    out = client.create_topic(topic + "-out").name
    client.publish(topic, [b"1", b"2", b"3"])
    position = FilePosition(tmp_path / "position")
    seen: list[list[bytes]] = []

    def work(tx: Any) -> None:
        seen.append([message.payload for message in client.read(topic, position=position)])
        client.publish(out, seen[-1])
        if len(seen) < 3:
            other = client.transactions.begin()
            client.transactions.prepare(other, [b"read again"])
            client.transactions.commit(other)

    client.run_in_transaction(work, participants=[Rows([b"read again"])])
    assert seen == [[b"1", b"2", b"3"]] * 3
    assert committed(client, out) == [b"1", b"2", b"3"]
    assert not list(client.read(topic, position=position))


def test_a_position_that_cannot_be_written_into_the_transaction_rolls_it_back(client: Client, topic: str):
    client.publish(topic, b"m")
    rows = Rows()
    position = RowPosition(rows)

    def failing(daemon: Any, positions: Any) -> None:
        raise PositionNotSaved("no row")

    position.save = failing  # type: ignore[method-assign]
    with pytest.raises(PositionNotSaved), client.transaction([rows]):
        client.publish(topic, [message.payload for message in client.read(topic, position=position)])
    assert rows.calls == ["start", "rollback"]
    assert committed(client, topic) == [b"m"]


def test_a_position_that_cannot_be_saved_after_the_commit_is_reported_and_the_commit_stands(
    client: Client, topic: str, tmp_path: Path
):
    client.publish(topic, b"m")
    with pytest.raises(CommittedWithErrors, match="saving positions"), client.transaction() as tx:
        for _ in client.read(topic, position=FilePosition(tmp_path / "no-such-directory" / "position")):
            client.publish(topic, b"effect")
    assert tx.state == "committed"
    assert committed(client, topic) == [b"m", b"effect"]


# --- simulated time ------------------------------------------------------------------------------


def reading_inside(simulation: Simulation, timeout_s: float, **options: Any) -> Any:
    given = {
        "until": None,
        "limit": None,
        "serializer": None,
        "page_messages": 5,
        "save_every": 1,
        "save_interval_s": 9,
    }
    plan = read_plan("t", None, **{"follow": False, **given, **options})
    transaction = Transaction(5, 5, b"snapshot", timeout_s=timeout_s, clock=lambda: simulation.now_s)
    return kind().Reading(simulation.channel(), plan, None, lambda: transaction)


@pytest.mark.usefixtures("both_clients")
def test_reading_inside_ends_after_90_percent_of_the_time():
    daemon = FakeDaemon(t=[b"%d" % n for n in range(100)])
    simulation = Simulation(daemon, took_s=2)
    reading = reading_inside(simulation, timeout_s=10)
    pages = []
    while (page := simulation.run(reading.next_page)) is not None:
        pages.append(page)
    assert len(pages) == 5
    assert reading.is_time_up()
    assert all(AVRO_2.decode_poll(send.request.body).transaction == b"snapshot" for send in simulation.sent)


@pytest.mark.usefixtures("both_clients")
def test_following_inside_waits_no_longer_than_that():
    daemon = FakeDaemon(t=[b"only"])
    simulation = Simulation(daemon)

    def wait() -> None:
        wait_ms = AVRO_2.decode_poll(simulation.sent[-1].request.body).wait_ms
        assert wait_ms is not None
        simulation.now_s += wait_ms / 1000

    daemon.on_wait = wait
    reading = reading_inside(simulation, timeout_s=10, follow=True)
    assert payloads(simulation.run(reading.next_page)) == [b"only"]
    assert simulation.run(reading.next_page) is None
    assert simulation.now_s == pytest.approx(9)


@pytest.mark.usefixtures("both_clients")
def test_a_held_read_inside_stays_held_and_is_not_repeated_all_the_time():
    held = {"content-type": "application/vnd.plainsong.frames; version=2", "plainsong-end": "held"}
    simulation = Simulation(
        lambda _: Answer(
            200, {**held, "plainsong-held-by": "7", "plainsong-hidden-messages": "1000+"}, b"\xff" * 20 + bytes(4)
        )
    )
    reading = reading_inside(simulation, timeout_s=10, follow=True)
    assert simulation.run(reading.next_page) is None
    assert len(simulation.sent) < 5
    assert (reading.held["t"].write_pointer, reading.held["t"].hidden_messages, reading.held["t"].hidden_more) == (
        7,
        1000,
        True,
    )


@pytest.mark.usefixtures("both_clients")
def test_a_committed_follower_survives_a_reload_of_the_service():
    daemon = FakeDaemon(t=[b"one"])
    simulation = Simulation(daemon)
    given = {"until": None, "limit": 2, "serializer": None, "page_messages": 5, "save_every": 1, "save_interval_s": 9}
    plan = read_plan("t", None, follow=True, isolation="committed", **given)
    reading = kind().Reading(simulation.channel(), plan, None)
    assert len(simulation.run(reading.next_page)) == 1
    daemon.next = [problem(503, "transactions_unavailable")] * 3
    daemon.topics["t"].append(b"two")
    assert [message.payload for message in simulation.run(reading.next_page)] == [b"two"]


@pytest.mark.usefixtures("both_clients")
def test_a_committed_follower_gives_up_on_a_service_that_never_existed_or_stays_unavailable():
    given = {"until": None, "limit": 2, "serializer": None, "page_messages": 5, "save_every": 1, "save_interval_s": 9}
    plan = read_plan("t", None, follow=True, isolation="committed", **given)
    unavailable = problem(503, "transactions_unavailable")
    simulation = Simulation(lambda _: unavailable)
    with pytest.raises(TransactionsUnavailable):
        simulation.run(kind().Reading(simulation.channel(), plan, None).next_page)
    daemon = FakeDaemon(t=[b"one"])
    simulation = Simulation(daemon)
    reading = kind().Reading(simulation.channel(), plan, None)
    simulation.run(reading.next_page)
    daemon.next = [unavailable] * 1000
    with pytest.raises(TransactionsUnavailable):
        simulation.run(reading.next_page)
    assert 60 <= simulation.now_s < 70
