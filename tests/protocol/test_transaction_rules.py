"""The rules of the transaction manager: those of Tephra, and each intended difference."""

from __future__ import annotations

import pytest
from transaction_snapshots import decode_snapshot
from transactions_in_memory import START_MS, TransactionsInMemory

from plainsong.protocol.errors import (
    InvalidParameter,
    Overloaded,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionTooLarge,
)
from plainsong.protocol.tephra.state import encode_snapshot, manager_state
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import ChangeConflict, CompletePass
from plainsong.protocol.transactions.ledger_rows import CHANGES, service_key
from plainsong.protocol.transactions.outcomes import InvalidTruncateTime, kept_because
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, TransactionType

HOUR_S = 3600


def passed(at):
    visible = at.core.visible
    return CompletePass(at.wall_ms, visible.invalids(), visible.upper_bound())


# --- pointers and snapshots ------------------------------------------------------------------------


def test_ids_start_with_the_millisecond_and_strictly_increase():
    at = TransactionsInMemory()
    at.new()
    at.wall_ms += 5
    first, second = at.new(), at.new()
    assert first == (START_MS + 5) * 1_000_000
    assert second == first + 1


def test_ids_are_above_all_ever_issued_after_the_clock_went_back():
    at = TransactionsInMemory()
    last = at.new()
    at.wall_ms -= 10 * HOUR_S * 1000
    assert at.new() > last
    at.load()
    assert at.new() > last + 1


def test_ids_are_above_all_ever_issued_also_when_the_last_one_was_decided_and_forgotten():
    at = TransactionsInMemory(max_outcomes=0)
    last = at.checkpoint(at.new()).write_pointer
    at.commit(last - 1)
    at.wall_ms -= 1_000
    at.new()
    at.load()
    assert at.new() > last + 1


def test_a_snapshot_shows_the_state_just_before_its_transaction():
    at = TransactionsInMemory()
    open_, long, gone, done = at.new(), at.new(long=True), at.new(), at.new()
    at.invalidate(gone)
    at.commit(done)
    tx = at.begin()
    assert tx.in_progress == (open_, long)
    assert tx.invalids == (gone,)
    assert tx.read_pointer == done
    assert tx.first_short_in_progress == open_
    assert (tx.type, tx.write_pointer) == (TransactionType.SHORT, tx.transaction_id)


def test_a_transaction_sees_everything_decided_up_to_the_first_in_progress():
    at = TransactionsInMemory()
    done = at.new()
    at.commit(done)
    first, second = at.new(), at.new()
    assert [at.ledger.by_pointer[each].bound for each in (first, second)] == [done, first - 1]


def test_first_short_is_none_if_only_long_ones_are_open():
    at = TransactionsInMemory()
    at.new(long=True)
    assert at.begin().first_short_in_progress == NO_TRANSACTION


def test_a_checkpoint_of_a_long_transaction_does_not_count_as_short():
    at = TransactionsInMemory()
    long = at.new(long=True)
    at.checkpoint(long)
    tx = at.begin()
    assert len(tx.in_progress) == 2
    assert tx.first_short_in_progress == NO_TRANSACTION


def test_a_checkpoint_keeps_the_snapshot_of_the_begin():
    at = TransactionsInMemory()
    other, late = at.new(), at.new()
    tx = at.begin()
    at.commit(other)
    at.invalidate(late)
    at.new()
    after = at.checkpoint(tx.transaction_id)
    assert (after.read_pointer, after.invalids, after.in_progress) == (tx.read_pointer, tx.invalids, tx.in_progress)
    assert after.first_short_in_progress == tx.first_short_in_progress
    assert after.write_pointer > tx.write_pointer
    assert after.checkpoint_write_pointers == (after.write_pointer,)
    at.load()
    again = at.checkpoint(tx.transaction_id)
    assert again.in_progress == tx.in_progress
    assert again.checkpoint_write_pointers == (after.write_pointer, again.write_pointer)


def test_a_checkpoint_with_the_clients_transaction_uses_the_servers_list_of_pointers():
    at = TransactionsInMemory()
    tx = at.begin()
    at.checkpoint(tx.transaction_id)
    after = at.checkpoint(tx.transaction_id, tx)  # the client's copy lacks the first checkpoint
    assert len(after.checkpoint_write_pointers) == 2


