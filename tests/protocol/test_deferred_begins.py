"""Begins whose rows are written in a later commit: a crash may lose some of them, and never others."""

from __future__ import annotations

import pytest
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import TransactionNotFound, TransactionNotInProgress
from plainsong.protocol.transactions.ledger import RESERVED_MS, WRITTEN_WITHIN_S
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS


@pytest.fixture
def service():
    """A service that has committed once, so that pointers are reserved."""
    made = TransactionsInMemory(defers_begins=True)
    made.commit(made.new())
    return made


def publish(service, pointer):
    """Make the commit of a topic under a pointer."""
    for row in service.core.begins([pointer]):
        service.rows[row.prefix + row.suffixes[0]] = row.values[0]
    service.core.begun([pointer])


def test_a_begin_writes_nothing_and_the_next_commit_of_the_service_has_its_row(service):
    before = dict(service.rows)
    first, second = service.new(), service.new()
    assert service.rows == before
    service.commit(first)
    service.load()
    assert (service.state(first), service.state(second)) == ("committed", "in_progress")


def test_a_begin_that_must_be_durable_is_written_at_once(service):
    pointer = service.new(durable=True)
    service.load()
    assert service.state(pointer) == "in_progress"


def test_the_first_begin_of_a_new_service_is_written_at_once():
    service = TransactionsInMemory(defers_begins=True)
    pointer = service.new()
    service.load()
    assert service.state(pointer) == "in_progress"


def test_a_begin_is_durable_with_the_first_publish_under_it(service):
    pointer = service.new()
    publish(service, pointer)
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
    publish(service, pointer)
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
    for row in service.core.close():
        service.rows[row.prefix + row.suffixes[0]] = row.values[0]
    service.load()
    assert service.state(pointer) == "in_progress"
    assert service.new() // POINTERS_PER_MS == service.wall_ms
