"""Owners of topics: all instances agree, shares are proportional to weights, and a change moves as few topics as it can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol import cluster
from plainsong.protocol import cluster as placement
from plainsong.protocol.cluster import Assignment, Member, Placement, UnreadablePlacement
from plainsong.protocol.errors import InvalidName, InvalidParameter
from plainsong.protocol.names import TopicName, instance_name

TOPICS = [TopicName("ns", f"topic-{number}") for number in range(2_000)]

instance_names = st.lists(st.from_regex(r"[a-zA-Z0-9_.-]{1,20}", fullmatch=True), min_size=1, max_size=8, unique=True)
members = instance_names.flatmap(
    lambda names: st.tuples(
        *(st.builds(Member, st.just(name), st.just(f"{name}:1"), st.integers(1, 1_000)) for name in names)
    )
)


def owners(assigned, topics=TOPICS[:200]):
    return {topic: getattr(assigned.owner(topic), "name", None) for topic in topics}


@given(members, st.randoms())
def test_all_instances_compute_the_same_owners_in_whatever_order_they_saw_the_members(found, random):
    shuffled = list(found)
    random.shuffle(shuffled)
    assert owners(Assignment(found, Placement())) == owners(Assignment(shuffled, Placement()))


@given(members)
def test_an_instance_that_leaves_moves_only_its_own_topics(found):
    before = owners(Assignment(found, Placement()))
    after = owners(Assignment(found[1:], Placement()))
    assert all(after[topic] == owner for topic, owner in before.items() if owner != found[0].name)


@given(members, st.integers(1, 1_000))
def test_an_instance_that_joins_takes_its_share_and_nothing_else_moves(found, weight):
    new = Member("a-new-one-that-nobody-is-called-like", "new:1", weight)
    before, after = owners(Assignment(found, Placement())), owners(Assignment([*found, new], Placement()))
    assert all(after[topic] in (owner, new.name) for topic, owner in before.items())


@given(members, st.integers(1, 1_000))
def test_a_change_of_weight_moves_topics_only_to_or_from_that_instance(found, weight):
    first = Member(found[0].name, found[0].address, weight)
    before, after = owners(Assignment(found, Placement())), owners(Assignment([first, *found[1:]], Placement()))
    assert all(first.name in (owner, after[topic]) for topic, owner in before.items() if after[topic] != owner)


def test_shares_follow_the_weights():
    found = [Member("a", "a:1", 100), Member("b", "b:1", 200), Member("c", "c:1", 100)]
    shares = Counter(owners(Assignment(found, Placement()), TOPICS).values())
    assert shares["b"] == pytest.approx(1_000, rel=0.1)
    assert shares["a"] == pytest.approx(500, rel=0.15)


def test_a_thousand_of_ten_thousand_topics_move_when_the_tenth_instance_joins():
    topics = [TopicName("ns", f"t{number}") for number in range(10_000)]
    nine = [Member(f"i{number}", "") for number in range(9)]
    before, after = (owners(Assignment(each, Placement()), topics) for each in (nine, [*nine, Member("i9", "")]))
    assert sum(before[topic] != after[topic] for topic in topics) == pytest.approx(1_000, rel=0.12)


def test_owners_are_the_same_in_every_process_and_forever():
    found = [Member("alpha", "a:1", 100), Member("beta", "b:1", 250), Member("gamma", "c:1", 70)]
    expected = "alpha alpha gamma beta beta beta gamma alpha beta beta beta beta"
    assert " ".join(owners(Assignment(found, Placement()), TOPICS[:12]).values()) == expected
    program = (
        "from plainsong.protocol.cluster import *; from plainsong.protocol.cluster import *;"
        "from plainsong.protocol.names import TopicName as T;"
        "a = Assignment([Member('alpha', 'a:1', 100), Member('beta', 'b:1', 250), Member('gamma', 'c:1', 70)],"
        " Placement()); print(*(a.owner(T('ns', f'topic-{n}')).name for n in range(12)))"
    )
    for seed in ("0", "1", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == expected


@given(members, st.data())
def test_a_pinned_topic_stays_at_its_instance_while_that_is_present_and_accepts_topics(found, data):
    to = data.draw(st.sampled_from(found))
    topic = TOPICS[0]
    pinned = Placement().pinned(topic, to.name)
    assert Assignment(found, pinned).owner(topic) == to
    without = [member for member in found if member != to]
    assert Assignment(without, pinned).owner(topic) == Assignment(without, Placement()).owner(topic)
    leaving = [*without, Member(to.name, to.address, to.weight, leaving=True, slices=0)]
    assert Assignment(leaving, pinned).owner(topic) == Assignment(without, Placement()).owner(topic)
    assert Assignment(found, pinned.unpinned(topic)).owner(topic) == Assignment(found, Placement()).owner(topic)


def test_without_instances_no_topic_has_an_owner():
    assert Assignment([], Placement()).owner(TOPICS[0]) is None
    assert Assignment([Member("a", "a:1", leaving=True, slices=0)], Placement()).owner(TOPICS[0]) is None


def test_the_number_of_remembered_owners_is_bounded(monkeypatch):
    monkeypatch.setattr(cluster, "MAX_REMEMBERED", 10)
    assigned = Assignment([Member("a", "a:1")], Placement())
    for topic in TOPICS[:25]:
        assigned.owner(topic)
    assert len(assigned._remembered) <= 10


@given(st.dictionaries(st.text(), st.text()), st.frozensets(st.text()))
def test_a_placement_round_trips(pins, drained):
    assert Placement.decode(Placement(pins, drained).encode()) == Placement(pins, drained)


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"{}", b'{"pins":{"a":1},"drained":[]}', b'{"pins":{},"drained":7}', b"\xff"]
)
def test_an_invalid_placement_is_refused(text):
    with pytest.raises(UnreadablePlacement):
        Placement.decode(text)
    assert Placement.decode(b"") == Placement()


def test_the_size_of_a_placement_is_bounded(monkeypatch):
    monkeypatch.setattr(placement, "MAX_PLACEMENT_BYTES", 100)
    with pytest.raises(InvalidParameter):
        Placement({f"ns:t{number}": "a" for number in range(50)}).encode()


@pytest.mark.parametrize("text", ["", "a/b", "a b", "x" * 101, "ä"])
def test_the_name_of_an_instance_is_valid_in_paths(text):
    with pytest.raises(InvalidName):
        instance_name(text)
    assert instance_name("host-1.example_2") == "host-1.example_2"
