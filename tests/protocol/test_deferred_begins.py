"""Begins and change sets whose rows are written in a later commit: a crash may lose some of them, and never others."""

from __future__ import annotations

import pytest
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import Overloaded, TransactionNotFound, TransactionNotInProgress
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import ChangeConflict
from plainsong.protocol.transactions.ledger import (
    LEAST_TEPHRA_POINTERS,
    MANY_INVALID,
    RESERVED_MS,
    TEPHRA_POINTERS,
    WRITTEN_WITHIN_S,
    TransactionSettings,
)
from plainsong.protocol.transactions.ledger_rows import HEAD, Head, service_key
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from plainsong.protocol.transactions.view import Verdict, View


@pytest.fixture
def service():
    """A service that has committed once, so that pointers are reserved."""
    made = TransactionsInMemory(defers_begins=True)
    made.commit(made.new())
    return made


@pytest.fixture
def tephra():
    """A service that a client of Tephra's has used, so that pointers are reserved for such clients."""
    made = TransactionsInMemory(defers_begins=True)
    made.commit(made.new(tephra=True))
    return made


def test_a_begin_writes_nothing_and_the_next_commit_of_the_service_has_its_row(service):
    before = dict(service.rows)
    first, second = service.new(), service.new()
    assert service.rows == before
    service.commit(first)
    service.load()
    assert (service.state(first), service.state(second)) == ("committed", "in_progress")


def test_the_first_begin_of_a_new_service_is_written_at_once():
    service = TransactionsInMemory(defers_begins=True)
    pointer = service.new()
    service.load()
    assert service.state(pointer) == "in_progress"


def test_a_begin_is_durable_with_the_first_publish_under_it(service):
    pointer = service.new()
    service.publish(pointer)
    assert service.core.begins([pointer]) == []
    service.load()
    assert service.state(pointer) == "in_progress"
    assert service.commit(pointer) == "committed"


def test_a_begin_that_a_crash_loses_is_not_in_progress(service):
    pointer = service.new()
    service.load()
    for verb in (service.commit, service.checkpoint, service.prepare):
        with pytest.raises(TransactionNotInProgress, match="has lost it"):
            verb(pointer)
    with pytest.raises(TransactionNotFound):  # "not in progress" would mean that it is committed
        service.abort(pointer)
    service.load()
    with pytest.raises(TransactionNotInProgress):
        service.commit(pointer)


@pytest.mark.parametrize("back_ms", [0, 1, 5_000, 10**9])
def test_an_answered_pointer_is_never_issued_again_whatever_a_crash_loses_or_the_clock_does(service, back_ms):
    answered = [service.new() for _ in range(50)]
    service.wall_ms -= back_ms
    for _ in range(3):
        service.load()
        pointer = service.new()
        assert pointer > max(answered)
        answered.append(pointer)


def test_a_topic_writes_the_row_of_a_begin_that_the_commit_of_the_service_may_not_make_durable(service):
    """That commit may fail alone, while the topic's, which begins after it, is acknowledged."""
    pointer = service.new()
    [record] = service.ledger.take_unwritten()
    record.is_written = True  # in a commit of the service that is in progress
    service.publish(pointer)
    service.load()
    assert service.state(pointer) == "in_progress"


def test_a_begin_beyond_the_reserved_pointers_is_written_at_once(service):
    service.pass_s(RESERVED_MS / 1000 + 1)
    pointer = service.new()
    assert pointer <= service.ledger.head.reserved
    service.load()
    assert service.state(pointer) == "in_progress"


def test_a_begin_that_no_commit_includes_is_written_soon(service):
    pointer = service.new()
    assert service.core.next_deadline_s() == service.mono_s + WRITTEN_WITHIN_S
    service.pass_s(WRITTEN_WITHIN_S)
    service.tick()
    service.load()
    assert service.state(pointer) == "in_progress"


def test_a_closed_service_loses_no_begin_and_is_not_ahead_of_the_clock_afterwards(service):
    pointer = service.new()
    service.stop()
    assert service.state(pointer) == "in_progress"
    assert service.new() // POINTERS_PER_MS == service.wall_ms


# --- Tephra's clients, which also write to other stores --------------------------------------------


