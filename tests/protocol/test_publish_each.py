"""Many requests of one message each in one step get the same verdicts, ids and rows as one at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.errors import PlainsongError, TopicFull
from plainsong.protocol.ids import SEQUENCES_PER_MS, consecutive_ids
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest, Receipt
from plainsong.protocol.topic.asks import Create, Publish, PublishEach
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.state import Now, TopicLimits, TopicState

NOW = Now(1_700_000_000_000, 0.0)


class Asked:
    """A topic's core, which gets several asks in one step."""

    def __init__(self, properties: TopicProperties | None, limits: TopicLimits, before: int) -> None:
        self.core = TopicCore(TopicState(TopicName("ns", "t"), limits))
        if properties is not None:
            self.step([Create(properties)])
            if before:
                self.core.state.sequence.advance_past(NOW.wall_ms, before)

    def step(self, asks, now: Now = NOW):
        step = self.core.step(list(enumerate(asks)), now)
        rows = [row for put in step.operations for row in zip(put.suffixes, put.values, strict=True)]
        return [answer for _, answer in self.core.settled(step, now)], rows


def plain(answer):
    return (type(answer), answer.outcome) if isinstance(answer, PlainsongError) else answer


def each_of(answer, count: int):
    """Return the answer to each request."""
    if isinstance(answer, Receipt):
        return [Receipt(each, each, answer.generation) for each in consecutive_ids(answer.first_id, count)]
    return answer if isinstance(answer, list) else [answer] * count


@given(
    payloads=st.lists(st.binary(max_size=40), min_size=1, max_size=20),
    max_bytes=st.none() | st.integers(1, 1500),
    transactional=st.sampled_from(["optional", "required", "disabled"]),
    max_message_bytes=st.integers(20, 60),
    is_there=st.booleans(),
    low_space=st.booleans(),
    before=st.sampled_from([0, SEQUENCES_PER_MS - 5]),
)
def test_publishing_at_once_or_one_after_the_other_has_the_same_result(
    payloads, max_bytes, transactional, max_message_bytes, is_there, low_space, before
):
    properties = TopicProperties(transactional=transactional, max_bytes=max_bytes) if is_there else None
    limits = TopicLimits(max_message_bytes=max_message_bytes)
    now = NOW._replace(low_space=low_space)
    (together,), rows = Asked(properties, limits, before).step([PublishEach(payloads, 0)], now)
    alone, rows_alone = Asked(properties, limits, before).step(
        [Publish(PublishRequest([payload]), 0) for payload in payloads], now
    )
    assert [plain(each) for each in each_of(together, len(payloads))] == [plain(each) for each in alone]
    assert rows == rows_alone


def test_if_not_all_messages_fit_each_has_its_own_verdict():
    core = Asked(TopicProperties(max_bytes=100), TopicLimits(), 0)
    (answers,), rows = core.step([PublishEach([b"x" * 50, b"y" * 90, b"z" * 5], 145)])
    first, second, third = answers
    assert isinstance(first, Receipt)
    assert isinstance(second, TopicFull)
    assert isinstance(third, Receipt)
    assert len(rows) == 2
