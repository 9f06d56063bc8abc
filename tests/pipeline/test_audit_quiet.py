"""A quiet topic is not reported as lost messages, and a loss still is: runs without messages leave a note for the next run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.cli.command import CommandFailed
from plainsong.protocol.ids import pack_id
from pyspark_plainsong.pipeline.audit import stream as quiet_module
from pyspark_plainsong.pipeline.audit.manifest import TablesManifest
from pyspark_plainsong.pipeline.audit.stream import NOTES, Quiet

TOPIC, TTL_S = "n:audit", 1000
AT_MS = 1_740_000_000_000


def tables(at_ms=AT_MS, life=1):
    return TablesManifest(through={TOPIC: pack_id(at_ms, 0).hex()}, lives={TOPIC: life})


@pytest.fixture
def clock(monkeypatch):
    """Sets the time, in seconds after the last message in the tables."""

    def later(seconds):
        monkeypatch.setattr(quiet_module, "now_ms", lambda: AT_MS + seconds * 1000)
        return AT_MS + seconds * 1000

    return later


def test_within_half_of_the_ttl_nothing_can_be_lost_and_later_a_check_is_needed(tmp_path, clock):
    quiet = Quiet(tmp_path, {TOPIC: TTL_S})
    clock(499)
    assert quiet.is_safe(tables())
    clock(501)
    assert not quiet.is_safe(tables())
    assert quiet.is_safe(TablesManifest()), "what has nothing misses nothing"


def test_consecutive_runs_keep_a_topic_without_messages_safe(tmp_path, clock):
    for seconds in (400, 800, 1200, 1600):
        quiet = Quiet(tmp_path, {TOPIC: TTL_S})
        now = clock(seconds)
        assert quiet.is_safe(tables())
        quiet.note(tables(), TOPIC, now)
    assert quiet.is_old(tables())


def test_after_an_outage_an_empty_topic_proves_nothing(tmp_path, clock):
    """Messages may have been published and have expired during the outage."""
    quiet = Quiet(tmp_path, {TOPIC: TTL_S})
    quiet.note(tables(), TOPIC, clock(1001))
    assert not quiet.is_safe(tables())
    assert not (tmp_path / NOTES).exists()


def test_notes_about_other_messages_or_another_generation_are_ignored(tmp_path, clock):
    quiet = Quiet(tmp_path, {TOPIC: TTL_S})
    quiet.note(tables(), TOPIC, clock(900))
    clock(1300)
    assert quiet.is_safe(tables())
    assert not quiet.is_safe(tables(life=2))
    assert not quiet.is_safe(tables(AT_MS + 1))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"n:audit": 5}', '{"n:audit": [1, "ff"]}'])
def test_a_lost_note_is_a_false_alarm_at_worst(tmp_path, clock, text):
    (tmp_path / NOTES).write_text(text, encoding="utf-8")
    clock(600)
    assert not Quiet(tmp_path, {TOPIC: TTL_S}).is_safe(tables())


def test_a_run_that_took_longer_than_messages_live_fails(tmp_path, clock):
    quiet = Quiet(tmp_path, {TOPIC: TTL_S})
    clock(400)
    assert quiet.is_safe(tables())
    clock(999)
    quiet.check()
    clock(1001)
    with pytest.raises(CommandFailed, match="longer than messages live"):
        quiet.check()


@given(st.lists(st.integers(1, 2500), max_size=6), st.integers(1, 6000))
def test_no_possible_loss_is_called_safe(tmp_path_factory, gaps, lost_at):
    """A message is published at `lost_at`, and runs follow at intervals `gaps`; once it has expired unread, none is safe."""
    folder, seconds = tmp_path_factory.mktemp("quiet"), 0
    for gap in gaps:
        seconds += gap
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(quiet_module, "now_ms", lambda now=seconds: AT_MS + now * 1000)
            quiet = Quiet(folder, {TOPIC: TTL_S})
            if lost_at <= seconds < lost_at + TTL_S:
                return  # this run reads the message
            if lost_at + TTL_S <= seconds:
                assert not quiet.is_safe(tables())
            quiet.note(tables(), TOPIC, AT_MS + seconds * 1000)