def hides(service, pointer):
    """Return True if a transaction of a Tephra client that begins now does not see a pointer's writes."""
    return View.of(service.begin(tephra=True)).verdict(pointer) in (Verdict.SKIP, Verdict.HOLD)


def test_only_its_publish_and_its_commit_write_rows_of_a_whole_transaction(tephra):
    pointer = tephra.new(tephra=True)
    assert not tephra.step.writes
    tephra.publish(pointer)
    tephra.prepare(pointer, b"key", tephra=True)
    assert not tephra.step.writes
    assert tephra.commit(pointer) == "committed"


def test_a_begin_that_a_crash_loses_is_invalid_and_an_abort_heals_it(tephra):
    before = dict(tephra.rows)
    pointers = [tephra.new(tephra=True) for _ in range(LEAST_TEPHRA_POINTERS)]
    assert tephra.rows == before
    tephra.load()
    for pointer in pointers:
        assert tephra.state(pointer) == "invalid"
        assert hides(tephra, pointer)
        for verb in (tephra.commit, tephra.prepare, tephra.checkpoint):
            with pytest.raises(TransactionNotInProgress):
                verb(pointer)
    assert tephra.abort(pointers[0]) == "aborted"
    tephra.load()
    assert [tephra.state(each) for each in pointers] == ["aborted", "invalid", "invalid", "invalid"]


def test_what_a_crash_lost_stays_invalid_after_the_next_crash(tephra):
    lost = tephra.new(tephra=True)
    for _ in range(3):
        tephra.load()
        assert hides(tephra, lost)
    tephra.commit(tephra.new())
    tephra.load()
    assert hides(tephra, lost)


def test_what_a_crash_lost_stays_invalid_after_a_rollback_in_a_topic(tephra):
    lost = tephra.new(tephra=True)
    tephra.load()
    tephra.publish(lost)  # its client rolls back, so a topic commits under the pointer
    tephra.commit(tephra.new())
    tephra.load()
    assert hides(tephra, lost)


def test_a_crash_loses_no_begin_of_a_long_transaction_and_its_abort_leaves_it_invalid(tephra):
    long = tephra.new(long=True, tephra=True)
    tephra.load()
    assert tephra.state(long) == "in_progress"
    assert tephra.abort(long) == "invalid"
    tephra.load()
    assert hides(tephra, long)


def test_a_crash_makes_no_begin_invalid_that_has_a_row(tephra):
    first, published, last = (tephra.new(tephra=True) for _ in range(3))
    tephra.publish(published)
    tephra.load()
    assert [tephra.state(each) for each in (first, published, last)] == ["invalid", "in_progress", "invalid"]
    assert len(tephra.invalid()) == LEAST_TEPHRA_POINTERS - 1


def test_a_stop_writes_the_begins_and_makes_nothing_invalid(tephra):
    pointer = tephra.new(tephra=True)
    tephra.stop()
    assert tephra.state(pointer) == "in_progress"
    assert tephra.invalid() == []


def test_a_service_without_tephras_clients_makes_nothing_invalid(service):
    service.new()
    service.load()
    assert service.invalid() == []


def test_once_the_reserved_pointers_are_issued_a_begin_is_written_at_once(tephra):
    for _ in range(LEAST_TEPHRA_POINTERS):
        tephra.new(tephra=True)
        assert not tephra.step.writes
    tephra.new(tephra=True)
    assert tephra.step.writes
    tephra.new(tephra=True)
    assert not tephra.step.writes


def test_more_pointers_are_reserved_the_more_transactions_are_open(tephra):
    for _ in range(100):
        tephra.new(tephra=True)
    tephra.commit(tephra.new(tephra=True))
    for _ in range(TEPHRA_POINTERS):
        tephra.new(tephra=True)
        assert not tephra.step.writes
    tephra.load()
    assert len(tephra.invalid()) == TEPHRA_POINTERS


def test_a_reserved_pointer_is_issued_for_a_second(tephra):
    tephra.pass_s(RESERVED_MS / 1000)
    pointer = tephra.new(tephra=True)
    assert not tephra.step.writes
    assert tephra.wall_ms - pointer // POINTERS_PER_MS == RESERVED_MS
    tephra.pass_s(0.001)
    pointer = tephra.new(tephra=True)
    assert tephra.step.writes
    assert tephra.wall_ms == pointer // POINTERS_PER_MS


