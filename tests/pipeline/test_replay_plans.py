"""The plan of a replay: found again, resumed, and never published twice unless requested."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.cli.command import CommandFailed
from pyspark_plainsong.pipeline.files import LocalFiles
from pyspark_plainsong.pipeline.replay.plans import Plan, Plans, ReplayChunk


@pytest.fixture
def plans(tmp_path):
    return Plans(LocalFiles(tmp_path), "_replays")


def some_plan(start="10", end="20", done=0, attempt=0, topic="again"):
    chunks = (ReplayChunk(start, 5), ReplayChunk(start + "5", 5))
    return Plan("default:orders generation 1", start, end, "default", topic, 1, attempt, chunks, done)


KEY = st.text("0123456789abcdef", min_size=1, max_size=3)


@given(KEY, KEY, st.text("abc-_", min_size=1, max_size=255), st.integers(0, 3))
def test_names_of_producers_are_short_and_distinct_for_each_range(start, end, topic, attempt):
    plan = some_plan(start * 13, end * 13, attempt=attempt, topic=topic)
    assert len(plan.producer.encode()) <= 255
    assert plan.producer != some_plan(start * 13, end * 13 + "0", attempt=attempt, topic=topic).producer


def test_a_plan_round_trips(plans):
    plans.save(some_plan(done=1))
    assert plans.all() == [some_plan(done=1)]


def test_a_replay_that_was_begun_is_continued(plans):
    plans.save(some_plan(done=1))
    assert plans.chosen(some_plan(end="30"), any_range=True, anew=False) == some_plan(done=1)
    assert plans.chosen(some_plan(), any_range=False, anew=False) == some_plan(done=1)


@pytest.mark.parametrize("done", [1, 2])
def test_a_partly_replayed_range_is_refused(plans, done):
    plans.save(some_plan(done=done))
    with pytest.raises(CommandFailed, match=r"a part of this (has been|is being) replayed into again already"):
        plans.chosen(some_plan(start="15", end="30"), any_range=False, anew=False)
    behind = some_plan(start="20", end="30")
    assert plans.chosen(behind, any_range=False, anew=False) == behind
    other = some_plan(topic="other")
    assert plans.chosen(other, any_range=False, anew=False) == other


def test_anew_uses_another_producer_each_time_the_last_one_has_ended(plans):
    plans.save(some_plan(done=2))
    again = plans.chosen(some_plan(), any_range=False, anew=True)
    assert again.attempt == 1
    assert again.producer != some_plan().producer
    plans.save(again)  # and killed
    assert plans.chosen(some_plan(), any_range=False, anew=True) == again
    assert plans.chosen(some_plan(end="30"), any_range=True, anew=True) == again
    plans.save(replace(again, done=2))
    assert plans.chosen(some_plan(), any_range=False, anew=True).attempt == 2


def test_a_replay_of_everything_does_not_continue_one_that_began_elsewhere(plans):
    plans.save(some_plan(start="15", done=1))
    with pytest.raises(CommandFailed, match="a part of this is being replayed"):
        plans.chosen(some_plan(), any_range=True, anew=False)


def test_a_replay_does_not_continue_with_changed_files(plans):
    plans.save(replace(some_plan(done=1), as_read={"files": "a"}))
    others = replace(some_plan(), as_read={"files": "b"})
    with pytest.raises(CommandFailed, match="the files are not those of the earlier, unfinished replay into again"):
        plans.chosen(others, any_range=True, anew=False)
    assert plans.chosen(others, any_range=True, anew=True).attempt == 1


def test_an_unreadable_plan_stops_everything(plans, tmp_path):
    plans.save(some_plan())
    (file,) = (tmp_path / "_replays").glob("*.json")
    file.write_text("{}")
    with pytest.raises(CommandFailed, match="cannot be read"):
        plans.all()
