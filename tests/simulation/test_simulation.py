"""Simulated histories are good, and a seed determines a history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation import clocks, scheduling
from tests.simulation.__main__ import noted
from tests.simulation.world import AMONG_SEVERAL, CLIENTS, EVERYWHERE, KNOBS, plan_of, simulate

#: Histories of an ordinary run, 10 seconds on one core; ``make torture`` and ``make simulate`` run more.
COUNT = 100


def simulation(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--json", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, timeout=570, env=environment, check=False)


def test_histories_of_one_and_of_several_instances_keep_every_promise():
    done = simulation("--count", str(COUNT))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["histories"] == COUNT


def test_histories_whose_commits_the_event_loop_writes_keep_every_promise():
    done = simulation("--count", str(COUNT // 2), "--inline")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["histories"] == COUNT // 2


def test_each_kind_of_client_fault_and_setting_is_in_many_histories():
    plans = [plan_of(seed) for seed in range(500)]
    for had, every in (
        (
            (set(plan.clients) for plan in plans),
            {"moments", "ledger", "jobs", "hasty", "idle", "tephra", "tephra writer", *(name for name, _ in CLIENTS)},
        ),
        ((set(plan.faults) for plan in plans), {*EVERYWHERE, *AMONG_SEVERAL}),
        (
            ({name for name, _ in plan.knobs} for plan in plans),
            {"transactions__thrift", *(name for name, _, _ in KNOBS)},
        ),
    ):
        counts = Counter(each for some in had for each in some)
        assert set(counts) == every
        assert min(counts.values()) >= 10, counts


def test_a_seed_gives_the_same_history_in_every_process():
    once, again = simulation("--seed", "7"), simulation("--seed", "7", hash_seed="random")
    assert once.stdout == again.stdout
    assert json.loads(once.stdout)["story"]


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.torture)])
def test_repeated_histories_are_equal_down_to_the_last_answer_and_its_time(count):
    once, again = (simulation("--count", str(count), "--first", "100", "--digest") for _ in range(2))
    assert json.loads(once.stdout)["digest"] == json.loads(again.stdout)["digest"]


def test_skipping_rounds_for_a_single_task_does_not_change_a_history(monkeypatch):
    plans = [plan_of(seed) for seed in (1, 5, 19)]
    assert {plan.instances for plan in plans} == {1, 2, 3}
    left_out = [noted(simulate(plan)) for plan in plans]
    monkeypatch.setattr(scheduling, "is_alone", lambda until_s: False)
    monkeypatch.setattr(clocks, "is_alone", lambda until_s: False)
    assert [noted(simulate(plan)) for plan in plans] == left_out


@pytest.mark.torture
def test_endless_histories_keep_every_promise():
    done = simulation("--first", str(COUNT), "--count", "1000000", "--seconds", "560")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.torture
def test_endless_histories_whose_commits_the_event_loop_writes_keep_every_promise():
    done = simulation("--count", "1000000", "--seconds", "280", "--inline")
    assert done.returncode == 0, done.stdout[-4000:]