def test_a_reserved_pointer_is_not_issued_before_a_moment_that_was_read(tephra):
    tephra.pass_s(0.5)
    at_ms = tephra.wall_ms
    moment, begun = tephra.ask_all(asks.AsOf(at_ms), asks.Begin(tephra=True))
    pointer = begun.transaction.transaction_id
    assert pointer // POINTERS_PER_MS > at_ms
    tephra.commit(pointer)
    assert tephra.ask(asks.AsOf(at_ms)).view().verdict(pointer) is moment.view().verdict(pointer) is Verdict.SKIP


def test_crashes_make_the_invalid_list_no_longer_than_a_thousand(tephra):
    before = -1
    while len(tephra.invalid()) > before:
        before = len(tephra.invalid())
        tephra.commit(tephra.new(tephra=True))
        tephra.load()
    assert MANY_INVALID <= before < MANY_INVALID + TEPHRA_POINTERS


def test_a_begin_over_http_does_not_get_a_pointer_of_tephras_clients_twice(tephra):
    issued = [tephra.new(tephra=each % 3 > 0) for each in range(20)]
    tephra.wall_ms -= 10_000
    issued += [tephra.new(tephra=each % 3 > 0) for each in range(20)]
    tephra.load()
    issued += [tephra.new(tephra=each % 3 > 0) for each in range(20)]
    assert issued == sorted(set(issued))


@pytest.mark.parametrize("back_ms", [0, 10_000])
def test_a_begin_over_http_never_gets_a_pointer_reserved_for_tephras_clients(tephra, back_ms):
    """As a lost begin of Tephra's clients it would be another's, which its owner may not end."""
    reserved = tephra.ledger.head.last + LEAST_TEPHRA_POINTERS
    tephra.wall_ms -= back_ms
    pointer = tephra.new(owner="ann")
    assert not tephra.step.writes
    assert pointer > reserved
    tephra.load()
    assert tephra.state(pointer) == "unknown"
    with pytest.raises(TransactionNotInProgress, match="has lost it"):
        tephra.commit(pointer)


def restored(service, *keys):
    """Begin, publish and prepare a transaction of a Tephra client; then the power is cut."""
    pointer = service.new(tephra=True)
    service.publish(pointer)
    service.prepare(pointer, *keys, tephra=True)
    service.load()
    return pointer


@pytest.mark.parametrize("keys", [(b"key",), ()])
@pytest.mark.parametrize("lost", [(b"key",), ()])
def test_a_commit_whose_change_set_a_crash_may_have_lost_is_a_conflict_until_it_is_prepared_again(tephra, lost, keys):
    pointer = restored(tephra, *lost)
    for _ in range(2):
        with pytest.raises(ChangeConflict, match="has no change set") as refused:
            tephra.commit(pointer)
    assert (refused.value.key, refused.value.client_id) == (None, None)
    assert tephra.state(pointer) == "in_progress"
    tephra.prepare(pointer, *keys, tephra=True)
    assert tephra.commit(pointer) == "committed"


def test_a_long_transaction_is_committed_without_a_change_set_after_a_crash(tephra):
    long = tephra.new(long=True, tephra=True)
    tephra.load()
    assert tephra.commit(long) == "committed"


def test_a_crash_does_not_lose_the_change_set_of_a_long_transaction(tephra):
    long = tephra.new(long=True, tephra=True)
    tephra.prepare(long, b"key", tephra=True)
    tephra.load()
    short = tephra.new(tephra=True)
    tephra.commit(long)
    with pytest.raises(ChangeConflict, match="key"):
        tephra.prepare(short, b"key", tephra=True)


def test_a_transaction_with_a_lost_change_set_can_be_aborted(tephra):
    assert tephra.abort(restored(tephra, b"key")) == "aborted"


