"""Two daemons on one store log that another daemon uses it, but not every time; a 413 names the setting to change."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from broker.config.config import config_of
from broker.contention import PAUSE_S, Contention
from broker.metrics import Metrics
from broker.stores import MESSAGE_MARGIN_BYTES, fitted, message_bound
from plainsong.protocol.names import TopicName
from storage.memory import MemoryStore


def test_topics_taken_by_another_daemon_are_logged_once_in_a_while_and_not_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 1000.0
    metrics = Metrics("1.2.3")
    metrics.on_deposed = Contention("tables plainsong_*", lambda: now_s)
    with caplog.at_level(logging.WARNING, "broker.contention"):
        for number in range(50):
            metrics.deposed(TopicName("ns", f"t{number}"))
        (first,) = caplog.records
        now_s += PAUSE_S
        metrics.deposed(TopicName("ns", "t"))
    second = caplog.records[1]
    assert first.getMessage() == second.getMessage() == "another daemon uses this store"
    assert (first.__dict__["topics_taken"], second.__dict__["topics_taken"]) == (1, 50)
    assert "cluster.zookeeper" in first.__dict__["hint"]


@pytest.mark.parametrize(
    ("row_bytes", "bound"),
    [
        (None, "topic.max_message_bytes"),
        (64 << 20, "topic.max_message_bytes"),
        (1 << 20, "storage.hbase.max_cell_bytes"),
    ],
)
async def test_a_refusal_of_a_message_names_the_setting_that_bounds_it(row_bytes: int | None, bound: str) -> None:
    traits = replace(MemoryStore().traits, max_row_bytes=row_bytes)
    config = fitted(config_of({}), traits)
    assert message_bound(config, traits) == bound
    if bound != "topic.max_message_bytes":
        assert config.topic.max_message_bytes == (1 << 20) - MESSAGE_MARGIN_BYTES
