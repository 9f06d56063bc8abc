"""A topic's usage: counted in slices, never too low, and too high by at most one slice."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.ids import after, bound_at, pack_id, pack_position
from plainsong.protocol.topic.usage import MAX_BUCKETS, SLICES, Usage

added = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5), st.sampled_from([0, 0, 0, 1500])), max_size=60)


@given(added, st.integers(0, 5000), st.sampled_from([1_000, 12_800, 128_000]))
def test_the_count_is_too_high_by_at_most_one_slice(added, gone_ms, ttl_ms):
    usage, counted, ts_ms = Usage(), [], 0
    for after_ms, messages, _ in added:
        ts_ms += after_ms
        usage.add(ts_ms, messages, 10 * messages, ttl_ms)
        counted.append((ts_ms, messages))
    usage.drop_before(gone_ms)
    living = sum(messages for ts_ms, messages in counted if ts_ms >= gone_ms)
    slice_before = sum(messages for ts_ms, messages in counted if gone_ms - max(1, ttl_ms // SLICES) < ts_ms < gone_ms)
    assert living <= usage.messages <= living + slice_before
    assert usage.bytes == 10 * usage.messages
    assert Usage(usage.stored()).stored() == usage.stored()
    assert Usage(usage.stored()).messages == usage.messages


@given(st.lists(st.integers(1, 50), min_size=1, max_size=900), st.integers(0, 20_000))
def test_slices_are_bounded_and_nothing_is_lost_when_they_are_merged(steps, gone_ms):
    usage, ts_ms, stamps = Usage(), 0, []
    for step in steps:
        ts_ms += step
        stamps.append(ts_ms)
        usage.add(ts_ms, 1, 1, 1000)
    assert len(usage.buckets) <= MAX_BUCKETS
    assert usage.messages == len(steps)
    assert [bucket.first_ms for bucket in usage.buckets] == sorted(bucket.first_ms for bucket in usage.buckets)
    usage.drop_before(gone_ms)
    assert usage.messages >= sum(ts_ms >= gone_ms for ts_ms in stamps)


def test_the_next_expiry_is_that_of_the_message_that_expires_first():
    usage = Usage()
    assert usage.own_expiry_ms() == 0
    usage.add(0, 1, 1, 128_000, 9_000)
    usage.add(1, 1, 1, 128_000, 0)
    usage.add(2, 1, 1, 128_000, 7_000)
    usage.add(5_000, 1, 1, 128_000, 6_000)
    assert usage.own_expiry_ms() == 6_000
    assert usage.due(6_000) == []
    assert usage.due(6_001) == [(5_000, 5_000)]
    assert usage.due(7_001) == [(0, 2), (5_000, 5_000)]


def test_cleaned_messages_are_subtracted_from_their_slice():
    usage = Usage()
    usage.add(0, 3, 30, 128_000, 9_000)
    usage.cleaned(0, 0, messages=1, size=10, own_expiry_ms=11_000)
    assert (usage.messages, usage.bytes, usage.own_expiry_ms()) == (2, 20, 11_000)
    usage.cleaned(7_000, 7_000, messages=1, size=10, own_expiry_ms=0)
    assert (usage.messages, usage.own_expiry_ms()) == (2, 11_000)


def test_a_slice_that_grew_while_it_was_cleaned_stays_due():
    usage = Usage()
    usage.add(0, 3, 30, 128_000, 500)
    (slice_,) = usage.due(600)
    usage.add(700, 1, 10, 128_000, 900)
    usage.cleaned(*slice_, messages=3, size=30, own_expiry_ms=0)
    assert usage.messages == 1
    assert usage.due(1_000) == [(0, 700)]


def test_no_slice_counts_below_zero():
    usage = Usage()
    usage.add(100, 1, 10, 128_000, 500)
    usage.add(150, 1, 10, 1_280, 500)
    usage.cleaned(100, 100, messages=5, size=70, own_expiry_ms=0)
    assert [(bucket.messages, bucket.bytes) for bucket in usage.buckets] == [(0, 0), (1, 10)]
    assert (usage.messages, usage.bytes) == (1, 10)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1_000, 12_800, 3_600_000])), max_size=60))
def test_no_millisecond_is_in_two_slices_even_when_the_ttl_changes(added):
    usage, ts_ms = Usage(), 0
    for after_ms, ttl_ms in added:
        ts_ms += after_ms
        usage.add(ts_ms, 1, 1, ttl_ms)
    for one, other in itertools.pairwise(usage.buckets):
        assert one.last_ms < other.first_ms


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=40),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.data(),
)
def test_expiry_after_a_reader_is_reported_exactly_except_for_the_slice_that_is_expiring(added, cleaned, oldest, data):
    ttl_ms, usage, ids, ts_ms = 12_800, Usage(), [], 0
    for after_ms, messages in added:
        ts_ms += after_ms + 1
        usage.add(ts_ms, messages, 1, ttl_ms, 0, messages - 1)
        ids += [pack_id(ts_ms, sequence_id) for sequence_id in range(messages)]
    usage.drop_before(min(cleaned, oldest))
    usage = Usage(usage.stored(), usage.last_sequence_ids(), usage.last_dropped)
    read = data.draw(st.sampled_from(ids))
    lost = any(read < each < bound_at(oldest) for each in ids)
    for start in (after(read), bound_at(int.from_bytes(read[:8], "big") + 1)):
        told = usage.expired_from(start, oldest)
        if start == after(read):
            assert told >= lost
        expiring = any(bucket.first_ms < oldest <= bucket.last_ms for bucket in usage.buckets)
        if told and not any(start <= each < bound_at(oldest) for each in ids):
            assert expiring
            assert start < bound_at(oldest)


def test_a_start_inside_an_expired_batch_may_have_missed_some_of_it():
    usage = Usage()
    usage.add(100, 7, 70, 128_000, 0, 3)
    inside = pack_position(100, 3) + (5 << 16).to_bytes(10, "big")
    assert not usage.expired_from(inside, 100)
    assert usage.expired_from(inside, 101)
    assert not usage.expired_from(pack_position(100, 4) + bytes(10), 101)