def test_a_stop_keeps_the_change_sets(tephra):
    pointer = tephra.new(tephra=True)
    tephra.prepare(pointer, b"key", tephra=True)
    tephra.stop()
    other = tephra.new()
    tephra.prepare(other, b"key")
    assert tephra.commit(pointer) == "committed"
    with pytest.raises(ChangeConflict, match="key"):
        tephra.commit(other)


def test_a_stop_writes_waiting_change_sets_in_commits_that_are_bounded(tephra):
    tephra.settings = TransactionSettings(max_change_set_bytes=1_000)
    tephra.load()
    tephra.commit(tephra.new(tephra=True))
    for number in range(4):
        tephra.prepare(tephra.new(tephra=True), bytes([number]) * 300, tephra=True)
    *changes, last = tephra.core.close()
    assert [[len(put.values) for put in commit] for commit in changes] == [[2], [2]]
    assert service_key(HEAD) in [put.prefix for put in last]


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_crash_during_a_stop_is_a_crash(tephra, commits):
    tephra.settings = TransactionSettings(max_change_set_bytes=400)
    tephra.load()
    tephra.commit(tephra.new(tephra=True))
    first, second, begun = (tephra.new(tephra=True) for _ in range(3))
    for pointer in (first, second):
        tephra.publish(pointer)
        tephra.prepare(pointer, str(pointer).encode() * 10, tephra=True)
    tephra.stop(keep_commits=commits)
    assert hides(tephra, begun)
    assert tephra.state(begun) == "invalid"
    for at, pointer in enumerate((first, second)):
        if at < commits:
            assert tephra.commit(pointer) == "committed"
        else:
            with pytest.raises(ChangeConflict, match="has no change set"):
                tephra.commit(pointer)


@pytest.mark.parametrize("prepares", [True, False])
def test_after_a_stop_a_commit_without_keys_is_no_conflict(tephra, prepares):
    pointer = tephra.new(tephra=True)
    if prepares:
        tephra.prepare(pointer, tephra=True)
    tephra.stop()
    assert tephra.commit(pointer) == "committed"


def test_a_stop_after_a_crash_does_not_forget_that_a_change_set_may_be_lost(tephra):
    pointer = restored(tephra, b"key")
    for _ in range(2):
        tephra.stop()
        with pytest.raises(ChangeConflict, match="has no change set"):
            tephra.commit(pointer)


@pytest.mark.parametrize("keys", [(b"key",), ()])
def test_a_stop_keeps_what_was_prepared_after_a_crash(tephra, keys):
    pointer = restored(tephra, b"key")
    tephra.prepare(pointer, *keys, tephra=True)
    tephra.stop()
    assert tephra.commit(pointer) == "committed"


@pytest.mark.parametrize("keys", [(b"key",), ()])
def test_what_was_prepared_after_a_crash_may_be_lost_in_the_next_one(tephra, keys):
    pointer = restored(tephra, b"key")
    tephra.prepare(pointer, *keys, tephra=True)
    tephra.load()
    with pytest.raises(ChangeConflict, match="has no change set"):
        tephra.commit(pointer)


def test_a_change_set_waits_only_once_the_head_says_that_the_service_was_not_stopped(tephra):
    first, second = tephra.new(tephra=True), tephra.new(tephra=True)
    tephra.stop()
    tephra.prepare(first, b"first", tephra=True)
    assert tephra.step.writes
    tephra.prepare(second, b"second", tephra=True)
    assert not tephra.step.writes
    tephra.load()
    assert tephra.commit(first) == "committed"
    with pytest.raises(ChangeConflict, match="has no change set"):
        tephra.commit(second)


def test_a_prepare_without_room_leaves_the_change_set_lost(tephra):
    tephra.settings = TransactionSettings(max_prepared_bytes=1_000)
    pointer = restored(tephra, b"key")
    with pytest.raises(Overloaded):
        tephra.prepare(pointer, bytes(1_000), tephra=True)
    with pytest.raises(ChangeConflict, match="has no change set"):
        tephra.commit(pointer)


def test_a_copied_store_refuses_a_commit_whose_change_set_a_crash_may_have_lost(tephra):
    pointer = tephra.new(tephra=True)
    tephra.publish(pointer)
    tephra.prepare(pointer, b"key", tephra=True)
    tephra.defers_begins = False
    for _ in range(2):
        tephra.load()
        with pytest.raises(ChangeConflict, match="has no change set"):
            tephra.commit(pointer)
        tephra.commit(tephra.new())
    tephra.prepare(pointer, tephra=True)
    tephra.load()
    assert tephra.commit(pointer) == "committed"


