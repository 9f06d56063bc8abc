"""A mirror of the service says what the service says, however late, twice or out of order it is told."""

from __future__ import annotations

import msgpack
import pytest
from deciding_at_work import AtWork
from hypothesis import given
from hypothesis import strategies as st

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


class Told(AtWork):
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

    def sync(self, mirror):
        return ReplicaUpdate.unpack(replica_update(self.core, self.changes, mirror.version).packed())

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


def same(at, mirror):
    for pointer in (*at.begun, at.ledger.head.last + 1, 5):
        assert mirror.standing(pointer) == at.core.standing(pointer)
        assert mirror.view().verdict(pointer) == at.core.view().verdict(pointer)


@given(STEPS, st.data())
def test_a_mirror_says_what_the_service_says(steps, data):
    at, mirror = Told(max_outcomes=3, max_changes=data.draw(st.integers(1, 8))), ReplicaState()
    late = []
    for step in steps:
        at.take(step)
        if data.draw(st.booleans()):
            late.append(at.sync(mirror))
        if late and data.draw(st.booleans()):
            mirror.apply(late[data.draw(st.integers(0, len(late) - 1))])
        if data.draw(st.booleans()):
            assert mirror.apply(at.sync(mirror))
            same(at, mirror)
    for given_late in late:
        mirror.apply(given_late)
    mirror.apply(at.sync(mirror))
    same(at, mirror)


def test_a_mirror_that_is_not_too_far_behind_is_told_only_what_changed():
    at, mirror = Told(), ReplicaState()
    pointers = [at.new() for _ in range(3)]
    assert at.sync(mirror).complete
    mirror.apply(at.sync(mirror))
    at.commit(pointers[1])
    told = at.sync(mirror)
    assert not told.complete
    assert {state: found for state, found in told.pointers.items() if found} == {"committed": (pointers[1],)}
    for _ in range(9):
        at.new()
    assert at.sync(mirror).complete


def test_a_mirror_takes_everything_from_the_next_owner_and_nothing_from_the_one_before():
    at, mirror = Told(term=1), ReplicaState()
    pointer = at.new()
    mirror.apply(at.sync(mirror))
    old = at.sync(ReplicaState())
    at.changes = PointerChanges(2)
    told = at.sync(mirror)
    assert told.complete
    assert mirror.apply(told)
    assert mirror.version == ReplicaVersion(2, 0)
    assert not mirror.apply(old)
    at.commit(pointer)
    mirror.apply(at.sync(mirror))
    assert mirror.standing(pointer) == "committed"


def test_a_view_stays_the_same_object_until_something_changes():
    at, mirror = Told(), ReplicaState()
    at.new()
    mirror.apply(at.sync(mirror))
    view = mirror.view()
    mirror.apply(at.sync(mirror))
    assert mirror.view() is view
    at.new()
    mirror.apply(at.sync(mirror))
    assert mirror.view() is not view


@pytest.mark.parametrize("packed", [None, [], [1] * 7, [1, 2, True, 4, 5, 6, [[1]]], ["x", 2, True, 4, 5, 6, [[]] * 6]])
def test_what_is_no_state_is_refused(packed):
    with pytest.raises(MalformedTransaction):
        ReplicaUpdate.unpack(msgpack.packb(packed))


def test_a_mirror_that_knows_nothing_says_so():
    assert ReplicaState().version == UNKNOWN_VERSION
