"""Transactions of the client for threads, against the real daemon: rows and messages both commit, or neither."""

# ruff: noqa: PT012 - what is tested is a block

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest

from plainsong import Transaction
from plainsong.errors import (
    CommittedWithErrors,
    NotEncodable,
    NoTransaction,
    TransactionFailed,
    TransactionInDoubt,
    TransactionInProgress,
    TransactionTimedOut,
)
from plainsong.protocol.errors import (
    AlreadyPublished,
    GenerationChanged,
    InvalidParameter,
    MessageTooLarge,
    NoMessages,
    RolledBack,
    TopicNotFound,
    TransactionConflict,
    TransactionNotInProgress,
    TransactionRefused,
    TransactionRequired,
)
from tests.client.client_under_test import Client, only_threads
from tests.client.proxy import Proxy
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


class Rows:
    """A participant with rows of its own, which appear at the commit."""

    name = "rows"

    def __init__(self, changes: list[bytes] | None = None) -> None:
        self.changes = changes or []
        self.visible: list[str] = []
        self.written: list[str] = []
        self.calls: list[str] = []
        self.refuses = False

    def start_tx(self, transaction: Transaction) -> None:
        self.written = []
        self.calls.append("start")

    def update_tx(self, transaction: Transaction) -> None:
        self.calls.append("update")

    def tx_changes(self) -> list[bytes]:
        return self.changes

    def commit_tx(self) -> bool:
        self.calls.append("commit")
        return not self.refuses

    def post_tx_commit(self) -> None:
        self.calls.append("post")
        self.visible += self.written

    def rollback_tx(self) -> bool:
        self.calls.append("rollback")
        self.written = []
        return True


def committed(client: Client, topic: str) -> list[bytes]:
    return [message.payload for message in client.read(topic, isolation="committed", direct=True)]


# --- a block -------------------------------------------------------------------------------------


def test_rows_and_messages_appear_together(client: Client, topic: str):
    rows = Rows()
    with client.transaction(participants=[rows], client_id="test") as tx:
        rows.written.append("row")
        tx.publish(topic, b"message")
        assert committed(client, topic) == rows.visible == []
        (open_one,) = [each for each in client.transactions.list() if each.id == tx.transaction.id]
        assert (open_one.state, open_one.client_id, open_one.type) == ("in_progress", "test", "short")
    assert (committed(client, topic), rows.visible) == ([b"message"], ["row"])
    assert rows.calls == ["start", "commit", "post"]
    assert client.transactions.get(open_one.id).state == tx.state == "committed"


def test_the_list_of_transactions_continues_after_an_id(client: Client):
    begun = [client.transactions.begin() for _ in range(3)]
    found = client.transactions.list(limit=2, after=begun[0].id - 1)
    assert [each.id for each in found] == [each.id for each in begun[:2]]
    (last,) = client.transactions.list(after=begun[1])
    assert last.id == begun[2].id
    for each in begun:
        client.transactions.abort(each)


def test_an_exception_rolls_back_both_and_is_raised(client: Client, topic: str):
    rows = Rows()
    with pytest.raises(ZeroDivisionError), client.transaction([rows]) as tx:
        rows.written.append("row")
        tx.publish(topic, b"message")
        raise ZeroDivisionError
    assert (committed(client, topic), rows.visible, rows.calls) == ([], [], ["start", "rollback"])
    assert tx.state == "aborted"
    assert not client.poll(topic)


def test_a_participant_that_refuses_rolls_back_the_messages(client: Client, topic: str):
    rows = Rows()
    rows.refuses = True
    with pytest.raises(TransactionFailed, match="rows"), client.transaction([rows]) as tx:
        tx.publish(topic, b"message")
    assert not client.poll(topic)


def test_calls_of_the_client_take_part_inside_the_block(client: Client, topic: str):
    client.publish(topic, b"before")
    with client.transaction() as tx:
        receipt = client.publish(topic, [b"one", b"two"])
        assert (receipt.first_id, receipt.last_id, receipt.count) == (None, None, 2)
        client.topic(topic).publish(b"three")
        assert [message.payload for message in client.poll(topic)] == [b"before"]
        assert [message.payload for message in client.read(topic)] == [b"before"]
        assert [message.payload for message in tx.poll(topic)] == [b"before"]
        assert [message.payload for message in tx.read(topic)] == [b"before"]
    assert committed(client, topic) == [b"before", b"one", b"two", b"three"]
    page = client.poll(topic, isolation="committed")
    (told,) = tx.receipts[topic]
    assert (told.first_id, told.last_id, told.count) == (page[1].id, page[3].id, 3)


