"""Expired messages stay expired despite a longer TTL, cleaning, and clocks that go back."""

from __future__ import annotations

from plainsong.protocol.keys import HIGH_WATER, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, Look, PlanCleaning, Publish, SetProperties
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.state import Now, TopicState

NAME = TopicName("ns", "t")
NOW_MS = 1_700_000_000_000


def ask(core: TopicCore, ask_, now_ms: int):
    now = Now(now_ms, 0.0)
    step = core.step([("caller", ask_)], now)
    [(_, answer)] = core.settled(step, now)
    return answer, step


def a_topic() -> TopicCore:
    core = TopicCore(TopicState(NAME))
    ask(core, Create(TopicProperties(ttl_s=10)), NOW_MS)
    ask(core, Publish(PublishRequest([b"x"]), 0), NOW_MS)
    return core


def test_a_longer_time_to_live_does_not_revive_expired_messages():
    core = a_topic()
    ask(core, SetProperties({"ttl": 100}), NOW_MS + 10_001)
    span, _ = ask(core, Look(bytes(20)), NOW_MS + 10_002)
    assert span.oldest_ms == NOW_MS + 1


def test_a_longer_time_to_live_set_in_time_keeps_live_messages():
    core = a_topic()
    ask(core, SetProperties({"ttl": 100}), NOW_MS + 10_000)
    span, _ = ask(core, Look(bytes(20)), NOW_MS + 50_000)
    assert span.oldest_ms <= NOW_MS


def test_a_backward_step_of_the_clock_revives_nothing():
    core = a_topic()
    ask(core, Look(bytes(20)), NOW_MS + 10_001)
    span, _ = ask(core, Look(bytes(20)), NOW_MS)
    assert span.oldest_ms == NOW_MS + 1


def test_messages_seen_as_expired_stay_so_for_an_owner_with_a_slow_clock():
    core = a_topic()
    _, step = ask(core, Look(bytes(20)), NOW_MS + 11_001)
    [mark] = [put for put in step.operations if put.prefix == system_key(HIGH_WATER, NAME, 1)]
    state = TopicState(NAME)
    state.begin(core.state.metadata, HighWater.decode(mark.values[0]))
    state.loaded()
    span, _ = ask(TopicCore(state), Look(bytes(20)), NOW_MS)
    assert span.oldest_ms == NOW_MS + 1_001


def test_reads_write_the_time_of_the_topic_only_when_something_expires_and_once_in_a_second():
    core = a_topic()
    written = [bool(ask(core, Look(bytes(20)), NOW_MS + at)[1].operations) for at in (9_000, 10_500, 11_001, 12_500)]
    assert written == [False, True, False, False]


def test_a_query_outside_steps_equals_a_step_that_writes_nothing_and_answers_at_once():
    def beside(core, look, now_ms, mono_s=0.0):
        return core.look_now(look, Now(now_ms, mono_s))

    core, other = a_topic(), a_topic()
    for look in (Look(bytes(20)), Look(bytes(20), end_before=b"\xff" * 20), Look(b"\xff" * 20)):
        assert beside(core, look, NOW_MS + 10) == ask(other, look, NOW_MS + 10)[0]
    assert beside(core, Look(bytes(20)), NOW_MS) == ask(other, Look(bytes(20)), NOW_MS)[0], "its time does not go back"
    # Waiting, refusing and writing take a step first.
    assert beside(core, Look(b"\xff" * 20, deadline_s=5.0), NOW_MS + 10) is None
    assert beside(core, Look(b"\xff" * 20, deadline_s=5.0), NOW_MS + 10, 6.0) is not None
    assert beside(core, Look(bytes(20)), NOW_MS + 11_001) is None
    assert beside(TopicCore(TopicState(NAME)), Look(bytes(20)), NOW_MS) is None
    for torn in ("torn", "torn_payloads"):
        core = a_topic()
        setattr(core.state, torn, [b"key"])
        assert beside(core, Look(bytes(20)), NOW_MS + 10) is None


def test_reads_write_nothing_while_space_is_low():
    core = a_topic()
    step = core.step([("caller", Look(bytes(20)))], Now(NOW_MS + 11_001, 0.0, low_space=True))
    assert not step.operations


def test_the_time_of_the_topic_is_durable_before_a_plan_is_answered():
    core = a_topic()
    _, step = ask(core, PlanCleaning(0), NOW_MS + 10_001)
    [mark] = [put for put in step.operations if put.prefix == system_key(HIGH_WATER, NAME, 1)]
    assert HighWater.decode(mark.values[0]).time_ms == NOW_MS + 10_001