def test_a_change_set_of_a_transaction_begun_over_http_is_durable(tephra):
    pointer, empty = tephra.new(), tephra.new()
    tephra.publish(empty)
    tephra.prepare(pointer, b"key", tephra=True)
    tephra.load()
    assert tephra.ledger.prepared[pointer].keys == {b"key"}
    assert tephra.commit(empty) == "committed"


def test_a_pointer_that_a_crash_lost_is_not_said_to_have_timed_out(tephra):
    lost = tephra.new(tephra=True)
    tephra.load()
    with pytest.raises(TransactionNotInProgress, match="a crash of the service has lost its begin") as refused:
        tephra.commit(lost)
    assert "time-out" not in str(refused.value)


def test_after_the_clock_went_back_pointers_are_reserved_once_tephras_clients_use_it_again(tephra):
    tephra.wall_ms -= 10_000
    tephra.commit(tephra.new())
    tephra.load()
    assert tephra.invalid() == []


def test_a_stop_releases_the_pointers_of_tephras_clients_though_the_last_reserved_one_is_issued(tephra):
    tephra.wall_ms = tephra.ledger.head.reserved // POINTERS_PER_MS
    pointer = tephra.new()
    assert pointer == tephra.ledger.head.reserved
    tephra.publish(pointer)
    tephra.stop()
    assert tephra.invalid() == []


def test_an_earlier_change_set_is_not_what_a_crash_leaves(tephra):
    pointer = tephra.new(tephra=True)
    tephra.prepare(pointer, b"first")
    tephra.prepare(pointer, b"second", tephra=True)
    tephra.load()
    assert tephra.ledger.prepared[pointer].keys == {b"second"}


def test_a_prepare_over_http_is_durable(service):
    pointer = service.new()
    service.prepare(pointer, b"key")
    service.load()
    assert service.ledger.prepared[pointer].keys == {b"key"}


def test_a_committed_change_set_is_kept_while_a_transaction_may_conflict_with_it(tephra):
    first, second = tephra.new(tephra=True), tephra.new(tephra=True)
    for pointer in (first, second):
        tephra.prepare(pointer, b"key", tephra=True)
    tephra.commit(first)
    tephra.load()
    assert [each.keys for each in tephra.ledger.committed] == [{b"key"}]
    with pytest.raises(ChangeConflict, match="key"):
        tephra.prepare(second, b"key", tephra=True)


def test_a_change_set_with_which_nothing_can_conflict_is_not_written(tephra):
    before = {key for key in tephra.rows if key[2:3] == b"s"}
    pointer = tephra.new(tephra=True)
    tephra.prepare(pointer, b"key", tephra=True)
    tephra.commit(pointer)
    assert {key for key in tephra.rows if key[2:3] == b"s"} == before == set()


def test_without_deferred_begins_everything_is_written_at_once():
    service = TransactionsInMemory()
    pointer = service.new(tephra=True)
    service.prepare(pointer, b"key", tephra=True)
    service.load()
    assert service.invalid() == []
    assert service.ledger.prepared[pointer].keys == {b"key"}
    empty = service.new(tephra=True)
    service.load()
    assert service.commit(empty) == "committed"


@pytest.mark.parametrize("tephra", [-1, 1 << 40])
def test_a_head_that_reserves_an_impossible_number_of_pointers_is_damaged(tephra):
    """A load would otherwise make as many transactions."""
    with pytest.raises(DamagedRow, match="reserved for Tephra's clients"):
        Head.decode(Head(5, tephra=tephra).encode())


def test_the_pointers_of_a_copied_store_are_made_invalid_once(tephra):
    lost = tephra.new(tephra=True)
    tephra.defers_begins = False
    tephra.load()
    assert hides(tephra, lost)
    found = tephra.invalid()
    for _ in range(3):
        tephra.commit(tephra.new())
        tephra.load()
    assert tephra.invalid() == found
