"""The transaction service's answers, and its counts for metrics."""

from __future__ import annotations

import pytest
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import ChangeConflict
from plainsong.protocol.transactions.ledger_rows import HEAD, service_key


@pytest.mark.parametrize(("ask", "state"), [(asks.Commit, "committed"), (asks.Abort, "aborted")])
def test_a_decision_names_its_transaction_and_says_whether_this_request_made_it(ask, state):
    at = TransactionsInMemory()
    pointer = at.new()
    assert at.ask(ask(pointer)) == asks.Decision(pointer, state, changed=True)
    assert at.ask(ask(pointer)) == asks.Decision(pointer, state, changed=False)


def test_the_answers_to_begin_and_each_checkpoint_name_the_service():
    at = TransactionsInMemory()
    begun = at.ask(asks.Begin())
    assert begun.service
    again = at.ask(asks.Checkpoint(begun.transaction.transaction_id, None))
    assert again.service == begun.service
    assert again.transaction.transaction_id == begun.transaction.transaction_id


def test_every_transaction_that_times_out_is_counted():
    at = TransactionsInMemory()
    for _ in range(3):
        at.new(timeout_s=1)
    at.pass_s(2)
    at.tick()
    assert at.step.timed_out == 3


def test_every_conflict_is_counted():
    at = TransactionsInMemory()
    losers = [at.new() for _ in range(3)]
    winner = at.new()
    at.prepare(winner, b"k")
    at.commit(winner)
    answers = at.ask_all(*(asks.Prepare(each, (b"k",)) for each in losers))
    assert [type(each) for each in answers] == [ChangeConflict] * 3
    assert at.step.conflicts == 3


def test_no_pointer_is_issued_again_after_a_crash_left_a_transaction_ahead_of_the_head():
    at = TransactionsInMemory()
    at.new()
    head = at.rows[service_key(HEAD)]
    ahead = at.new()
    at.rows[service_key(HEAD)] = head
    at.load()
    assert at.new() > ahead
