"""The checker of transactional histories finds each planted anomaly, and none in a healthy history."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from plainsong.protocol.ids import pack_id
from tests.daemon.transactional_checker import GRACE_MS, check
from tests.daemon.transactional_history import Log, Page, Request, Transaction

_numbers = count()


class Story:
    """Two topics: T1 commits at 10 s, T2 aborts at 20 s, T3 times out, with plain messages in between."""

    def __init__(self):
        self.committed = Transaction(1, 60_000, asked_s=9, committed_s=10, state="committed")
        self.aborted = Transaction(2, 60_000, undone_s=20, state="aborted")
        self.invalid = Transaction(3, 30_000, state="invalid")
        self.logs = {"a": [], "b": []}
        self.requests = []
        for topic in self.logs:
            self.wrote(topic, "plain", None)
            self.wrote(topic, "T1", self.committed)
            self.wrote(topic, "T2", self.aborted)
            self.wrote(topic, "T3", self.invalid)
            self.wrote(topic, "later", None)
        self.pages = []

    @property
    def transactions(self):
        return [self.committed, self.aborted, self.invalid]

    def wrote(self, topic, name, transaction):
        payloads = tuple(b"%s%d in %s" % (name.encode(), number, topic.encode()) for number in range(2))
        self.requests.append(Request(topic, payloads, transaction, "acknowledged", ended_s=1))
        pointer = transaction.id if transaction else 0
        for payload in payloads:
            row_id = pack_id(100 + len(self.logs[topic]), 0)
            self.logs[topic].append((row_id, payload, -pointer if transaction is self.aborted else pointer))

    def page(self, topic, *names, at_s=50.0, transactional=True, **more):
        """Return a page with all messages of these names, requested at this time."""
        rows = [(i, p) for i, p, _ in self.logs[topic] if p.startswith(tuple(name.encode() for name in names) or b"-")]
        times = {"view_s": (at_s, at_s + 0.1), "asked_s": at_s, "answered_s": at_s + 0.1, "asked_ms": int(at_s * 1000)}
        page = Page(f"reader {next(_numbers)}", topic, tuple(rows), transactional, **{**times, **more})
        self.pages.append(page)
        return page

    def kinds(self):
        logs = [Log(topic, rows) for topic, rows in self.logs.items()]
        return {anomaly.kind for anomaly in check(self.transactions, self.requests, self.pages, logs)}


@pytest.fixture
def story():
    return Story()


def test_a_healthy_history_has_no_anomaly(story):
    first_id = story.logs["a"][0][0]
    story.page("a", "plain", at_s=5, end="held", held_by=1)
    story.page("a", "plain", "T1", at_s=9.5, end="held", held_by=2)
    story.page("a", "plain", "T1", at_s=25, end="held", held_by=3)
    story.page("a", "plain", "T1", "later")
    story.page("b", "plain0", end="more")
    story.page("b", "plain", "T1", "later", view=7)
    story.page("a", "plain", "T1", "later", view=7)
    story.page("a", "plain", "T1", "T2", "T3", "later", transactional=False)
    story.page("a", at_s=0.1, transactional=False)
    story.page("b", at_s=0.1, view=8)
    story.page("b", "plain", at_s=5, view=8, view_s=(0.1, 0.2), end="held", held_by=1)
    story.page("a", "plain1", "T1", "later", since=first_id[:-1] + b"\1")
    assert story.kinds() == set()


def test_an_unanswered_publish_of_a_transaction_may_be_present_in_full(story):
    story.requests[3].outcome = "unknown"
    story.requests[4].outcome = "unknown"
    assert story.kinds() == set()


@pytest.mark.parametrize("name", ["T2", "T3"])
def test_a_message_of_an_undone_transaction_is_dirty(story, name):
    story.page("a", "plain", "T1", name, "later")
    assert story.kinds() == {"dirty"}


def test_a_message_is_dirty_before_its_commit_is_requested(story):
    story.page("a", "plain", "T1", at_s=8, end="held", held_by=2)
    assert story.kinds() == {"dirty"}


def test_a_reader_that_skips_a_committed_transaction_passed_it_over(story):
    story.page("a", "plain", "later")
    assert "passed over" in story.kinds()


def test_a_reader_whose_position_skips_a_committed_transaction_passed_it_over(story):
    story.page("a", "plain", end="more", through=story.logs["a"][3][0])
    assert story.kinds() == {"passed over"}


def test_an_uncommitted_reader_may_neither_pass_over_nor_invent_messages(story):
    story.page("a", "plain", "T1", "T3", "later", transactional=False)
    assert story.kinds() == {"passed over"}
    story.pages = [replace(story.page("a", "plain", end="more", transactional=False), topic="b")]
    assert "vanished" in story.kinds()


def test_a_page_with_part_of_a_transaction_is_torn(story):
    story.page("a", "plain", "T10", at_s=9.5, end="held", held_by=2)
    assert story.kinds() == {"torn"}


def test_one_view_with_a_transaction_in_one_topic_only_is_torn(story):
    story.page("a", "plain", "T1", at_s=9.5, view=7, end="held", held_by=2)
    story.page("b", "plain", at_s=9.5, view=7, end="held", held_by=2)
    assert story.kinds() == {"torn"}


def test_one_view_held_by_a_transaction_that_it_showed_elsewhere_is_torn(story):
    story.page("a", "plain", "T1", at_s=9.5, view=7, end="held", held_by=2)
    story.page("b", "plain", at_s=9.5, view=7, end="held", held_by=1)
    assert story.kinds() == {"torn"}


def test_part_of_a_request_is_torn_for_uncommitted_readers(story):
    story.page("a", "plain0", at_s=0.5, transactional=False)
    assert story.kinds() == {"torn"}


def test_a_message_seen_by_one_reader_and_missing_for_a_later_one_is_late(story):
    story.committed.committed_s = 100
    story.page("a", "plain", "T1", at_s=9.2, end="held", held_by=2)
    story.page("b", "plain", at_s=9.4)
    assert story.kinds() == {"late"}


def test_acknowledged_plain_messages_that_are_missing_are_late(story):
    story.page("a")
    assert story.kinds() == {"late"}


def test_a_hold_by_a_decided_transaction_is_endless(story):
    story.page("a", "plain", at_s=11, end="held", held_by=1)
    assert story.kinds() == {"held forever"}
    story.pages.clear()
    story.page("a", "plain", "T1", at_s=21, end="held", held_by=2)
    assert story.kinds() == {"held forever"}


def test_a_hold_ends_soon_after_the_timeout(story):
    over_s = (story.invalid.expires_ms + GRACE_MS) / 1000
    story.page("a", "plain", "T1", at_s=over_s - 1, end="held", held_by=3)
    assert story.kinds() == set()
    story.page("a", "plain", "T1", at_s=over_s + 1, end="held", held_by=3)
    assert story.kinds() == {"held forever"}


def test_a_hold_in_a_snapshot_that_was_made_in_time_lasts_as_long_as_the_snapshot(story):
    over_s = (story.invalid.expires_ms + GRACE_MS) / 1000
    story.page("a", "plain", "T1", at_s=over_s + 1, view=8, view_s=(21, 22), end="held", held_by=3)
    assert story.kinds() == set()


def test_a_hold_by_no_transaction_is_endless(story):
    story.page("a", "plain", "T1", at_s=9.5, end="held", held_by=4711)
    assert story.kinds() == {"held forever"}


def test_a_transaction_that_is_in_progress_at_the_end_holds_forever(story):
    story.invalid.state = "in_progress"
    assert story.kinds() == {"held forever"}


def test_a_page_out_of_order_is_unordered(story):
    page = story.page("a", "plain", "T1", "later")
    story.pages = [replace(page, messages=page.messages[::-1])]
    assert story.kinds() == {"unordered"}
    story.pages = [replace(page, since=page.messages[1][0])]
    assert story.kinds() == {"unordered"}


def test_reported_outcomes_are_the_final_states(story):
    story.committed.state = "invalid"
    assert "lost" in story.kinds()
    story.committed.state = "committed"
    story.invalid.state, story.invalid.undone_s = "committed", 35
    assert story.kinds() == {"resurrected"}


def test_acknowledged_messages_that_are_gone_are_lost_and_torn_when_only_some_are(story):
    story.logs["a"] = [row for row in story.logs["a"] if not row[1].startswith(b"later")]
    assert story.kinds() == {"lost"}
    story.requests[4].outcome = "unknown"
    assert story.kinds() == set()
    story.logs["b"].pop()
    story.requests[9].outcome = "unknown"
    assert story.kinds() == {"torn"}


def test_refused_messages_that_are_present_are_resurrected(story):
    story.requests[0].outcome = "refused"
    assert story.kinds() == {"resurrected"}


def turned(story, name):
    """Return the log of ``a`` with the signs of these rows reversed."""
    return [(i, p, -pointer if p.startswith(name.encode()) else pointer) for i, p, pointer in story.logs["a"]]


def test_rows_of_an_aborted_transaction_are_flipped_and_those_of_a_committed_one_are_not(story):
    story.logs["a"] = turned(story, "T2")
    assert story.kinds() == {"not turned"}
    story.logs["a"] = turned(turned_back(story), "T1")
    assert "lost" in story.kinds()


def turned_back(story):
    story.logs["a"] = turned(story, "T2")
    return story


def test_a_request_rolled_back_by_itself_is_not_seen_though_its_transaction_is_committed(story):
    story.requests[1].rolled_back = "yes"
    assert story.kinds() == {"not turned"}
    story.logs["a"] = turned(story, "T1")
    assert story.kinds() == set()
    story.page("a", "plain", "T1", "later")
    assert story.kinds() == {"dirty"}


def test_half_a_rollback_is_torn(story):
    story.logs["a"] = turned(story, "T20")
    assert story.kinds() == {"torn", "not turned"}
    story.logs["a"] = turned(story, "T20")
    story.logs["a"] = turned(story, "T10")
    assert {"torn", "lost"} <= story.kinds()


def test_half_a_rollback_of_an_invalid_transaction_is_torn_only_if_a_transactional_reader_sees_any_of_it(story):
    story.logs["a"] = turned(story, "T30")
    story.page("a", "plain", "T1", "T2", "T3", "later", transactional=False)
    story.page("a", "plain", "T1", "later")
    assert story.kinds() == set()
    story.page("a", "plain", "T1", "T31", "later")
    assert story.kinds() == {"dirty"}
    story.pages.pop()
    story.requests[3].rolled_back = "yes"
    assert story.kinds() == {"not turned"}


def test_a_message_stored_twice_is_doubled_and_one_with_another_pointer_is_dirty(story):
    row_id, payload, _ = story.logs["a"][0]
    story.logs["a"].append((row_id[:7] + b"\xff" + row_id[8:], payload, 0))
    assert story.kinds() == {"doubled"}
    story.logs["a"][-1] = (row_id[:7] + b"\xff" + row_id[8:], b"nobody's", 0)
    assert story.kinds() == {"resurrected"}
    story.logs["a"].pop()
    story.logs["a"][0] = (row_id, payload, 1)
    assert "dirty" in story.kinds()
