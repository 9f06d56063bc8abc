"""Each figure of a report equals what straightforward Python computes from the same messages."""

from __future__ import annotations

import random

import pytest

from pyspark_plainsong.pipeline.report.facts import Grid
from pyspark_plainsong.pipeline.report.figures import (
    hold_times,
    latency_by_step,
    latency_by_topic,
    queue_sizes,
    stored_for,
    throughput,
    visibility,
    with_decisions,
)
from pyspark_plainsong.pipeline.report.sources import DECISIONS, MESSAGES, Decision
from tests.pipeline import reported
from tests.pipeline.reported import Row, Topic

START_MS = 1_700_000_000_000
TOPICS = [
    Topic("ns:a", 20_000, START_MS + 5_000, False),
    Topic("ns:b", 3_000, START_MS - 1_000, True),
    Topic("ns:c", 10**9, START_MS, False),
    Topic("ns:empty", 1_000, START_MS, False),
]
TOPIC_COLUMNS = "topic string, ttl_ms long, known_from_ms long, whole boolean"


@pytest.fixture(scope="module")
def history():
    return reported.a_history(7, 400, START_MS)


def frame(spark, rows, schema=MESSAGES):
    return spark.createDataFrame(rows, schema).coalesce(2)


def collected(frame) -> set[tuple]:
    rows = [tuple(row) for row in frame.collect()]
    assert len(set(rows)) == len(rows)
    return set(rows)


@pytest.mark.parametrize("step_ms", [1_000, 7_777])
def test_sizes_equal_those_counted_message_by_message(spark, history, step_ms):
    grid = Grid(START_MS + 2_500, START_MS + 40_000, step_ms)
    rows, _ = history
    found = queue_sizes(frame(spark, rows), frame(spark, TOPICS, TOPIC_COLUMNS), grid)
    assert collected(found) == reported.sizes(rows, TOPICS, grid)


def test_a_message_is_in_its_queue_to_the_last_millisecond_of_its_ttl_and_no_longer(spark):
    grid = Grid(START_MS, START_MS + 3_001, 1)
    row = Row("ns:b", bytes(20), START_MS, None, 5, 0)
    found = queue_sizes(frame(spark, [row]), frame(spark, [TOPICS[1]], TOPIC_COLUMNS), grid)
    size = {time_ms: (messages, size) for _, time_ms, messages, size, _ in found.collect()}
    assert (size[START_MS], size[START_MS + 3_000], size[START_MS + 3_001]) == ((1, 5), (1, 5), (0, 0))


def test_throughput_has_every_message_of_the_range_in_its_step_and_steps_without_messages(spark, history):
    grid = Grid(START_MS + 2_500, START_MS + 40_000, 7_777)
    rows, _ = history
    found = throughput(frame(spark, rows), frame(spark, TOPICS, TOPIC_COLUMNS), grid)
    assert collected(found) == reported.rates(rows, TOPICS, grid)


def test_stored_messages_wait_until_they_are_published(spark, history):
    grid = Grid(START_MS, START_MS + 10**6, 1_000)
    rows, _ = history
    for row in stored_for(frame(spark, rows), grid).collect():
        waited = [each.publish_ms - each.write_ms for each in rows if each.topic == row.topic and each.write_ms]
        assert (row.messages, row.max_ms) == (len(waited), max(waited))
        assert row.p95_ms == pytest.approx(reported.quantile(waited, 0.95))


@pytest.mark.parametrize("doubt", [False, True])
def test_a_message_waits_for_every_transaction_that_blocks_a_reader_at_or_before_it(spark, history, doubt):
    rows, decisions = history
    if not doubt:
        decisions = [each._replace(decided_ms=each.begun_ms + 800) for each in decisions if each.state != "unknown"]
        known = {(-1 if each.state == "aborted" else 1) * each.pointer for each in decisions}
        rows = [row for row in rows if row.pointer in known or not row.pointer]
    expected = reported.visible(rows, decisions)
    decided = with_decisions(frame(spark, rows), frame(spark, decisions, DECISIONS))
    found = {bytes(row.message_id): (row.waited_ms, row.known) for row in visibility(decided).collect()}
    assert found == expected
    assert {"exact", "never"} <= {known for _, known in found.values()}
    assert {known == "at_least" for _, known in found.values()} == {False, doubt}


