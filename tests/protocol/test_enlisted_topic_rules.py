"""A topic whose transactions another instance decides: it writes only under pointers for which it is enlisted."""

from __future__ import annotations

import pytest
from producing_topic import NOW_MS, POINTER, Topic

from plainsong.protocol.errors import TransactionNotInProgress, TransactionsUnavailable
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import ClosePointers, ListPointers, PublishUnder, RollBackPointer, StoreUnder
from plainsong.protocol.topic.publish import NotEnlisted

OTHER = POINTER + 1


class EnlistedTopic(Topic):
    """A topic that is enlisted for ``POINTER``; ``standings`` contains the authority's answers for other pointers."""

    def load(self):
        super().load()
        self.standings, self.pointers, self.is_known = {}, {POINTER}, True
        self.state.authority = self.state.enlistment = self

    def standing(self, pointer):
        if not self.is_known:
            raise TransactionsUnavailable("the service is not there")
        return self.standings.get(pointer, "unknown")

    def pointers_of(self, pointer):
        return (pointer,)

    def holds(self, pointer):
        return pointer in self.pointers

    def close_pointers(self, *pointers):
        return self.ask(ClosePointers(pointers))

    def close(self, pointers):
        self.pointers.difference_update(pointers)

    def write(self, pointer, ask=PublishUnder):
        return self.ask(ask(PublishRequest([b"x"], write_pointer=pointer), 0))

    def under(self):
        return [each.pointer for each in self.ask(ListPointers())]


@pytest.mark.parametrize("ask", [PublishUnder, StoreUnder])
def test_nothing_is_written_under_a_pointer_without_an_enlistment_of_the_topic(ask):
    topic = EnlistedTopic()
    topic.standings[OTHER] = "in_progress"
    with pytest.raises(NotEnlisted) as caught:
        topic.write(OTHER, ask)
    assert "send it again" in caught.value.hint
    assert topic.under() == []
    topic.write(POINTER, ask)
    assert topic.under() == [POINTER]


@pytest.mark.parametrize("standing", ["unknown", "in_progress", "aborted", "committed"])
def test_an_enlistment_overrides_local_knowledge_of_the_transaction(standing):
    topic = EnlistedTopic()
    topic.standings[POINTER] = standing
    assert topic.write(POINTER).write_pointer == POINTER


def test_nothing_is_written_under_a_transaction_that_timed_out_even_if_the_topic_is_enlisted():
    topic = EnlistedTopic()
    topic.standings[POINTER] = "invalid"
    with pytest.raises(TransactionNotInProgress, match="invalid"):
        topic.write(POINTER)


def test_an_enlisted_topic_writes_while_the_service_cannot_be_asked():
    topic = EnlistedTopic()
    topic.is_known = False
    assert topic.write(POINTER).write_pointer == POINTER
    with pytest.raises(NotEnlisted):
        topic.write(OTHER)


def test_nothing_is_written_after_the_end_of_an_enlistment():
    topic = EnlistedTopic()
    topic.write(POINTER)
    topic.close_pointers(OTHER, POINTER)
    with pytest.raises(NotEnlisted):
        topic.write(POINTER)
    assert topic.payloads() == ["x"]


def test_a_topic_without_an_enlistment_has_none_to_end():
    topic = Topic()
    assert topic.ask(ClosePointers([POINTER])) is None


def test_a_client_rolls_back_under_an_enlistment_and_may_be_enlisted_for_it():
    topic = EnlistedTopic()
    topic.write(POINTER)
    topic.ask(RollBackPointer(POINTER))
    assert topic.holds(POINTER)
    for standing in ("in_progress", "unknown", "deciding"):
        topic.standings[OTHER] = standing
        with pytest.raises(NotEnlisted):
            topic.ask(RollBackPointer(OTHER))


@pytest.mark.parametrize("standing", ["aborted", "invalid"])
def test_a_client_rolls_back_aborted_or_timed_out_messages_without_an_enlistment(standing):
    topic = EnlistedTopic()
    topic.write(POINTER)
    topic.close_pointers(POINTER)
    topic.standings[POINTER] = standing
    topic.ask(RollBackPointer(POINTER))
    [view] = topic.ask(ListPointers())
    assert view.rolled_back


def test_a_client_cannot_roll_back_committed_messages():
    topic = EnlistedTopic()
    topic.write(POINTER)
    topic.close_pointers(POINTER)
    topic.standings[POINTER] = "committed"
    with pytest.raises(TransactionNotInProgress):
        topic.ask(RollBackPointer(POINTER))


def test_the_rollback_of_the_service_ends_the_enlistment_and_needs_none():
    topic = EnlistedTopic()
    topic.write(POINTER)
    topic.ask(RollBackPointer(POINTER, by_client=False))
    assert not topic.holds(POINTER)
    topic.ask(RollBackPointer(OTHER, by_client=False))
    [view] = topic.ask(ListPointers())
    assert (view.pointer, view.rolled_back) == (POINTER, True)
    assert view.since_ms == NOW_MS