def test_a_checkpoint_belongs_to_the_requested_transaction_whatever_the_client_sends():
    at = TransactionsInMemory()
    one, other = at.begin(), at.begin()
    assert at.checkpoint(one.transaction_id, other).transaction_id == one.transaction_id


def test_a_checkpoint_with_a_forgotten_snapshot_asks_for_it():
    at = TransactionsInMemory(max_outcomes=0)
    tx = at.begin()
    at.commit(at.new())
    at.new()
    with pytest.raises(InvalidParameter):
        at.checkpoint(tx.transaction_id)
    assert at.checkpoint(tx.transaction_id, tx).read_pointer == tx.read_pointer


@pytest.mark.parametrize("timeout_s", [0, -1, 3601])
def test_an_invalid_timeout_is_refused(timeout_s):
    with pytest.raises(InvalidParameter):
        TransactionsInMemory().begin(timeout_s=timeout_s)


@pytest.mark.parametrize("client_id", ["", "x" * 257, "é" * 129])
def test_a_client_id_is_bounded(client_id):
    with pytest.raises(InvalidParameter):
        TransactionsInMemory().begin(client_id=client_id)


def test_a_long_transaction_accepts_no_timeout_and_gets_the_long_one():
    at = TransactionsInMemory()
    with pytest.raises(InvalidParameter):
        at.begin(long=True, timeout_s=5)
    assert at.ask(asks.Begin(TransactionType.LONG)).expires_ms == START_MS + 86_400_000


def test_open_pointers_are_bounded_checkpoints_included():
    at = TransactionsInMemory(max_open=2)
    first = at.new()
    at.checkpoint(first)
    with pytest.raises(Overloaded):
        at.new()
    with pytest.raises(Overloaded):
        at.checkpoint(first)
    at.commit(first)
    assert at.new()


def test_nothing_begins_while_too_much_is_invalid():
    at = TransactionsInMemory(max_invalid=1)
    gone = at.new()
    at.invalidate(gone)
    with pytest.raises(Overloaded):
        at.new()
    at.abort(gone)
    assert at.new()


# --- commit ------------------------------------------------------------------------------------------


def test_committed_messages_are_delivered_and_open_ones_held_back():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.commit(two)
    assert (at.verdict(one), at.verdict(two)) == ("hold", "deliver")


def test_a_commit_is_idempotent_while_its_outcome_is_kept_even_after_a_restart():
    at = TransactionsInMemory()
    one = at.new()
    assert at.ask(asks.Commit(one)).changed
    at.load()
    assert at.ask(asks.Commit(one)).changed is False
    at.pass_s(90_000)
    at.new()
    with pytest.raises(TransactionNotFound):
        at.commit(one)


def test_a_commit_makes_all_its_checkpoints_visible_and_ignores_the_pointer_named_by_the_client():
    at = TransactionsInMemory()
    tx = at.begin()
    other = at.new()
    at.checkpoint(tx.transaction_id)
    pointer = at.checkpoint(tx.transaction_id).write_pointer
    at.commit(tx.transaction_id)
    assert [at.verdict(each) for each in (tx.transaction_id, pointer, other)] == ["deliver", "deliver", "hold"]
    assert at.ledger.head.read_pointer == pointer


def test_the_pointer_of_a_checkpoint_is_refused_as_an_id():
    at = TransactionsInMemory()
    pointer = at.checkpoint(at.new()).write_pointer
    for ask in (asks.Commit, asks.Abort, asks.Invalidate, asks.Checkpoint, lambda each: asks.Prepare(each, ())):
        with pytest.raises(TransactionNotFound):
            at.ask(ask(pointer))
    assert at.standing(pointer) == "in_progress"
    assert at.ask(asks.LookAt(pointer)).transaction_id == pointer - 1, (
        "but reads accept it as a name of its transaction"
    )


def test_an_unissued_id_is_not_found_and_changes_nothing():
    at = TransactionsInMemory()
    before = at.begin().read_pointer
    for ask in (asks.Commit, asks.Abort, asks.Invalidate):
        with pytest.raises(TransactionNotFound):
            at.ask(ask(NO_TRANSACTION - 5))
    assert at.begin().read_pointer == before
    assert at.state(7) == "unknown"


def test_a_commit_in_progress_is_not_visible_before_it_is_durable():
    at = TransactionsInMemory()
    one = at.new()
    view = at.core.view()
    step = at.core.step([(0, asks.Commit(one))], at.now)
    assert at.core.view() is view
    assert at.standing(one) == "deciding"
    at.core.settled(step)
    assert at.verdict(one) == "deliver"
    assert at.standing(one) == "committed"


