"""Quotas: buckets that fill by the clock, refusals that say when to come back, and no name that hurts another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.security.grants import parse_grants
from broker.security.identity import Identity
from broker.security.quotas import MAX_BUCKETS, Quotas
from plainsong.protocol.errors import QuotaExceeded
from tests.security.named import GRANTS, named

T = "/v1/namespaces/ns/topics"


class Clock:
    s = 100.0

    def __call__(self):
        return self.s


def quotas(text, clock=None, **more):
    made = Quotas(clock or Clock(), **more)
    made.replace(parse_grants(f"format = 1\n{text}".encode()))
    return made


BYTES = '[[quota]]\nto = ["*"]\npublish_bytes_per_s = 1000\n'
A, B = Identity("a"), Identity("b")


def publish(made, who, size, topic="t"):
    made.enter(who, "publish", "ns", topic, size)


def test_a_bucket_has_two_seconds_and_fills_by_the_clock():
    clock = Clock()
    made = quotas(BYTES, clock)
    publish(made, A, 2000)
    with pytest.raises(QuotaExceeded) as caught:
        publish(made, A, 1)
    error = caught.value
    assert (error.code, error.outcome, error.retry_after_s) == ("quota_exceeded", "not-applied", 1)
    assert error.policy == '"publish_bytes_per_s";q=1000;w=1;qu="content-bytes"'
    assert error.state == '"publish_bytes_per_s";r=0;t=1'
    clock.s += 1
    publish(made, A, 1000)


def test_a_request_larger_than_the_bucket_is_let_in_when_it_is_full_and_owes_the_rest():
    clock = Clock()
    made = quotas(BYTES, clock)
    publish(made, A, 5000)
    clock.s += 2.5
    with pytest.raises(QuotaExceeded) as caught:
        publish(made, A, 5000)
    assert caught.value.retry_after_s == 3
    clock.s += 2.5
    publish(made, A, 5000)


def test_each_name_has_its_own_bucket_and_a_topic_one_for_all():
    made = quotas(BYTES)
    publish(made, A, 2000)
    publish(made, B, 2000)
    shared = quotas('[[quota]]\non = ["ns:t*"]\npublish_bytes_per_s = 1000\n')
    publish(shared, A, 2000)
    publish(shared, B, 2000, "t2")
    publish(shared, B, 2000, "other")
    with pytest.raises(QuotaExceeded):
        publish(shared, B, 1)


def test_what_is_refused_takes_nothing_from_any_bucket():
    made = quotas('[[quota]]\nto = ["*"]\nrequests_per_s = 10\npublish_bytes_per_s = 1\n')
    publish(made, A, 2)
    for _ in range(50):
        with pytest.raises(QuotaExceeded):
            publish(made, A, 2)
    for _ in range(19):
        made.enter(A, "get_topic", "ns", "t", 0)


def test_what_turns_out_to_be_the_cost_is_owed():
    clock = Clock()
    made = quotas('[[quota]]\nto = ["*"]\npublish_messages_per_s = 10\npoll_bytes_per_s = 100\n', clock)
    publish(made, A, 1)
    made.owe(A, "ns", "t", "publish_messages_per_s", 50)
    with pytest.raises(QuotaExceeded):
        publish(made, A, 1)
    made.enter(A, "poll", "ns", "t", 0)
    made.owe(A, "ns", "t", "poll_bytes_per_s", 1_000)
    with pytest.raises(QuotaExceeded) as caught:
        made.enter(A, "poll", "ns", "t", 0)
    assert caught.value.retry_after_s == 8
    made.enter(B, "poll", "ns", "t", 0)


def test_several_processes_share_a_limit():
    made = quotas(BYTES, share=0.25)
    publish(made, A, 500)
    with pytest.raises(QuotaExceeded):
        publish(made, A, 1)


def test_parked_polls_are_counted_until_they_end():
    made = quotas('[[quota]]\nto = ["a"]\nparked_polls = 2\n')
    first, second = made.park(A, "ns", "t"), made.park(A, "ns", "t")
    with pytest.raises(QuotaExceeded):
        made.park(A, "ns", "t")
    made.park(B, "ns", "t")
    first()
    made.park(A, "ns", "t")()
    second()
    assert not made._counts


def test_a_name_without_a_quota_is_not_concerned():
    made = quotas('[[quota]]\nto = ["a"]\nrequests_per_s = 1\n')
    assert made.concern(A)
    assert not made.concern(B)
    assert not quotas("").concern(A)


def test_a_stream_is_slowed_down_instead_of_refused():
    made = quotas(BYTES)
    assert made.pause_s(A, "ns", "t", 2000) == 0
    assert made.pause_s(A, "ns", "t", 3000) == 3.0
    assert made.pause_s(B, "ns", "t", 1) == 0


def test_what_is_kept_of_names_is_bounded():
    made = quotas(BYTES)
    for number in range(MAX_BUCKETS + 100):
        publish(made, Identity(f"n{number}"), 1)
    assert made.buckets <= MAX_BUCKETS


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), max_size=40))
def test_nobody_gets_more_than_the_rate_and_one_burst_and_one_request(course):
    clock = Clock()
    made, begun_s, taken, largest = quotas(BYTES, clock), clock.s, 0, 0
    for pause_s, size in course:
        clock.s += pause_s
        try:
            publish(made, A, size)
        except QuotaExceeded:
            continue
        taken, largest = taken + size, max(largest, size)
    assert taken <= 2000 + 1000 * (clock.s - begun_s) + max(0, largest - 0) + 1e-6


@pytest.mark.parametrize("listener", ["lane", "hypercorn"])
async def test_over_its_quota_a_name_is_429_and_others_go_on(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        quota = (
            '[[quota]]\nto = ["writer"]\npublish_requests_per_s = 1\n[[quota]]\nto = ["owner"]\nopen_transactions = 1\n'
        )
        daemon.files.grant(GRANTS + quota)
        await daemon.reload()
        found = [await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]}) for _ in range(6)]
        statuses = [each.status_code for each in found]
        assert statuses[:2] == [200, 200]
        assert 429 in statuses
        over = found[statuses.index(429)]
        assert over.json()["code"] == "quota_exceeded"
        assert over.headers["ratelimit-policy"] == '"publish_requests_per_s";q=1;w=1'
        assert over.headers["ratelimit"].startswith('"publish_requests_per_s";r=0;t=')
        assert int(over.headers["retry-after"]) >= 1
        for _ in range(6):
            assert (await daemon.ask("owner", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200
        assert (await daemon.ask("owner", "POST", "/v1/transactions")).status_code == 200
        assert (await daemon.ask("owner", "POST", "/v1/transactions")).status_code == 429
        assert (await daemon.ask("other", "POST", "/v1/transactions")).status_code == 200
        text = (await daemon.ask("operator", "GET", "/metrics")).text
        assert 'plainsong_quota_refusals_total{quota="publish_requests_per_s"}' in text
