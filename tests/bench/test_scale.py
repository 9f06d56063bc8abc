"""The plan for several machines is complete, costs more for more load, and places topics as the daemon does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scale import plan
from bench.scale_costs import FILE, Costs
from bench.scale_model import Fleet, Load, Placement, commits_per_s, member_of, reckon
from bench.scale_storm import storm
from plainsong.protocol.cluster import Assignment
from plainsong.protocol.cluster import Placement as Pinned
from storage.hbase.owners import BLOCK
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOAD = Load(topics=2000, messages_per_s=50_000)
FLEET = Fleet(instances=7, region_servers=3)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return Costs.read()


@pytest.fixture(scope="module")
def placement() -> Placement:
    return Placement(LOAD, seed=1)


def test_every_message_and_topic_is_at_one_instance_and_one_region_server(placement: Placement, costs: Costs):
    outcome = reckon(placement, FLEET, costs)
    assert sum(each.topics for each in outcome.instances) == LOAD.topics
    assert sum(each.messages_per_s for each in outcome.instances) == pytest.approx(LOAD.messages_per_s)
    assert sum(each.messages_per_s for each in outcome.region_servers) == pytest.approx(LOAD.messages_per_s)
    assert sum(each.writes_per_s for each in outcome.region_servers) == pytest.approx(2 * outcome.commits_per_s)


def test_topics_are_placed_as_the_daemon_places_them(placement: Placement):
    assignment = Assignment([member_of(number) for number in range(7)], Pinned())
    owners = placement.owners(7)
    for name, number in list(zip(placement.names, owners, strict=True))[:200]:
        assert assignment.owner(name) == member_of(number)


def test_an_added_instance_takes_topics_and_moves_no_others(placement: Placement):
    moved = [(a, b) for a, b in zip(placement.owners(7), placement.owners(8), strict=True) if a != b]
    assert {after for _, after in moved} == {7}
    assert LOAD.topics / 16 < len(moved) < LOAD.topics / 4


@given(rate=st.floats(1e-3, 1e6), commit_s=st.floats(1e-4, 1.0))
def test_a_topic_commits_no_more_often_than_requested_or_possible(rate: float, commit_s: float):
    commits = commits_per_s(rate, commit_s)
    assert 0 < commits <= min(rate, 1 / commit_s) * (1 + 1e-9)
    assert commits >= 0.5 * min(rate, 1 / commit_s)
    assert commits_per_s(2 * rate, commit_s) >= commits


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(1.1, 20.0))
def test_more_messages_raise_every_load_and_make_commits_larger(factor: float):
    costs = Costs.read()
    small = Placement(replace(LOAD, topics=200), seed=1)
    large = small.asked(replace(small.load, messages_per_s=LOAD.messages_per_s * factor))
    before, after = reckon(small, FLEET, costs), reckon(large, FLEET, costs)
    assert all(after.walls[name] > before.walls[name] for name in before.walls)
    assert large.load.messages_per_s / after.commits_per_s > small.load.messages_per_s / before.commits_per_s


def test_larger_requests_and_fewer_readers_cost_less(placement: Placement, costs: Costs):
    def busy(load: Load) -> float:
        return sum(each.busy for each in reckon(placement.asked(load), FLEET, costs).instances)

    assert busy(replace(LOAD, messages_per_request=20)) < busy(LOAD) < busy(replace(LOAD, readers_per_topic=2))
    assert busy(replace(LOAD, misdirected=0.0)) < busy(LOAD) < busy(replace(LOAD, misdirected=1.0))


def test_a_busy_hbase_slows_commits_and_makes_them_larger_instead_of_ending(placement: Placement, costs: Costs):
    slow = replace(costs, region_write_us=costs.region_write_us * 40)
    quick, held = reckon(placement, FLEET, costs), reckon(placement, FLEET, slow)
    assert held.commit_ms > quick.commit_ms
    assert held.commits_per_s < quick.commits_per_s


def test_a_plan_keeps_its_headroom_and_is_not_much_larger_than_it_needs_to_be(placement: Placement, costs: Costs):
    fleet, outcome = plan(placement, costs, 0.6)
    assert max(outcome.walls.values()) <= 0.6
    assert outcome.first_wall in outcome.walls
    smaller = reckon(placement, replace(fleet, instances=max(1, fleet.instances * 3 // 4)), costs)
    assert max(smaller.walls.values()) > 0.6


def test_a_topic_too_large_for_one_owner_has_no_plan(costs: Costs):
    alone = Placement(Load(topics=1, messages_per_s=1e6, messages_per_request=1), seed=1)
    with pytest.raises(ValueError, match="one topic alone"):
        plan(alone, costs, 0.6)


def test_topics_of_a_dead_instance_are_unavailable_until_its_session_ends_and_are_opened_once(
    placement: Placement, costs: Costs
):
    one = storm(placement, 7, [3], costs, session_s=5.0)
    two = storm(placement, 7, [3, 4], costs, session_s=5.0)
    assert one.topics == placement.owners(7).count(3)
    assert two.topics == one.topics + placement.owners(7).count(4)
    assert 5.0 < one.median_s <= one.p99_s <= one.last_s < two.last_s


def test_blocks_of_epochs_are_issued_one_by_one_when_all_instances_start_again(placement: Placement, costs: Costs):
    everything = storm(placement, 7, range(7), costs, session_s=0.0)
    assert everything.topics == LOAD.topics
    assert everything.last_s >= everything.counter_s >= LOAD.topics / BLOCK * costs.round_trip_ms / 1e3


def test_equal_seeds_give_equal_results_and_other_seeds_others():
    rates = [Placement(replace(LOAD, topics=100), seed).rates for seed in (1, 1, 2)]
    assert rates[0] == rates[1] != rates[2]


def test_every_cost_is_measured_and_names_its_source(tmp_path: Path):
    found = json.loads(FILE.read_text(encoding="utf-8"))
    assert found.keys() == {field.name for field in fields(Costs)}
    found["poll_us"].pop("source")
    (tmp_path / "costs.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="where poll_us is from"):
        Costs.read(tmp_path / "costs.json")


def test_the_command_prints_its_tables():
    command = [sys.executable, "-m", "bench.scale", "--topics", "300", "--messages", "3e4", "--per-request", "10,100"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert "| instances, one core each |" in printed
    assert "| one instance dies |" in printed
    assert "| load × 2 |" in printed
