"""Handover steps: a step moves only its slices, from or to one instance, and all instances agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.cluster import (
    SLICES,
    TOPICS_PER_STEP,
    Assignment,
    Member,
    Placement,
    first_slices,
    lowered_slices,
    raised_slices,
    slice_of,
    wanted_slices,
)
from plainsong.protocol.names import TopicName

TOPICS = [TopicName("ns", f"topic-{number}") for number in range(300)]
NAMES = ("a", "b", "c", "d")

figures = st.integers(0, SLICES)
members = st.lists(st.sampled_from(NAMES), min_size=1, unique=True).flatmap(
    lambda names: st.tuples(
        *(
            st.builds(Member, st.just(name), st.just(f"{name}:1"), st.integers(1, 300), st.booleans(), figures)
            for name in names
        )
    )
)
placements = st.builds(
    Placement,
    st.dictionaries(st.sampled_from([str(each) for each in TOPICS]), st.sampled_from(NAMES), max_size=5),
    st.frozensets(st.sampled_from(NAMES)),
)


def owners(assigned):
    return {topic: getattr(assigned.owner(topic), "name", None) for topic in TOPICS}


def moved(before, after):
    """Return the topics whose owner changed, each with its old and new owner."""
    return {topic: (before[topic], after[topic]) for topic in TOPICS if before[topic] != after[topic]}


def test_topics_are_spread_over_all_slices_and_keep_theirs_forever():
    counts = Counter(slice_of(TopicName("ns", f"t{number}")) for number in range(64_000))
    assert sorted(counts) == list(range(SLICES))
    assert max(counts.values()) < 1.2 * min(counts.values())
    assert [slice_of(topic) for topic in TOPICS[:8]] == [14, 36, 29, 31, 38, 21, 3, 29]


@given(members, placements, st.data())
def test_an_instance_with_fewer_slices_gives_up_their_topics_and_nothing_else_moves(found, said, data):
    giver = data.draw(st.sampled_from(found))
    to = data.draw(st.integers(0, giver.slices))
    fewer = [replace(each, slices=to) if each is giver else each for each in found]
    # One instance stays unchanged; without it the remaining ones would share the released slices.
    rest = Member("e", "e:1")
    before, after = (owners(Assignment([*each, rest], said)) for each in (found, fewer))
    for topic, (was, _) in moved(before, after).items():
        assert was == giver.name
        assert to <= slice_of(topic) < giver.slices
    assert all(slice_of(topic) < to for topic, owner in after.items() if owner == giver.name)


@given(members, placements, st.data())
def test_steps_up_reverse_steps_down(found, said, data):
    one, *others = found
    steps = sorted(data.draw(st.lists(figures, max_size=4)))

    def at(figure):
        return owners(Assignment([replace(one, slices=figure), *others, Member("e", "e:1")], said))

    up = [at(figure) for figure in steps]
    assert [at(figure) for figure in reversed(steps)] == up[::-1]
    for before, after in pairwise(up):
        assert all(to == one.name for _, to in moved(before, after).values())


@given(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), placements)
def test_with_all_instances_in_all_slices_everything_but_pinned_topics_is_shared_among_them(names, said):
    assigned = Assignment([Member(name, f"{name}:1") for name in names], said)
    alone = Assignment([Member(name, f"{name}:1") for name in names], Placement())
    for topic in TOPICS[:50]:
        pin = said.pins.get(str(topic))
        expected = pin if pin in names else alone.owner(topic).name
        assert assigned.owner(topic).name == expected


@given(members, placements)
def test_topics_have_an_owner_while_one_instance_stays(found, said):
    found_owners = owners(Assignment(found, said))
    nobody = {topic for topic, owner in found_owners.items() if owner is None}
    if any(not each.leaving for each in found):
        assert not nobody
    else:
        most = max(each.slices for each in found)
        assert nobody == {topic for topic in TOPICS if slice_of(topic) >= most}


@given(st.lists(st.tuples(members, placements), min_size=1, max_size=6))
def test_remembering_the_last_assignment_changes_nothing(views):
    known = Assignment((), Placement())
    for found, said in views:
        known = Assignment(found, said, before=known)
        assert owners(known) == owners(Assignment(found, said))


@given(members, placements)
def test_an_instance_should_be_in_all_slices_unless_it_is_drained_and_others_are_not(found, said):
    for one in found:
        staying = {each.name for each in found if not each.leaving and each is not one}
        expected = 0 if one.name in said.drained and staying - said.drained else SLICES
        assert wanted_slices(found, said, one.name) == expected


def test_an_instance_begins_without_slices_if_others_have_topics_unless_they_are_known_as_its_own():
    me, other = Member("a", "a:1"), Member("b", "b:1")
    assert first_slices([], me) == SLICES
    assert first_slices([replace(other, slices=0)], me) == SLICES
    assert first_slices([other], me) == 0
    assert first_slices([replace(me, slices=40), other], me) == 40
    assert first_slices([replace(me, address="elsewhere:1"), other], me) == 0
    assert first_slices([], replace(me, leaving=True)) == 0


@given(st.lists(st.sampled_from(TOPICS), unique=True), figures)
def test_a_step_down_releases_one_portion_at_most_or_one_slice_that_is_not_empty(topics, slices):
    mine = [topic for topic in topics if slice_of(topic) < slices]
    steps = 0
    while slices > 0:
        after = lowered_slices(slices, mine)
        assert after < slices
        given_away = Counter(slice_of(topic) for topic in mine if slice_of(topic) >= after)
        assert given_away.total() <= TOPICS_PER_STEP or len(given_away) == 1
        mine = [topic for topic in mine if slice_of(topic) < after]
        slices, steps = after, steps + 1
    assert steps <= 1 + 2 * len(topics) / TOPICS_PER_STEP + len(topics) / TOPICS_PER_STEP


def test_without_open_topics_one_step_down_is_sufficient():
    assert lowered_slices(SLICES, []) == 0


def steps_up(total):
    """Yield the number of topics that each step brings to an instance, until it has all ``total``."""
    names = [TopicName("ns", f"t{number}") for number in range(total)]
    slices, came = 0, 0
    while slices < SLICES:
        before, slices = slices, raised_slices(slices, begun_at=0, came=came)
        assert before < slices <= SLICES
        step = sum(before <= slice_of(name) < slices for name in names)
        came += step
        yield step


def test_there_are_as_many_steps_up_as_the_arriving_topics_need():
    assert len(list(steps_up(0))) <= 4
    assert len(list(steps_up(40))) <= 5
    thousand = list(steps_up(1_000))
    assert 20 <= len(thousand) <= 30
    assert max(thousand) <= 2 * TOPICS_PER_STEP
    assert len(list(steps_up(20_000))) == SLICES