def test_replicas_get_durable_states_of_pointers_and_nothing_about_unknown_ones():
    at = TransactionsInMemory()
    one, two, three, four = (at.new() for _ in range(4))
    at.commit(two)
    at.abort(three)
    at.invalidate(four)
    told = [at.core.durable(each) for each in (one, two, three, four, four + 1)]
    assert told == ["in_progress", "committed", "aborted", "invalid", "forgotten"]


def test_a_frozen_transaction_accepts_nothing_more_and_does_not_time_out():
    at = TransactionsInMemory()
    one = at.new()
    assert at.core.freeze(one)
    assert at.standing(one) == "deciding"
    at.pass_s(31)
    at.tick()
    for ask in (asks.Abort(one), asks.Invalidate(one), asks.Prepare(one, ()), asks.Checkpoint(one)):
        with pytest.raises(TransactionNotInProgress):
            at.ask(ask)
    assert at.commit(one) == "committed"


def test_a_frozen_transaction_that_conflicts_continues_and_then_times_out():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.prepare(one, b"k")
    at.prepare(two, b"k")
    at.commit(two)
    at.core.freeze(one)
    at.pass_s(31)
    with pytest.raises(TransactionConflict):
        at.commit(one)
    at.tick()
    assert at.state(one) == "invalid"


# --- time-outs ---------------------------------------------------------------------------------------


def test_a_timeout_is_a_deadline_and_a_later_commit_is_refused_even_if_no_timer_has_run():
    at = TransactionsInMemory()
    one, two = at.new(timeout_s=5), at.new(timeout_s=6)
    at.pass_s(5)
    with pytest.raises(TransactionNotInProgress):
        at.commit(one)
    assert at.commit(two) == "committed"
    assert at.verdict(one) == "skip"


def test_a_timeout_invalidates_checkpoints_too_and_the_next_deadline_is_known():
    at = TransactionsInMemory()
    pointer = at.checkpoint(at.new(timeout_s=5)).write_pointer
    at.new(timeout_s=9)
    assert at.core.next_deadline_s() == 5
    at.pass_s(5)
    at.tick()
    assert at.invalid() == [pointer - 1, pointer]
    assert at.step.invalidated == [pointer - 1, pointer]
    assert at.core.next_deadline_s() == 9


@pytest.mark.parametrize("jump_s", [-5 * HOUR_S, 5 * HOUR_S])
def test_a_jump_of_the_clock_neither_ends_nor_prolongs_a_transaction(jump_s):
    at = TransactionsInMemory()
    one = at.new(timeout_s=10)
    at.wall_ms += jump_s * 1000
    at.pass_s(9)
    assert at.state(one) == "in_progress"
    at.pass_s(1)
    assert at.state(one) == "invalid"


def test_a_deadline_continues_after_a_restart_and_never_grows():
    at = TransactionsInMemory()
    one = at.new(timeout_s=10)
    at.pass_s(4)
    at.mono_s = 1000.0
    at.load()
    assert at.core.next_deadline_s() == 1006
    at.wall_ms -= HOUR_S * 1000
    at.load()
    assert at.core.next_deadline_s() == 1010
    at.wall_ms += 2 * HOUR_S * 1000
    at.load()
    assert at.state(one) == "invalid"


def test_no_transaction_lives_longer_than_the_maximum_lifetime():
    at = TransactionsInMemory(max_lifetime_ms=20_000)
    one, long = at.new(timeout_s=30), at.new(long=True)
    at.pass_s(20)
    for each in (one, long):
        with pytest.raises(TransactionNotInProgress):
            at.commit(each)


# --- conflicts ---------------------------------------------------------------------------------------


def conflicting(**settings):
    """Return two transactions, the second of which has committed a change of the first one's key."""
    at = TransactionsInMemory(**settings)
    one, two = at.new(), at.new(client_id="writer")
    at.prepare(two, b"k", b"z\x00")
    at.commit(two)
    return at, one


def test_a_conflict_names_the_key_and_the_other_client():
    at, one = conflicting()
    with pytest.raises(ChangeConflict) as caught:
        at.prepare(one, b"a", b"z\x00")
    assert (caught.value.key, caught.value.client_id, caught.value.transaction_id) == ("z\\x00", "writer", one)


