"""Verdicts of a view: Tephra's rule of visibility, and the shortcut for many pointers at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.transactions.transaction import Transaction, VisibilityLevel
from plainsong.protocol.transactions.view import Verdict, View

pointers = st.integers(1, 30)
several = st.frozensets(pointers, max_size=4)
views = st.builds(View, st.integers(0, 30), several, several, several)
#: Too many to compare one by one.
many_views = views.map(
    lambda view: View(view._read_pointer, view._excluded | set(range(1_000, 1_100)), view._invalids, view._own)
)


@given(st.integers(0, 30), several, several, several, pointers)
def test_the_verdict_is_the_visibility_of_tephra_with_a_stop_at_undecided_pointers(
    read, in_progress, invalids, own, pointer
):
    visible = pointer in own or (pointer <= read and pointer not in in_progress and pointer not in invalids)
    verdict = View(read, in_progress, invalids, own).verdict(pointer)
    assert (verdict is Verdict.DELIVER) == visible
    if not visible:
        assert verdict is (Verdict.SKIP if pointer in invalids else Verdict.HOLD)
    assert View(read, in_progress, invalids, own).verdict(-pointer) is Verdict.SKIP, "rolled back for every reader"


@given(views | many_views, st.lists(st.integers(-30, 30).filter(bool), min_size=1, max_size=6))
def test_bulk_delivery_equals_delivery_one_by_one(view, given_pointers):
    at_once = view.delivers_all(min(given_pointers), max(given_pointers), lambda: given_pointers)
    if at_once:
        assert {view.verdict(pointer) for pointer in given_pointers} == {Verdict.DELIVER}
    # Negative pointers of rolled back rows sort last as bytes, and so are passed as the highest.
    negative = [pointer for pointer in given_pointers if pointer < 0]
    if negative:
        positive = [pointer for pointer in given_pointers if pointer > 0] or negative
        assert not view.delivers_all(min(positive), max(negative), lambda: given_pointers)


@given(
    st.frozensets(st.integers(1, 500), min_size=65), st.lists(st.tuples(pointers, pointers), min_size=30, max_size=99)
)
def test_later_knowledge_of_a_view_changes_no_answer_in_progress(hidden, asked):
    view = View(600, hidden, frozenset({700}))
    for index, pair in enumerate(asked):
        among = [10 * index + each for each in pair if 10 * index + each <= 600] or [600]
        said = view.delivers_all(min(among), max(among), lambda among=among: among)
        assert said == (not any(each in hidden for each in among))


def test_many_hidden_pointers_next_to_those_of_a_page_are_looked_up_no_more_than_once():
    view = View(1 << 40, frozenset(range(1_000)), frozenset(range(1 << 30, (1 << 30) + 1_000)))
    looked_up = []
    among = range(10_000, 10_500)
    for _ in range(100):
        assert view.delivers_all(10_000, 10_499, lambda: looked_up.append(1) or among)
    assert len(looked_up) * len(among) == 2_000


@given(views | many_views, st.integers(1, 30))
def test_one_visible_pointer_that_is_not_its_own_is_delivered_at_once(view, pointer):
    if pointer not in view._own:
        at_once = view.delivers_all(pointer, pointer, lambda: (pointer,))
        assert at_once == (view.verdict(pointer) is Verdict.DELIVER)


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        (VisibilityLevel.SNAPSHOT, {10, 11, 12}),
        (VisibilityLevel.SNAPSHOT_ALL, {10, 11, 12}),
        (VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT, {10, 11}),
    ],
)
def test_a_transaction_sees_its_own_messages_and_those_of_its_checkpoints_as_its_level_says(level, seen):
    transaction = Transaction(9, 10, 12, checkpoint_write_pointers=(11, 12), visibility_level=level)
    view = View.of(transaction)
    assert {pointer for pointer in range(10, 15) if view.verdict(pointer) is Verdict.DELIVER} == seen
    assert {view.verdict(pointer) for pointer in range(10, 15)} - {Verdict.DELIVER} == {Verdict.HOLD}