def test_quantiles_of_topics_and_steps_are_those_of_their_messages(spark, history):
    rows, decisions = history
    grid = Grid(START_MS + 1_000, START_MS + 30_000, 5_000)
    expected = reported.visible(rows, decisions)
    seen = visibility(with_decisions(frame(spark, rows), frame(spark, decisions, DECISIONS))).cache()
    for row in latency_by_topic(seen, grid).collect():
        of_topic = [
            expected[each.message_id]
            for each in rows
            if each.topic == row.topic and grid.start_ms <= each.publish_ms < grid.end_ms
        ]
        waited = [waited_ms for waited_ms, _ in of_topic if waited_ms is not None]
        assert (row.messages, row.max_ms) == (len(waited), max(waited))
        assert row.p50_ms == pytest.approx(reported.quantile(waited, 0.5))
        assert row.p99_ms == pytest.approx(reported.quantile(waited, 0.99))
        for known in ("at_least", "waiting", "never", "unknown"):
            assert row[known] == sum(each == known for _, each in of_topic)
    steps = latency_by_step(seen, grid).collect()
    waited = [expected[row.message_id][0] for row in rows if grid.start_ms <= row.publish_ms < grid.end_ms]
    assert sum(row.messages for row in steps) == sum(each is not None for each in waited)
    seen.unpersist()


def test_everything_after_an_open_transaction_waits_and_nothing_before_it_does(spark):
    rows = [
        Row("ns:a", bytes([number]) * 20, START_MS + number, None, 1, 9 if number == 2 else 0) for number in (1, 2, 3)
    ]
    decisions = [Decision(9, 9, "shop", "in_progress", START_MS, None)]
    seen = visibility(with_decisions(frame(spark, rows), frame(spark, decisions, DECISIONS)))
    assert [(row.waited_ms, row.known) for row in seen.orderBy("message_id").collect()] == [
        (0, "exact"),
        (None, "waiting"),
        (None, "waiting"),
    ]


def test_hold_times_are_from_the_begin_and_from_the_first_message_of_each_topic_to_the_end(spark, history):
    rows, decisions = history
    decisions = [*decisions, Decision(5, 4, "batch", "in_progress", START_MS, None)]
    rows = [
        *rows,
        Row("ns:a", b"z" * 20, START_MS + 100, None, 3, 5),
        Row("ns:a", b"y" * 20, START_MS + 50, None, 4, -4),
    ]
    decisions = [*decisions, Decision(4, 4, "batch", "in_progress", START_MS, None)]
    now_ms = START_MS + 10**6
    expected = set()
    for transaction in {decision.transaction for decision in decisions}:
        of_it = {each.pointer: each for each in decisions if each.transaction == transaction}
        (any_of_it, *_) = of_it.values()
        for topic in {row.topic for row in rows if abs(row.pointer) in of_it}:
            its = [row for row in rows if row.topic == topic and abs(row.pointer) in of_it]
            until = now_ms if any_of_it.state == "in_progress" else any_of_it.decided_ms
            first = min(row.publish_ms for row in its)
            expected.add(
                (
                    transaction,
                    topic,
                    any_of_it.client,
                    any_of_it.state,
                    len(its),
                    sum(row.bytes for row in its),
                    any_of_it.begun_ms,
                    first,
                    any_of_it.decided_ms,
                    None if until is None else until - any_of_it.begun_ms,
                    None if until is None else max(0, until - first),
                )
            )
    found = hold_times(frame(spark, rows), frame(spark, decisions, DECISIONS), now_ms)
    assert collected(found) == expected
    assert (4, "ns:a", 2, 7) in {(row.transaction, row.topic, row.messages, row.bytes) for row in found.collect()}


def test_random_grids_have_samples_at_both_ends():
    random_ = random.Random(3)
    for _ in range(200):
        grid = Grid(START_MS, START_MS + random_.randrange(1, 10_000), random_.randrange(1, 3_000))
        assert grid.samples()[0] == grid.start_ms
        assert grid.samples()[-1] == grid.end_ms
        assert len(grid.starts()) == grid.steps
        assert sum(grid.length_s(step) for step in range(grid.steps)) == pytest.approx((grid.end_ms - START_MS) / 1000)