def test_a_transaction_begun_after_the_commit_does_not_conflict_and_an_empty_set_never_does():
    at, one = conflicting()
    at.prepare(one)
    assert at.commit(one) == "committed"
    later = at.new()
    at.prepare(later, b"k")
    assert at.commit(later) == "committed"


def test_conflicts_survive_a_restart_with_the_name_of_the_client():
    at, one = conflicting(max_outcomes=0)
    at.new()
    at.load()
    with pytest.raises(ChangeConflict) as caught:
        at.prepare(one, b"k")
    assert caught.value.client_id == "writer"


def test_a_prepared_set_survives_a_restart():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.prepare(one, b"k")
    at.prepare(two, b"k")
    at.load()
    at.commit(two)
    with pytest.raises(ChangeConflict):
        at.commit(one)


def test_a_commit_after_a_conflict_is_refused_until_a_new_prepare():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.prepare(one, b"k")
    at.prepare(two, b"k")
    at.commit(two)
    for _ in range(2):
        with pytest.raises(TransactionConflict):
            at.commit(one)
    at.load()
    with pytest.raises(TransactionConflict):
        at.commit(one)
    at.prepare(one, b"other")
    assert at.commit(one) == "committed"


def test_a_commit_after_a_refused_prepare_is_refused_too():
    at, one = conflicting()
    with pytest.raises(ChangeConflict):
        at.prepare(one, b"k")
    at.load()
    with pytest.raises(TransactionConflict):
        at.commit(one)
    at.prepare(one)
    assert at.commit(one) == "committed"


def test_a_prepare_replaces_the_one_before():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.prepare(one, b"k")
    at.prepare(one, b"other")
    at.commit(one)
    at.prepare(two, b"k")
    with pytest.raises(ChangeConflict):
        at.prepare(two, b"other")


def test_change_sets_are_bounded_in_keys_and_bytes():
    at = TransactionsInMemory(max_changes=2, max_change_set_bytes=10)
    one = at.new()
    at.prepare(one, b"12345", b"12346", b"12345")
    for keys in ((b"1", b"2", b"3"), (b"123456", b"12345")):
        with pytest.raises(TransactionTooLarge):
            at.prepare(one, *keys)


def test_prepared_sets_are_bounded_together_and_a_decision_frees_space():
    at = TransactionsInMemory(max_prepared_bytes=2 * 200)
    one, two, three = at.new(), at.new(), at.new()
    for each in (one, two):
        at.prepare(each, b"k")
    at.prepare(one, b"k")  # replaces the earlier change set
    with pytest.raises(Overloaded):
        at.prepare(three, b"k")
    at.abort(one)
    at.prepare(three, b"k")
    at.load()
    with pytest.raises(Overloaded):
        at.prepare(at.new(), b"k")


def test_committed_sets_are_dropped_with_the_last_short_one_that_began_before():
    at = TransactionsInMemory()
    at.new(long=True)  # does not delay the removal
    one = at.new()
    for _ in range(3):
        two = at.new()
        at.prepare(two, b"k")
        at.commit(two)
    assert len(at.ledger.committed) == 3
    at.abort(one)
    assert (len(at.ledger.committed), at.ledger.committed.bytes) == (0, 0)
    assert not [key for key in at.rows if key[2:3] == b"s"]


def test_a_checkpoint_of_a_long_transaction_does_not_hold_change_sets_back():
    at = TransactionsInMemory()
    at.checkpoint(at.new(long=True))
    two = at.new()
    at.prepare(two, b"k")
    at.commit(two)
    assert len(at.ledger.committed) == 0


def test_a_long_transaction_is_checked_too_against_the_kept_sets():
    at = TransactionsInMemory()
    long, short = at.new(long=True), at.new()
    two = at.new()
    at.prepare(two, b"k")
    at.commit(two)
    with pytest.raises(ChangeConflict):
        at.prepare(long, b"k")
    at.commit(short)
    at.prepare(long, b"k")


def test_committed_sets_are_bounded_and_a_transaction_that_can_no_longer_be_checked_conflicts():
    at = TransactionsInMemory(max_committed_bytes=1_000)
    old = at.new()
    for number in range(20):
        one = at.new()
        at.prepare(one, b"%d" % number)
        at.commit(one)
    assert at.ledger.committed.bytes <= 1_000
    at.load()
    assert at.ledger.committed.bytes <= 1_000
    with pytest.raises(ChangeConflict) as caught:
        at.prepare(old, b"innocent")
    assert caught.value.client_id is None
    young = at.new()
    at.prepare(young, b"innocent")