def test_direct_calls_stay_outside_and_survive_an_abort(client: Client, topic: str):
    with pytest.raises(RuntimeError, match="broken"), client.transaction():
        client.publish(topic, b"inside")
        client.publish(topic, b"it failed", direct=True)
        assert [message.payload for message in client.poll(topic, direct=True)] == [b"it failed"]
        raise RuntimeError("broken")
    assert committed(client, topic) == [b"it failed"]


def test_a_publish_inside_is_checked_at_once_where_possible(client: Client, topic: str):
    with client.transaction():
        with pytest.raises(NotEncodable):
            client.publish(topic, "text")
        client.publish(topic, b"bytes")
    assert committed(client, topic) == [b"bytes"]


def test_a_missing_topic_rolls_back_everything(client: Client, topic: str):
    with pytest.raises(TopicNotFound) as caught, client.transaction() as tx:
        tx.publish(topic, b"m")
        tx.publish("not-there", b"m")
    assert "the transaction was undone" in caught.value.__notes__
    assert committed(client, topic) == []


def test_transactions_do_not_nest(client: Client, shared_url: str, topic: str):
    with client.transaction() as tx:
        with pytest.raises(TransactionInProgress, match=str(tx.transaction.id)), client.transaction():
            pass
        with Client(shared_url) as another, another.transaction() as other:
            other.publish(topic, b"another's")
            client.publish(topic, b"ours")
    assert committed(client, topic) == [b"another's", b"ours"]


def test_a_transaction_can_be_ended_inside_its_block(client: Client, topic: str):
    with client.transaction() as tx:
        client.publish(topic, b"m")
        assert tx.abort() == "aborted"
        with pytest.raises(NoTransaction, match="aborted"):
            client.publish(topic, b"m")
        with pytest.raises(NoTransaction):
            client.poll(topic)
        with pytest.raises(NoTransaction):
            client.read(topic)
        client.publish(topic, b"outside", direct=True)
    assert committed(client, topic) == [b"outside"]


def test_other_threads_are_outside_unless_they_run_in_a_copy_of_the_context(client: Client, topic: str):
    only_threads("tasks are inside")
    with client.transaction():
        for run in (client.publish, contextvars.copy_context().run):
            arguments = (topic, b"outside") if run == client.publish else (client.publish, topic, b"inside")
            thread = threading.Thread(target=run, args=arguments)
            thread.start()
            thread.join()
        assert [message.payload for message in client.poll(topic, direct=True)] == [b"outside"]
    assert committed(client, topic) == [b"outside", b"inside"]


