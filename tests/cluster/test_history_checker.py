"""The checker of a cluster's histories finds and names each planted anomaly, and reports none in a correct history."""

from __future__ import annotations

import time
from collections import Counter
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.history.checker import check, verdict
from tests.cluster.history.planted_reads import PLANTERS as READS
from tests.cluster.history.planted_writes import PLANTERS as WRITES
from tests.cluster.history.records import Kind
from tests.cluster.history.simulated import Simulation

PLANTERS = [*WRITES, *READS]


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(1, 12))
def test_a_correct_service_raises_no_alarm(seed, clients, rounds):
    assert check(Simulation(seed, clients=clients, rounds=rounds).history) == []


@pytest.mark.parametrize(("kind", "plant"), PLANTERS, ids=[plant.__name__ for _, plant in PLANTERS])
def test_each_planted_anomaly_is_found_and_named(kind, plant):
    planted = 0
    for seed in range(24):
        history = Simulation(seed, clients=2, rounds=8).history
        if plant(history, Random(seed)):
            planted += 1
            assert kind in {anomaly.kind for anomaly in check(history)}, f"seed {seed}\n{verdict(history)}"
    assert planted >= 3


def test_every_kind_of_anomaly_is_planted():
    assert {kind for kind, _ in PLANTERS} == set(get_args(Kind))


def test_simulated_histories_contain_every_kind_of_event():
    """The checks need every kind of outcome in the histories."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        history = Simulation(seed).history
        seen.update(write.outcome for write in history.writes)
        seen.update(each.state for each in history.transactions)
        seen.update(poll.end for poll in history.polls)
        seen.update("sent again" for write in history.writes if write.unanswered > 1 or len(write.receipts) > 1)
    lacking = {"acknowledged", "refused", "unknown", "committed", "aborted", "end", "more", "held", "sent again"} - set(
        seen
    )
    assert not lacking


def test_thousands_of_writes_and_polls_are_checked_in_seconds():
    history = Simulation(1, clients=20, rounds=50).history
    assert len(history.writes) > 2_500
    assert len(history.polls) > 2_500
    begun_s = time.process_time()
    assert check(history) == []
    assert time.process_time() - begun_s < 10, "it takes a second where nothing else runs"