# --- abort and invalidate ------------------------------------------------------------------------------


def test_an_abort_without_rows_is_over_at_once_and_idempotent():
    at = TransactionsInMemory()
    one = at.new()
    assert at.abort(one) == "aborted"
    at.load()
    assert at.ask(asks.Abort(one)).changed is False
    with pytest.raises(TransactionNotInProgress):
        at.commit(one)


def test_an_abort_with_rows_is_over_only_when_they_are_rolled_back():
    at = TransactionsInMemory()
    one = at.new()
    at.checkpoint(one)
    first = at.ask(asks.Abort(one, has_rows=True))
    assert first == asks.RollFirst(one, (one, one + 1))
    assert (at.state(one), at.standing(one), at.verdict(one)) == ("in_progress", "invalid", "hold")
    with pytest.raises(TransactionNotInProgress):
        at.commit(one)
    assert at.ask(asks.FinishAbort(one, complete=True)).state == "aborted"
    assert at.step.decided == [one, one + 1]
    assert at.standing(one + 1) == "aborted"


def test_aborting_an_aborted_transaction_rolls_nothing_back_again():
    at = TransactionsInMemory()
    one = at.new()
    at.ask(asks.Abort(one, has_rows=True))
    at.ask(asks.FinishAbort(one, complete=True))
    assert at.ask(asks.Abort(one, has_rows=True)) == asks.Decision(one, "aborted", changed=False)


def test_a_refusal_says_whether_the_transaction_is_being_aborted_or_committed():
    at = TransactionsInMemory()
    one, two = at.new(), at.new()
    at.ask(asks.Abort(one, has_rows=True))
    at.core.freeze(two)
    for each, doing in ((one, "aborted"), (two, "committed")):
        with pytest.raises(TransactionNotInProgress) as refused:
            at.prepare(each, b"k")
        assert refused.value.detail == f"transaction {each} is being {doing}"


@pytest.mark.parametrize("end", ["abort", "invalidate"])
def test_the_prepared_set_of_an_uncommitted_transaction_leaves_the_disk(end):
    at = TransactionsInMemory()
    one = at.new()
    at.prepare(one, b"k")
    assert service_key(CHANGES, one) in at.rows
    getattr(at, end)(one)
    assert service_key(CHANGES, one) not in at.rows


def test_a_set_of_an_aborted_transaction_left_by_a_crash_leaves_the_disk_with_the_next_step():
    at = TransactionsInMemory()
    one = at.new()
    at.prepare(one, b"k")
    key = service_key(CHANGES, one)
    row = at.rows[key]
    at.abort(one)
    at.rows[key] = row
    at.load()
    at.new()
    assert key not in at.rows


def test_an_abort_begun_before_a_crash_can_only_be_finished():
    at = TransactionsInMemory()
    one = at.new()
    at.ask(asks.Abort(one, has_rows=True))
    at.load()
    with pytest.raises(TransactionNotInProgress):
        at.commit(one)
    assert at.core.unfinished_aborts() == [asks.RollFirst(one, (one,))]


def test_an_abort_that_could_not_reach_everything_is_an_invalidation_and_reports_it():
    at = TransactionsInMemory()
    one = at.new()
    at.ask(asks.Abort(one, has_rows=True))
    assert at.ask(asks.FinishAbort(one, complete=False)).state == "invalid"
    assert at.verdict(one) == "skip"
    assert at.core.unfinished_aborts() == []


def test_an_abort_uses_the_checkpoints_known_to_the_server():
    at = TransactionsInMemory()
    one = at.new()
    pointer = at.checkpoint(one).write_pointer
    at.abort(one)
    assert at.begin().in_progress == ()
    assert at.standing(pointer) == "aborted"


def test_a_late_abort_ends_invalidity_only_when_the_rows_are_rolled_back():
    at = TransactionsInMemory()
    one = at.new(timeout_s=1)
    at.checkpoint(one)
    at.pass_s(1)
    assert at.ask(asks.Abort(one, has_rows=True)) == asks.RollFirst(one, (one, one + 1))
    at.ask(asks.FinishAbort(one, complete=False))
    assert at.invalid() == [one, one + 1]
    at.load()
    at.ask(asks.Abort(one, has_rows=True))
    assert at.ask(asks.FinishAbort(one, complete=True)).state == "aborted"
    assert at.invalid() == []
    at.load()
    assert at.state(one) == "aborted"


