"""Drivers killed while they write: in the end the topic has exactly the input's rows."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from disturbed import Disturbance
from topics import Topics, numbers, wanted
from writing_program import Program, Save

from tests.daemon.harness import Daemon
from tests.ports import free_address

ROWS = 2_000
FILES = 3


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        yield daemon


@pytest.fixture
def topics(daemon):
    return Topics("http://{}:{}".format(*daemon.address))


#: When the driver dies: in the stream's second micro-batch, and in a batch save that runs at the same time.
BOTH_WAYS = [
    ("before_commit", "after_commit"),
    pytest.param("after_commit", "before_commit", marks=pytest.mark.torture),
]


@pytest.mark.parametrize(("in_stream", "in_save"), BOTH_WAYS)
def test_rows_of_a_killed_driver_are_published_once_by_the_next_run(
    spark, daemon, topics, tmp_path, in_stream: str, in_save: str
) -> None:
    for name in ("stream", "save"):
        topics.create(name)
        (tmp_path / name).mkdir()
    (tmp_path / "stream" / "in").mkdir()
    for number in range(FILES):
        file = tmp_path / "stream" / "in" / f"{number}.txt"
        file.write_text("".join(f"{row}\n" for row in range(number * ROWS, (number + 1) * ROWS)))
        os.utime(file, (number, number))  # Spark reads them by age
    to_stream = topics.options("stream")
    to_save = topics.options("save", producerName="job", sequenceId=0)

    streaming = Save(to_stream, Disturbance(str(tmp_path / "stream"), batch=1, **{in_stream: "wait"}))
    saving = Save(to_save, Disturbance(str(tmp_path / "save"), **{in_save: "wait"}), ROWS)
    Program([streaming, saving]).run_and_kill()
    assert topics.counted("stream") == wanted(ROWS if in_stream == "before_commit" else 2 * ROWS)
    assert topics.counted("save") == (Counter() if in_save == "before_commit" else wanted(ROWS))
    assert not (tmp_path / "stream" / "checkpoint" / "commits" / "1").exists()
    daemon.kill()
    daemon.start()
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(tmp_path / "stream" / "in"))
    stream = lines.selectExpr("value as payload").writeStream.format("plainsong").options(**to_stream)
    stream = stream.option("checkpointLocation", str(tmp_path / "stream" / "checkpoint"))
    stream.trigger(availableNow=True).start().awaitTermination()
    numbers(spark, ROWS).write.format("plainsong").options(**to_save).mode("append").save()
    assert topics.counted("stream") == wanted(FILES * ROWS)
    assert topics.counted("save") == wanted(ROWS)
