"""Heads and the two cells of metadata: the commit whose value counts, and the cell that the next commit uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.keys import DamagedRow, namespace_key, pointer_key, system_key
from plainsong.protocol.names import TopicName
from storage.hbase.cells import SERVICE_PREFIX, SlotPair, cell_of, epoch_in, governor, slot_of, value_in
from storage.hbase.layout import NO_OWNER, Head, Stamp, decode_serial, encode_serial

NAME = TopicName("ns", "topic")
#: Number of commits by each owner before the next one claims.
lives = st.lists(st.integers(0, 4), min_size=1, max_size=8)


def lived(commits):
    """Return the head after owners with epochs 1, 2, … have made the given numbers of commits."""
    head = Head()
    for epoch, count in enumerate(commits, 1):
        head = head.claimed(epoch)
        for _ in range(count):
            head = head.committed()
    return head


@given(lives)
def test_exactly_the_commits_that_happened_count(commits):
    head = lived(commits)
    for epoch in range(1, len(commits) + 3):
        took_place = commits[epoch - 1] if epoch <= len(commits) else 0
        for serial in range(1, 7):
            assert head.counts(Stamp(epoch, serial)) == (serial <= took_place)
            assert head.is_void(Stamp(epoch, serial)) == (serial > took_place and epoch < len(commits))
    assert head.counts(NO_OWNER)


@given(lives)
def test_a_head_round_trips_and_owners_without_commits_leave_nothing_in_it(commits):
    head = lived(commits)
    fences = {epoch: decode_serial(encode_serial(serial)) for epoch, serial in head.fences.items()}
    assert Head.decode(head.encode(), fences) == head
    assert len(head.encode()) == 33
    assert len(fences) <= sum(1 for count in commits if count)


@given(lives, st.data())
def test_of_two_cells_the_later_commit_that_happened_counts(commits, data):
    head = lived(commits)
    stamps = st.builds(Stamp, st.integers(1, 9), st.integers(1, 6))
    a, b = (data.draw(st.none() | st.tuples(stamps, st.none() | st.binary(max_size=3))) for _ in range(2))
    pair = SlotPair(*(None if each is None else slot_of(*each) for each in (a, b)))
    counting = [each for each in (a, b) if each is not None and head.counts(each[0])]
    if len({each[0] for each in counting}) == len(counting):
        assert pair.value(head) == (max(counting, key=lambda each: each[0])[1] if counting else None)
    assert pair.is_beyond(head) == any(each is not None and each[0].epoch > len(commits) for each in (a, b))


def test_a_head_decides_about_metadata_of_its_topic_and_no_head_about_that_of_a_namespace():
    prefix = b"ns:topic:"
    for key in (prefix, pointer_key(NAME, 1, 7), system_key(b"h", NAME, 3), system_key(b"r", NAME, 1, b"me")):
        assert governor(key) == prefix
    assert governor(b"\x00xh") == SERVICE_PREFIX
    for key in (namespace_key("ns"), b"ns:topic:more", b"k", b""):
        assert governor(key) is None


@given(st.integers(0, (1 << 64) - 1), st.none() | st.binary())
def test_a_cell_that_no_head_decides_about_has_its_epoch_and_its_value(epoch, value):
    assert epoch_in(cell_of(epoch, value)) == epoch
    assert value_in(cell_of(epoch, value)) == value
    assert value_in(None) is None


def test_unreadable_data_is_reported_as_damaged_and_not_as_absent():
    for read in (
        lambda: Head.decode(b"\x02" + bytes(32), {}),
        lambda: Head.decode(b"", {}),
        lambda: decode_serial(b"1"),
        lambda: value_in(bytes(8) + b"\x07"),
        lambda: SlotPair(bytes(16) + b"\x07").value(Head()),
        lambda: SlotPair(b"short").value(Head()),
    ):
        with pytest.raises(DamagedRow):
            read()