def test_a_long_abort_stays_invalid_as_in_tephra():
    at = TransactionsInMemory()
    long = at.new(long=True)
    assert at.abort(long) == "invalid"
    assert at.abort(long) == "invalid"
    assert at.invalid() == [long]


def test_a_committed_transaction_can_neither_be_aborted_nor_invalidated():
    at = TransactionsInMemory()
    one = at.new()
    at.commit(one)
    for ask in (asks.Abort(one), asks.Abort(one, has_rows=True), asks.Invalidate(one), asks.FinishAbort(one, True)):
        with pytest.raises(TransactionNotInProgress):
            at.ask(ask)


def test_an_invalidation_is_idempotent_and_hides_forever():
    at = TransactionsInMemory()
    one = at.new()
    assert at.ask(asks.Invalidate(one)).changed
    assert at.ask(asks.Invalidate(one)).changed is False
    at.load()
    assert at.verdict(one) == "skip"
    assert at.standing(one) == "invalid"


# --- the invalid list ----------------------------------------------------------------------------------


def test_truncation_by_ids_removes_only_what_is_on_the_list():
    at = TransactionsInMemory()
    one, two, open_ = at.new(), at.new(), at.new()
    at.invalidate(one)
    at.invalidate(two)
    assert at.ask(asks.Unlist((one, one, open_, 99))) == 1
    assert at.invalid() == [two]
    assert at.ask(asks.Unlist((one,))) == 0
    assert at.standing(one) == "invalid", "writes under it must stay refused"
    at.load()
    assert at.invalid() == [two]
    assert at.abort(one) == "invalid"


def test_truncation_may_remove_a_checkpoint_alone():
    at = TransactionsInMemory()
    one = at.new()
    at.checkpoint(one)
    at.invalidate(one)
    assert at.ask(asks.Unlist((one + 1,))) == 1
    at.load()
    assert at.invalid() == [one]


def test_truncation_before_a_time_is_refused_when_something_in_progress_is_older():
    at = TransactionsInMemory()
    one = at.new()
    at.wall_ms += 10
    two, open_ = at.new(), at.new()
    at.invalidate(one)
    at.invalidate(two)
    assert at.ask(asks.InvalidBefore(START_MS + 10)) == (one,)
    with pytest.raises(InvalidTruncateTime):
        at.ask(asks.InvalidBefore(START_MS + 11))
    at.abort(open_)
    assert at.ask(asks.InvalidBefore(START_MS + 11)) == (one, two)


def test_a_complete_pass_prunes_only_pointers_past_their_lifetime():
    at = TransactionsInMemory(max_lifetime_ms=100_000, outcome_retention_ms=10**9)
    old = at.new()
    at.invalidate(old)
    at.pass_s(60)
    young = at.new()
    at.invalidate(young)
    at.pass_s(40)
    began = passed(at)
    later = at.new()
    at.invalidate(later)
    assert at.ask(asks.KeepPass(began)) == 1
    assert at.invalid() == [young, later]
    at.load()
    assert at.ledger.last_pass.bound == began.bound == young
    assert at.standing(old) == "invalid"


@pytest.mark.parametrize("settings", [{"max_lifetime_ms": 0}, {"prune": False}])
def test_nothing_is_pruned_automatically_where_that_is_unsafe_and_the_reason_is_given(settings):
    at = TransactionsInMemory(**settings)
    one = at.new()
    at.invalidate(one)
    at.pass_s(10**6)
    assert at.ask(asks.KeepPass(passed(at))) == 0
    assert at.invalid() == [one]
    assert kept_because(at.settings)


def test_the_safe_bound_is_that_of_tephra():
    at = TransactionsInMemory()
    assert at.core.visible.upper_bound() == at.core.visible.read_pointer - 1
    one, two = at.new(), at.new()
    assert at.core.visible.upper_bound() == one - 1
    at.invalidate(one)
    assert at.core.visible.upper_bound() == one
    at.commit(two)
    assert at.core.visible.upper_bound() == one


# --- memory ---------------------------------------------------------------------------------------------


def test_an_unknown_state_is_refused_with_the_nearest_one():
    with pytest.raises(InvalidParameter) as refused:
        TransactionsInMemory().ask(asks.ListAll("comitted"))
    assert "committed" in refused.value.hint


