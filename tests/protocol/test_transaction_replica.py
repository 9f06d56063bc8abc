"""A replica agrees with the service, even if updates arrive late, twice or out of order."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import MalformedTransaction, PlainsongError
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.replica import (
    UNKNOWN_VERSION,
    PointerChanges,
    ReplicaState,
    ReplicaUpdate,
    ReplicaVersion,
    replica_update,
)

STEPS = st.lists(st.tuples(st.sampled_from("bbckaitu"), st.integers(0, 5)), max_size=30)


class ServiceWithChanges(TransactionsInMemory):
    """A service that counts its changes."""

    def __init__(self, term=1, max_changes=8, **settings):
        super().__init__(**settings)
        self.changes = PointerChanges(term, max_changes)
        self.begun = []

    def ask_all(self, *wanted, keep_rows=None):
        answers = super().ask_all(*wanted, keep_rows=keep_rows)
        changed = [each for change in self.step.changes for part in change for each in part] + self.step.forgotten
        if changed:
            self.changes.record(changed)
        return answers

    def sync(self, replica):
        return ReplicaUpdate.unpack(replica_update(self.core, self.changes, replica.version).packed())

    def take(self, step):
        what, which = step
        if what == "b" or not self.begun:
            self.begun.append(self.new())
            return
        pointer = self.begun[which % len(self.begun)]
        ask = {
            "c": asks.Commit(pointer),
            "k": asks.Checkpoint(pointer),
            "a": asks.Abort(pointer),
            "i": asks.Invalidate(pointer),
            "t": asks.Unlist([pointer]),
        }.get(what)
        if ask is None:
            self.pass_s(10)
            self.tick()
            return
        try:
            answer = self.ask(ask)
        except PlainsongError:
            return
        if what == "k":
            self.begun.append(answer.transaction.write_pointer)


def same(at, replica):
    for pointer in (*at.begun, at.ledger.head.last + 1, 5):
        assert replica.standing(pointer) == at.core.standing(pointer)
        assert replica.view().verdict(pointer) == at.core.view().verdict(pointer)


@given(STEPS, st.data())
def test_a_replica_knows_everything_that_the_service_knows(steps, data):
    at, replica = ServiceWithChanges(max_outcomes=3, max_changes=data.draw(st.integers(1, 8))), ReplicaState()
    late = []
    for step in steps:
        at.take(step)
        if data.draw(st.booleans()):
            late.append(at.sync(replica))
        if late and data.draw(st.booleans()):
            replica.apply(late[data.draw(st.integers(0, len(late) - 1))])
        if data.draw(st.booleans()):
            assert replica.apply(at.sync(replica))
            same(at, replica)
    for late_update in late:
        replica.apply(late_update)
    replica.apply(at.sync(replica))
    same(at, replica)


def test_a_replica_that_is_not_too_far_behind_gets_only_the_changes():
    at, replica = ServiceWithChanges(), ReplicaState()
    pointers = [at.new() for _ in range(3)]
    assert at.sync(replica).complete
    replica.apply(at.sync(replica))
    at.commit(pointers[1])
    update = at.sync(replica)
    assert not update.complete
    assert {state: found for state, found in update.pointers.items() if found} == {"committed": (pointers[1],)}
    for _ in range(9):
        at.new()
    assert at.sync(replica).complete


def test_a_replica_accepts_everything_from_the_next_owner_and_nothing_from_the_last_one():
    at, replica = ServiceWithChanges(term=1), ReplicaState()
    pointer = at.new()
    replica.apply(at.sync(replica))
    old = at.sync(ReplicaState())
    at.changes = PointerChanges(2)
    update = at.sync(replica)
    assert update.complete
    assert replica.apply(update)
    assert replica.version == ReplicaVersion(2, 0)
    assert not replica.apply(old)
    at.commit(pointer)
    replica.apply(at.sync(replica))
    assert replica.standing(pointer) == "committed"


def test_a_view_stays_the_same_object_until_something_changes():
    at, replica = ServiceWithChanges(), ReplicaState()
    at.new()
    replica.apply(at.sync(replica))
    view = replica.view()
    replica.apply(at.sync(replica))
    assert replica.view() is view
    at.new()
    replica.apply(at.sync(replica))
    assert replica.view() is not view


@pytest.mark.parametrize("packed", [None, [], [1] * 7, [1, 2, True, 4, 5, 6, [[1]]], ["x", 2, True, 4, 5, 6, [[]] * 6]])
def test_an_invalid_state_is_refused(packed):
    with pytest.raises(MalformedTransaction):
        ReplicaUpdate.unpack(msgpack.packb(packed))


def test_an_empty_replica_has_an_unknown_version():
    assert ReplicaState().version == UNKNOWN_VERSION
