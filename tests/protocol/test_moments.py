"""Reading as of a moment in the transaction service: decision times, and which decisions were made by a moment."""

from __future__ import annotations

import pytest
from transactions_in_memory import START_MS, TransactionsInMemory

from plainsong.protocol.effects import Put
from plainsong.protocol.errors import AsOfTooOld, InvalidParameter
from plainsong.protocol.ids import pack_id
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.ledger_rows import HEAD, Head, parse_service_key, service_key
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS


def as_of(at, moment_ms):
    return at.ask(asks.AsOf(moment_ms))


def shown(at, moment_ms, pointer):
    return as_of(at, moment_ms).view().verdict(pointer).name


def decided_ms(at, transaction_id):
    return at.ask(asks.LookAt(transaction_id)).decided_ms


def test_a_transaction_is_seen_as_of_its_decision_and_not_as_of_the_moment_before():
    at = TransactionsInMemory()
    one = at.new()
    at.pass_s(5)
    at.commit(one)
    at.pass_s(5)
    assert decided_ms(at, one) == START_MS + 5_000
    assert shown(at, START_MS + 5_000, one) == "DELIVER"
    assert shown(at, START_MS + 4_999, one) == "SKIP"
    assert shown(at, START_MS - 1, one) == "SKIP"


def test_open_aborted_and_invalid_transactions_are_skipped_and_hold_no_reader():
    at = TransactionsInMemory()
    open_, aborted, invalid = at.new(), at.new(), at.new()
    at.abort(aborted)
    at.invalidate(invalid)
    at.pass_s(1)
    view = as_of(at, at.wall_ms).view()
    assert [view.verdict(each).name for each in (open_, invalid, -aborted)] == ["SKIP"] * 3


def test_every_pointer_of_a_transaction_has_the_time_of_its_commit():
    at = TransactionsInMemory()
    one = at.new()
    at.pass_s(1)
    later = at.checkpoint(one).write_pointer
    at.pass_s(1)
    at.commit(one)
    at.pass_s(1)
    assert {shown(at, START_MS + 1_500, each) for each in (one, later)} == {"SKIP"}
    assert {shown(at, START_MS + 2_000, each) for each in (one, later)} == {"DELIVER"}


def test_decisions_have_rising_times_whatever_the_clock_does_and_after_a_restart():
    at = TransactionsInMemory()
    first, second, third = at.new(), at.new(), at.new()
    at.pass_s(10)
    at.commit(first)
    at.wall_ms -= 8_000
    at.commit(second)
    at.load()
    at.wall_ms -= 1_000
    at.commit(third)
    times = [decided_ms(at, each) for each in (first, second, third)]
    assert times == sorted(times)
    assert times[0] == START_MS + 10_000


def test_a_decision_is_never_before_the_begin_of_its_transaction():
    at = TransactionsInMemory()
    at.new()
    one = at.new()
    at.wall_ms -= 60_000
    at.commit(one)
    assert decided_ms(at, one) >= one // POINTERS_PER_MS


def test_a_view_as_of_a_moment_stays_the_same_when_the_next_owner_has_a_slow_clock():
    at = TransactionsInMemory()
    one = at.new()
    at.pass_s(5)
    moment_ms = at.wall_ms
    assert shown(at, moment_ms, one) == "SKIP"
    at.load()
    at.wall_ms -= 3_000
    at.commit(one)
    late = at.new()
    at.commit(late)
    at.pass_s(10)
    assert shown(at, moment_ms, one) == shown(at, moment_ms, late) == "SKIP"
    assert shown(at, at.wall_ms, one) == shown(at, at.wall_ms, late) == "DELIVER"


def test_a_moment_is_made_durable_before_it_is_shown_and_only_once():
    at = TransactionsInMemory()
    at.commit(at.new())
    at.pass_s(5)
    as_of(at, at.wall_ms)
    (put,) = at.core.operations(at.step)
    assert isinstance(put, Put)
    assert parse_service_key(put.prefix)[0] == HEAD
    as_of(at, at.wall_ms)
    as_of(at, at.wall_ms - 1)
    assert not at.core.operations(at.step)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("ago_ms", [0, 1, 5_000])