def test_outcomes_are_bounded_in_number_and_time_oldest_first():
    at = TransactionsInMemory(max_outcomes=3, outcome_retention_ms=10_000)
    ids = [at.new() for _ in range(5)]
    for each in ids:
        at.commit(each)
    at.new()
    assert [at.state(each) for each in ids] == ["unknown"] * 2 + ["committed"] * 3
    at.pass_s(10)
    at.new()
    assert at.state(ids[-1]) == "unknown"
    assert len([key for key in at.rows if key[2:3] == b"t"]) == 2


def test_a_forgotten_outcome_does_not_make_a_pointer_unknown_and_nothing_can_be_written_under_it():
    at = TransactionsInMemory(max_outcomes=0)
    one = at.new()
    pointer = at.checkpoint(one).write_pointer
    at.abort(one)
    at.new()
    assert at.state(one) == "unknown"
    for _ in range(2):
        assert [at.standing(each) for each in (one, pointer)] == ["committed"] * 2
        assert at.standing(one - 1) == "unknown", "never issued here"
        assert at.standing(NO_TRANSACTION) == "unknown"
        at.load()


def test_the_outcome_says_how_long_it_is_kept():
    at = TransactionsInMemory()
    one = at.new(client_id="me")
    assert at.ask(asks.LookAt(one)).kept_until_ms is None
    at.pass_s(3)
    at.commit(one)
    status = at.ask(asks.LookAt(one))
    assert (status.kept_until_ms, status.client_id, status.started_ms) == (
        START_MS + 3_000 + 90_000_000,
        "me",
        START_MS,
    )


def test_transactions_are_listed_by_state_oldest_first():
    at = TransactionsInMemory()
    one, two, three, four = (at.new() for _ in range(4))
    at.invalidate(one)
    at.commit(two)
    at.abort(three)

    def listed(state, limit=10):
        return [each.transaction_id for each in at.ask(asks.ListAll(state, limit))]

    assert listed(None) == [one, four]
    assert listed(None, 1) == [one]
    assert [listed(state) for state in ("in_progress", "invalid", "committed", "aborted")] == [
        [four],
        [one],
        [two],
        [three],
    ]
    with pytest.raises(InvalidParameter):
        listed("open")


def test_forgetting_the_change_sets_makes_transactions_conflict_that_began_before():
    at, one = conflicting()
    at.ask(asks.ForgetChanges())
    assert len(at.ledger.committed) == 0
    with pytest.raises(ChangeConflict):
        at.prepare(one, b"anything")
    at.prepare(at.new(), b"anything")


def test_the_snapshot_is_that_of_tephra_and_has_only_durable_state():
    at = TransactionsInMemory()
    gone, long, short, done = at.new(), at.new(long=True), at.new(), at.new()
    at.invalidate(gone)
    at.checkpoint(long)
    at.prepare(short, b"ab")
    at.prepare(done, b"k")
    at.commit(done)
    under_way = at.core.step([(0, asks.Commit(short))], at.now)
    state = decode_snapshot(encode_snapshot(manager_state(at.ledger, at.core.visible, at.wall_ms)))
    assert state.invalids == (gone,)
    assert sorted(state.in_progress) == [long, short, done + 1]
    assert state.in_progress[long].checkpoints == (done + 1,)
    assert (state.read_pointer, state.last_write_pointer) == (done, done + 1)
    at.core.settled(under_way)


def test_the_reported_remaining_time_is_the_deadline_even_after_a_restart_with_the_clock_set_back():
    at = TransactionsInMemory()
    one = at.new(timeout_s=600)
    at.wall_ms -= 3 * 86_400_000
    at.load()
    assert at.ask(asks.LookAt(one)).expires_ms == at.wall_ms + 600_000
    at.pass_s(100)
    assert at.ask(asks.LookAt(one)).expires_ms == at.wall_ms + 500_000
    at.pass_s(501)
    at.tick()
    assert at.state(one) == "invalid"


def test_the_checkpoints_of_one_transaction_are_bounded():
    at = TransactionsInMemory(max_checkpoints=2)
    one = at.new()
    for _ in range(2):
        at.checkpoint(one)
    with pytest.raises(Overloaded):
        at.checkpoint(one)
    at.checkpoint(at.new())
    assert at.commit(one) == "committed"


def test_a_deadline_at_the_zero_of_the_clock_is_valid():
    at = TransactionsInMemory()
    at.mono_s = -5.0
    at.new(timeout_s=5)
    assert at.core.next_deadline_s() == 0.0
