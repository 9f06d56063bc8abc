"""Topics enlist before they write under a transaction; the service stores that, and a commit closes them first."""

from __future__ import annotations

import pytest
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import Overloaded, TransactionNotInProgress
from plainsong.protocol.names import TopicName
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import CompletePass
from plainsong.protocol.transactions.ledger_rows import ENLISTED, service_key

TOPIC, OTHER = TopicName("ns", "t"), TopicName("ns", "u")


def rows(at):
    return [key for key in at.rows if key.startswith(service_key(ENLISTED))]


def enlist(at, pointer, name=TOPIC):
    return at.ask(asks.Enlist(pointer, name))


def test_enlisted_topics_survive_a_crash_and_are_removed_by_the_decision():
    at = TransactionsInMemory()
    first, second = at.new(), at.new()
    assert enlist(at, first)
    assert enlist(at, first, OTHER)
    assert enlist(at, second)
    assert enlist(at, second)
    assert len(rows(at)) == 3
    at.load()
    assert at.core.enlisted(first) == {TOPIC, OTHER}
    at.core.freeze(first)
    assert at.ask(asks.Commit(first)).state == "committed"
    assert at.core.enlisted(first) == frozenset()
    assert len(rows(at)) == 1


def test_a_checkpoint_is_enlisted_with_its_transaction():
    at = TransactionsInMemory()
    transaction_id = at.new()
    assert enlist(at, transaction_id) == (transaction_id,)
    pointer = at.checkpoint(transaction_id).write_pointer
    assert enlist(at, pointer) == (transaction_id, pointer)
    assert at.core.enlisted(transaction_id) == {TOPIC}


def test_a_commit_of_topics_enlisted_in_the_same_step_waits_for_them():
    at = TransactionsInMemory()
    pointer = at.new()
    granted, answer = at.ask_all(asks.Enlist(pointer, TOPIC), asks.Commit(pointer))
    assert granted == (pointer,)
    assert isinstance(answer, asks.CloseFirst)
    assert at.core.standing(pointer) == "in_progress"


def test_an_abort_of_topics_enlisted_in_the_same_step_goes_to_them_first():
    at = TransactionsInMemory()
    pointer = at.new()
    _, answer = at.ask_all(asks.Enlist(pointer, TOPIC), asks.Abort(pointer, has_rows=False))
    assert isinstance(answer, asks.RollFirst)


def test_no_topic_is_enlisted_after_the_end_in_the_same_step():
    at = TransactionsInMemory()
    pointer = at.new()
    decision, refused = at.ask_all(asks.Commit(pointer), asks.Enlist(pointer, TOPIC))
    assert decision.state == "committed"
    assert isinstance(refused, TransactionNotInProgress)
    assert rows(at) == []


@pytest.mark.parametrize("how", ["frozen", "aborting", "committed", "aborted", "invalid", "forgotten"])
def test_no_topic_is_enlisted_for_a_transaction_that_is_decided_or_being_decided(how):
    at = TransactionsInMemory(max_outcomes=0) if how == "forgotten" else TransactionsInMemory()
    pointer = at.new()
    if how == "frozen":
        assert at.core.freeze(pointer)
    elif how == "aborting":
        at.ask(asks.Abort(pointer, has_rows=True))
    elif how == "invalid":
        at.invalidate(pointer)
    else:
        at.ask(asks.Abort(pointer) if how == "aborted" else asks.Commit(pointer))
    if how == "forgotten":
        at.commit(at.new())
        at.new()
    with pytest.raises(TransactionNotInProgress):
        enlist(at, pointer)


def test_a_pointer_that_was_not_issued_here_is_refused():
    at = TransactionsInMemory()
    with pytest.raises(TransactionNotInProgress, match="not issued by this service"):
        enlist(at, 5)
    assert rows(at) == []


def test_an_abandoned_freeze_does_not_count_for_the_next():
    at = TransactionsInMemory()
    pointer = at.new()
    first = at.core.freeze(pointer)
    assert at.core.freeze(pointer) == first
    at.core.thaw(pointer, first)
    assert enlist(at, pointer)
    second = at.core.freeze(pointer)
    assert second != first
    assert not at.core.is_frozen(pointer, first)
    at.core.thaw(pointer, first)
    assert at.core.is_frozen(pointer, second)


def test_an_invalid_transaction_keeps_its_topics_until_it_leaves_the_list():
    at = TransactionsInMemory()
    pointer = at.new()
    enlist(at, pointer)
    at.invalidate(pointer)
    at.load()
    assert at.core.enlisted(pointer) == {TOPIC}
    at.ask(asks.Unlist([pointer]))
    assert at.core.enlisted(pointer) == frozenset()
    assert rows(at) == []


def test_a_complete_pass_removes_the_topics_of_pruned_transactions():
    at = TransactionsInMemory(max_lifetime_ms=1000)
    pointer = at.new()
    enlist(at, pointer)
    at.invalidate(pointer)
    at.pass_s(2)
    assert at.ask(asks.KeepPass(CompletePass(at.wall_ms, (pointer,), pointer))) == 1
    assert rows(at) == []


def test_rows_of_topics_left_by_a_crash_are_removed_with_the_next_commit():
    at = TransactionsInMemory()
    pointer = at.new()
    enlist(at, pointer)
    at.core.freeze(pointer)
    at.ask_all(asks.Commit(pointer), keep_rows=2)
    assert at.core.standing(pointer) == "committed"
    assert rows(at)
    at.new()
    assert rows(at) == []


def test_a_single_instance_drops_enlistments_made_in_another_store():
    at = TransactionsInMemory()
    pointer = at.new()
    enlist(at, pointer)
    at.load()
    at.core.drop_enlistments()
    assert at.ask(asks.Commit(pointer)).state == "committed"
    assert rows(at) == []


def test_a_transaction_writes_to_a_bounded_number_of_topics():
    at = TransactionsInMemory(max_topics=1)
    pointer = at.new()
    enlist(at, pointer)
    with pytest.raises(Overloaded):
        enlist(at, pointer, OTHER)
    assert enlist(at, pointer)