def test_threads_may_publish_in_one_transaction_and_each_keeps_its_order(client: Client, topic: str):
    def publish(tx: Any, who: int) -> None:
        for n in range(300):
            tx.publish(topic, b"%d:%d" % (who, n))

    with client.transaction(buffer_messages=50) as tx:
        threads = [threading.Thread(target=publish, args=(tx, who)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [payload.split(b":") for payload in committed(client, topic)]
    for who in range(4):
        assert [int(n) for each, n in found if int(each) == who] == list(range(300))


def test_start_and_finish_by_hand_do_the_same_without_a_block(client: Client, topic: str):
    context = client.transaction()
    context.start()
    context.publish(topic, b"inside")
    client.publish(topic, b"outside")
    context.finish()
    assert committed(client, topic) == [b"outside", b"inside"]
    assert context.start().id
    assert context.abort() == "aborted"
    assert context.abort() is None


# --- many messages -------------------------------------------------------------------------------


def test_messages_beyond_the_buffer_are_stored_and_appear_at_once(client: Client, topic: str):
    with client.transaction(buffer_bytes=20_000, type="long") as tx:
        for n in range(4_000):
            tx.publish(topic, b"%d" % n)
        assert not client.poll(topic, direct=True)
        assert tx._messages.waiting_bytes <= 20_000
    assert committed(client, topic) == [b"%d" % n for n in range(4_000)]
    (receipt,) = tx.receipts[topic]
    assert (receipt.count, receipt.first_id, receipt.last_id) == (4_000, None, None)


def test_a_transaction_is_rolled_back_if_its_topic_is_recreated_after_a_part_was_stored(client: Client, topic: str):
    with pytest.raises(GenerationChanged), client.transaction(buffer_messages=10) as tx:
        for number in range(25):
            tx.publish(topic, b"%d" % number)
        client.admin.delete_topic(topic)
        client.create_topic(topic)
    assert client.poll(topic, isolation="committed").messages == []


def test_stored_messages_never_appear_after_an_abort(client: Client, topic: str):
    with pytest.raises(KeyError), client.transaction(buffer_messages=10):
        for n in range(100):
            client.publish(topic, b"%d" % n)
        raise KeyError
    client.publish(topic, b"plain")
    assert committed(client, topic) == [b"plain"]
    assert [message.payload for message in client.read(topic)] == [b"plain"]


def test_checkpoints_publish_under_one_pointer_each_and_all_appear_with_the_commit(client: Client, topic: str):
    rows = Rows()
    with client.transaction([rows]) as tx:
        first = tx.transaction
        tx.publish(topic, b"one")
        second = tx.checkpoint()
        assert second.write_pointer > first.write_pointer
        assert [message.payload for message in client.poll(topic)] == [b"one"]
        assert committed(client, topic) == []
        tx.publish(topic, b"two")
    assert rows.calls == ["start", "commit", "update", "commit", "post"]
    assert committed(client, topic) == [b"one", b"two"]


def test_an_abort_after_a_checkpoint_rolls_back_every_pointer(client: Client, topic: str):
    with pytest.raises(KeyError), client.transaction() as tx:
        tx.publish(topic, b"one")
        tx.checkpoint()
        tx.publish(topic, b"two")
        tx.checkpoint()
        raise KeyError
    assert committed(client, topic) == []
    assert {seen.state for seen in client.admin.messages(topic)} == {"rolled-back"}


def test_an_oversized_message_rolls_back_the_transaction(client: Client, topic: str):
    with pytest.raises(MessageTooLarge), client.transaction() as tx:
        tx.publish(topic, b"small")
        tx.publish(topic, bytes(9 << 20))
    assert committed(client, topic) == []


# --- one publish ---------------------------------------------------------------------------------


def test_a_publish_may_have_a_transaction_of_its_own(client: Client, topic: str):
    receipt = client.publish(topic, [b"one", b"two"], transaction="own")
    page = client.poll(topic, isolation="committed")
    assert (receipt.first_id, receipt.last_id, receipt.count) == (page[0].id, page[1].id, 2)
    with client.transaction() as tx:
        client.publish(topic, b"by itself", transaction="own")
        tx.abort()
    assert committed(client, topic) == [b"one", b"two", b"by itself"]
    with pytest.raises(NoMessages):
        client.publish(topic, [], transaction="own")
    with pytest.raises(TopicNotFound):
        client.publish("not-there", b"m", transaction="own")


def test_topics_may_require_or_refuse_transactions(client: Client):
    required = client.create_topic("tx-required", transactional="required")
    with pytest.raises(TransactionRequired):
        required.publish(b"plain")
    required.publish(b"m", transaction="own")
    assert committed(client, "tx-required") == [b"m"]
    disabled = client.create_topic("tx-disabled", transactional="disabled")
    with pytest.raises(TransactionRefused):
        disabled.publish(b"m", transaction="own")
    disabled.publish(b"plain")


# --- by hand -------------------------------------------------------------------------------------


def test_store_publish_and_rollback_work_under_a_transaction_begun_elsewhere(client: Client, topic: str):
    transaction = client.transactions.begin(client_id="by hand")
    client.store(topic, [b"s1", b"s2"], transaction)
    receipt = client.publish(topic, b"inline", transaction=transaction)
    assert receipt.first_id == receipt.last_id == client.poll(topic, isolation="uncommitted")[2].id
    assert [m.payload for m in client.poll(topic, transaction=transaction)] == [b"s1", b"s2", b"inline"]
    assert committed(client, topic) == []
    with pytest.raises(AlreadyPublished):
        client.store(topic, b"late", transaction)
    assert client.transactions.commit(transaction) == "committed"
    assert committed(client, topic) == [b"s1", b"s2", b"inline"]

    other = client.transactions.begin()
    client.store(topic, b"never", other.write_pointer)
    client.publish(topic, b"never", transaction=other.write_pointer)
    client.rollback(topic, other)
    client.rollback(topic, other)
    with pytest.raises(RolledBack):
        client.publish(topic, b"never", transaction=other)
    client.transactions.abort(other)
    assert committed(client, topic) == [b"s1", b"s2", b"inline"]
    assert not client.publish(topic, transaction=client.transactions.begin()).count


def test_the_service_can_be_administered(client: Client, topic: str):
    first, second = client.transactions.begin(timeout_s=60, client_id="first"), client.transactions.begin()
    assert first.remaining_s == pytest.approx(60, abs=5)
    assert second.remaining_s == pytest.approx(30, abs=5)
    client.transactions.prepare(first, [b"key"])
    assert client.transactions.commit(first) == client.transactions.commit(first.id) == "committed"
    with pytest.raises(TransactionConflict, match=r"key.*first"):
        client.transactions.prepare(second, [b"other", b"key"])
    client.publish(topic, b"m", transaction=second)
    assert client.transactions.invalidate(second) == "invalid"
    assert client.transactions.get(second).state == "invalid"
    (invalid,) = [each for each in client.transactions.list(state="invalid", limit=1000) if each.id == second.id]
    assert invalid.topics == (f"default:{topic}",)
    with pytest.raises(TransactionNotInProgress):
        client.transactions.commit(second)
    assert client.transactions.pruning().invalid >= 1
    assert client.transactions.truncate([second.id]) == 1
    assert client.transactions.truncate([second.id]) == 0
    assert committed(client, topic) == []
    known = client.transactions.get(5)
    assert (known.state, known.type) == ("unknown", None)
    for wrong in (0, -1, "5", None, 1 << 63, True):
        with pytest.raises(InvalidParameter):
            client.transactions.get(wrong)
    with pytest.raises(InvalidParameter, match="ids or before_ms"):
        client.transactions.truncate()
    for wrong in (0, 1.5, -3):
        with pytest.raises(InvalidParameter, match="timeout_s"):
            client.transaction(timeout_s=wrong).start()
    with pytest.raises(InvalidParameter, match="medium"):
        client.transaction(type="medium").start()


# --- time ----------------------------------------------------------------------------------------


def test_a_transaction_that_takes_too_long_raises(client: Client, topic: str):
    context = client.transaction(timeout_s=1)
    transaction = context.start()
    context.publish(topic, b"late")
    eventually("it timed out", lambda: client.transactions.get(transaction).state == "invalid")
    eventually("by our clock too", lambda: context.remaining_s == 0)
    with pytest.raises(TransactionTimedOut, match="its limit is 1 s") as caught:
        context.finish()
    assert "transactions.timeout_s" in caught.value.hint
    assert committed(client, topic) == []


# --- conflicts -----------------------------------------------------------------------------------


def test_of_two_transactions_with_a_common_key_the_later_one_is_rolled_back(client: Client, topic: str):
    context = client.transaction([Rows([b"same key"])])
    context.start()
    context.publish(topic, b"loses")
    with client.transaction([Rows([b"same key"])]) as tx:
        tx.publish(topic, b"wins")
    with pytest.raises(TransactionConflict, match="same key"):
        context.finish()
    assert committed(client, topic) == [b"wins"]


def test_a_function_is_called_again_after_a_conflict(client: Client, topic: str):
    attempts = []

    def work(tx: Any) -> str:
        attempts.append(tx.transaction.id)
        tx.publish(topic, b"%d" % len(attempts))
        if len(attempts) < 3:
            with_the_same = client.transactions.begin()
            client.transactions.prepare(with_the_same, [b"contended"])
            client.transactions.commit(with_the_same)
        return "done"

    assert client.run_in_transaction(work, participants=[Rows([b"contended"])]) == "done"
    assert len(set(attempts)) == 3
    assert committed(client, topic) == [b"3"]


def test_run_in_transaction_retries_only_conflicts_and_up_to_its_limit(client: Client, topic: str):
    calls = []

    def contended(tx: Any) -> None:
        calls.append(tx)
        other = client.transactions.begin()
        client.transactions.prepare(other, [b"k2"])
        client.transactions.commit(other)

    with pytest.raises(TransactionConflict) as caught:
        client.run_in_transaction(contended, participants=[Rows([b"k2"])], retries=2)
    assert len(calls) == 3
    assert "after 3 attempts" in caught.value.__notes__

    def broken(tx: Any) -> None:
        calls.append(tx)
        raise KeyError

    with pytest.raises(KeyError):
        client.run_in_transaction(broken)
    assert len(calls) == 4
    with pytest.raises(InvalidParameter, match="retries"):
        client.run_in_transaction(broken, retries=-1)


# --- lost answers --------------------------------------------------------------------------------


@pytest.fixture
def lossy(shared_address: tuple[str, int]) -> Any:
    """A client whose answers can get lost, and the proxy that loses them.

    Its time-out is short, so that swallowed answers cost little; a request that is slow for another reason is repeated.
    """
    with Proxy(shared_address) as proxy, Client(proxy.url, deadline_s=PATIENCE_S, request_timeout_s=1) as client:
        yield client, proxy


@pytest.fixture
def hasty(shared_address: tuple[str, int]) -> Any:
    """A client that gives up soon, and its proxy."""
    with Proxy(shared_address) as proxy, Client(proxy.url, deadline_s=9, request_timeout_s=4) as client:
        yield client, proxy


def test_a_lost_answer_to_a_publish_makes_the_transaction_invalid(client: Client, topic: str, lossy: Any):
    through, proxy = lossy
    context = through.transaction()
    transaction = context.start()
    context.publish(topic, b"m")
    proxy.after = {b"/publish": "lose"}
    with pytest.raises(TransactionFailed) as caught:
        context.finish()
    assert caught.value.outcome == "not-applied"
    assert context.state == client.transactions.get(transaction).state == "invalid"
    client.publish(topic, b"after")
    assert committed(client, topic) == [b"after"]


@pytest.mark.parametrize("mode", ["lose", "cut", "swallow"])
def test_lost_answers_to_stores_and_to_the_publish_of_stored_messages_cost_nothing(
    client: Client, topic: str, lossy: Any, mode: Any
):
    through, proxy = lossy
    with through.transaction(buffer_messages=20) as tx:
        for n in range(100):
            if n % 30 == 15:
                proxy.after = {b"/store": mode}
            tx.publish(topic, b"%d" % n)
        proxy.after[b"/publish"] = mode
    assert tx.state == "committed"
    assert not proxy.after
    assert committed(client, topic) == [b"%d" % n for n in range(100)]


@pytest.mark.parametrize("mode", ["lose", "cut", "swallow"])
def test_a_lost_answer_to_a_commit_is_queried(client: Client, topic: str, lossy: Any, mode: Any):
    through, proxy = lossy
    context = through.transaction()
    context.start()
    context.publish(topic, b"m")
    proxy.after = {b"/commit": mode}
    context.finish()
    assert proxy.lost
    assert context.state == "committed"
    assert committed(client, topic) == [b"m"]


def test_a_commit_without_any_answer_is_in_doubt_and_is_not_rolled_back(client: Client, topic: str, hasty: Any):
    through, proxy = hasty
    rows = Rows()
    context = through.transaction([rows])
    transaction = context.start()
    context.publish(topic, b"m")
    proxy.after = {b"/commit": "die"}
    with pytest.raises(TransactionInDoubt) as caught:
        context.finish()
    assert caught.value.transaction_id == transaction.id
    assert rows.calls == ["start", "commit"]
    assert client.transactions.get(caught.value.transaction_id).state == "committed"


def test_a_transaction_whose_abort_did_not_arrive_ends_at_its_timeout(client: Client, topic: str, hasty: Any):
    through, proxy = hasty
    context = through.transaction(timeout_s=10)
    transaction = context.start()
    context.publish(topic, b"m")
    proxy.mode = "refuse"
    with pytest.raises(KeyError) as caught:
        try:
            raise KeyError
        except KeyError as error:
            context.abort(error)
            raise
    assert any("ends at its time-out" in note for note in caught.value.__notes__)
    eventually("it timed out", lambda: client.transactions.get(transaction).state == "invalid")


def test_failures_after_the_commit_leave_it_committed(client: Client, topic: str):
    class Clumsy(Rows):
        def post_tx_commit(self) -> None:
            raise OSError("no room to celebrate")

    with pytest.raises(CommittedWithErrors, match="no room"), client.transaction([Clumsy()]) as tx:
        tx.publish(topic, b"m")
    assert committed(client, topic) == [b"m"]


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["commit", "post"])
def test_a_keyboard_interrupt_in_a_participant_leaves_nothing_open(client: Client, topic: str, when: str):
    only_threads("an event loop does not survive it")

    class Interrupted(Rows):
        def commit_tx(self) -> bool:
            if when == "commit":
                raise KeyboardInterrupt
            return True

        def post_tx_commit(self) -> None:
            raise KeyboardInterrupt

    context = client.transaction([Interrupted()])
    with pytest.raises(KeyboardInterrupt), context as tx:
        tx.publish(topic, b"m")
    assert context.state == {"commit": "aborted", "post": "committed"}[when]
    assert committed(client, topic) == ([] if when == "commit" else [b"m"])


def test_a_keyboard_interrupt_in_the_block_rolls_it_back(client: Client, topic: str):
    only_threads("an event loop does not survive it")
    with pytest.raises(KeyboardInterrupt), client.transaction() as tx:
        tx.publish(topic, b"m")
        raise KeyboardInterrupt
    assert tx.state == "aborted"
    assert committed(client, topic) == []
