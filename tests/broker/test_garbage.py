"""Garbage collections stay short with many live objects, and frozen objects are collected when they fill memory."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest

from broker import garbage
from broker.config.config import config_of
from broker.garbage import THRESHOLDS, Reclaim, freeze_loaded, short_collections
from broker.main import run_daemon

#: Number of containers that a full collection may visit: those of the middle collections since the last full one, with
#: a margin.
VISITED = 701 * 11 * (THRESHOLDS[2] + 2)


@pytest.fixture
def _thawed():
    yield
    gc.unfreeze()


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.usefixtures("_thawed")
def test_no_collection_visits_long_lived_objects():
    visited = []

    def look(phase, info):
        if phase == "start" and info["generation"] == 2:
            visited.append(len(gc.get_objects()))

    gc.callbacks.insert(0, look)
    try:
        with short_collections():
            freeze_loaded()
            visited.clear()
            kept = [[number] for number in range(10 * VISITED)]
    finally:
        gc.callbacks.remove(look)
    assert len(visited) >= 8, "new containers are collected"
    assert max(visited) < VISITED < len(kept)


@pytest.mark.usefixtures("_thawed")
def test_a_cycle_that_died_young_is_collected():
    with short_collections():
        freeze_loaded()
        dead = weakref.ref(Cycle())
        kept = [[number] for number in range(2 * VISITED)]
        assert dead() is None
    assert kept


@pytest.mark.usefixtures("_thawed")
def test_frozen_garbage_is_collected_once_memory_has_grown_by_more_than_open_topics_explain(monkeypatch):
    topics = 1
    with short_collections():
        reclaim = Reclaim(lambda: topics)
        cycle = Cycle()
        dead = weakref.ref(cycle)
        gc.collect()  # freezes the object
        del cycle
        gc.collect()
        assert not reclaim.look(), "memory has not grown"
        monkeypatch.setattr(garbage, "UNEXPLAINED_BLOCKS", 1_000)
        reclaim._blocks = 0
        topics = 1_000_000
        assert not reclaim.look(), "topics were opened"
        assert dead() is not None
        topics = 1
        assert reclaim.look()
        assert dead() is None
        assert not reclaim.look(), "it begins from here"


async def test_a_daemon_keeps_collections_short_from_start_to_end(tmp_path):
    found = []

    def announce(running):
        del running
        found.append((gc.get_threshold(), garbage._freeze_survivors in gc.callbacks))
        os.kill(os.getpid(), signal.SIGTERM)

    config = config_of({"http.bind": "127.0.0.1:0", "storage.kind": "memory", "storage.min_free_bytes": 0})
    before = gc.get_threshold()
    try:
        await run_daemon(config, announce=announce)
    finally:
        gc.unfreeze()
    assert found == [(THRESHOLDS, True)]
    assert (gc.get_threshold(), garbage._freeze_survivors in gc.callbacks) == (before, False)