def test_the_first_moment_of_a_new_service_stays_the_same_after_a_restart_with_a_slow_clock(ago_ms, stops):
    at = TransactionsInMemory(defers_begins=True)
    moment_ms = at.wall_ms - ago_ms
    as_of(at, moment_ms)
    at.wall_ms -= 10_000
    (at.stop if stops else at.load)()
    one = at.new()
    at.commit(one)
    assert decided_ms(at, one) > moment_ms
    at.wall_ms += 20_000
    assert shown(at, moment_ms, one) == "SKIP"


def test_a_new_service_can_be_read_as_of_any_moment_after_its_first_begin_and_a_restart():
    at = TransactionsInMemory(defers_begins=True)
    at.new()
    at.load()
    assert as_of(at, START_MS - 10_000).undecided == frozenset()


def test_a_future_moment_is_refused():
    at = TransactionsInMemory()
    at.commit(at.new())
    with pytest.raises(InvalidParameter, match=f"asOfMs is {at.wall_ms + 1}"):
        as_of(at, at.wall_ms + 1)


def test_a_moment_before_forgotten_outcomes_is_refused_with_the_earliest_possible_one():
    at = TransactionsInMemory(outcome_retention_ms=60_000)
    old = at.new()
    at.commit(old)
    forgotten_ms = at.wall_ms
    at.pass_s(61)
    at.new()
    assert at.state(old) == "unknown"
    for _ in range(2):
        with pytest.raises(AsOfTooOld, match=f"earliest readable moment is {forgotten_ms} "):
            as_of(at, forgotten_ms - 1)
        assert shown(at, forgotten_ms, old) == "DELIVER"
        at.load()


def test_outcomes_without_visible_rows_may_be_forgotten_without_harm():
    at = TransactionsInMemory(max_outcomes=1)
    kept = at.new()
    at.commit(kept)
    at.pass_s(1)
    at.abort(at.new())
    at.abort(at.new())
    assert len(at.ledger.outcomes) == 1
    at.pass_s(1)
    with pytest.raises(AsOfTooOld):
        as_of(at, START_MS - 1)
    for _ in range(5):
        at.abort(at.new())
    assert shown(at, START_MS, kept) == "DELIVER"


def test_an_older_version_kept_no_order_of_decisions_so_the_end_of_its_decisions_is_the_earliest_moment():
    at = TransactionsInMemory()
    one = at.new()
    at.commit(one)
    last = at.ledger.head.last
    at.rows[service_key(HEAD)] = Head(last, at.ledger.head.read_pointer, one).encode()
    at.load()
    at.pass_s(5)
    with pytest.raises(AsOfTooOld):
        as_of(at, START_MS - 1)
    assert shown(at, START_MS, one) == "DELIVER"
    after = at.new()
    at.commit(after)
    at.pass_s(5)
    assert shown(at, START_MS + 4_999, after) == "SKIP"
    assert shown(at, START_MS + 5_000, after) == "DELIVER"


def test_a_new_store_can_be_read_as_of_any_moment():
    at = TransactionsInMemory()
    assert as_of(at, 0).undecided == frozenset()


def test_a_pointer_that_the_service_did_not_issue_says_nothing_about_the_time():
    at = TransactionsInMemory()
    at.commit(at.new())
    at.pass_s(1)
    moment_ms = at.wall_ms
    at.pass_s(1)
    late = at.new()
    view = as_of(at, moment_ms).view()
    assert view.is_later(late)
    assert view.is_later(-late)
    assert not view.is_later(late + 1)
    assert not view.is_later((1 << 63) - 1)
    assert not view.is_later(7)


def test_plain_messages_of_the_millisecond_of_the_moment_are_shown_and_none_of_the_next():
    at = TransactionsInMemory()
    at.pass_s(1)
    bound = as_of(at, START_MS + 5).view().bound
    assert pack_id(START_MS + 5, 0xFFFF) < bound <= pack_id(START_MS + 6, 0)
