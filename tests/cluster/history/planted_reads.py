"""Planted read anomalies: the histories that clients would have recorded of a wrong service."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

from tests.cluster.history.places import (
    Planters,
    end_before,
    ids_of,
    into,
    is_last_of,
    rows_of,
    shows,
    some_poll,
    some_transaction,
    some_write,
)
from tests.cluster.history.records import History, Transaction

PLANTERS: Planters = []
plants = into(PLANTERS)


@plants("split")
def a_page_ends_within_a_request(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: len(ids_of(history, write)) > 1)
    ids = ids_of(history, write) if write else []
    at = some_poll(history, rng, lambda poll: bool(write and shows(poll, write)) and not poll.committed)
    if at is not None and ids[0] in dict(history.polls[at].messages):
        history.polls[at] = end_before(history.polls[at], ids[1])
        return True
    return False


@plants("split")
def a_transaction_was_seen_in_one_topic_and_later_not_in_another(history: History, rng: Random) -> bool:
    return _half_seen(history, rng, None)


@plants("split")
def one_view_shows_a_transaction_in_one_topic_only(history: History, rng: Random) -> bool:
    return _half_seen(history, rng, 1)


def _half_seen(history: History, rng: Random, view: int | None) -> bool:
    def suits(each: Transaction) -> bool:
        return each.state == "committed" and sum(bool(rows_of(history, each, topic)) for topic in history.logs) > 1

    each = some_transaction(history, rng, suits)
    if each is None:
        return False
    one, other = rng.sample([topic for topic in history.logs if rows_of(history, each, topic)], 2)
    first = some_poll(history, rng, is_last_of(history, one, committed=True))
    second = some_poll(history, rng, is_last_of(history, other, committed=True))
    if first is None or second is None:
        return False
    if view is None and history.polls[first].ended_s >= history.polls[second].began_s:
        return False
    each.committed_s = inf  # no client got the response, but a reader saw its messages
    history.polls[first] = replace(history.polls[first], view=view)
    stop = rows_of(history, each, other)[0]
    history.polls[second] = replace(end_before(history.polls[second], stop), view=view)
    return True


@plants("uncommitted")
def an_aborted_message_is_shown_to_a_committed_reader(history: History, rng: Random) -> bool:
    topic, row = rng.choice([(topic, row) for topic, rows in history.logs.items() for row in rows])
    at = some_poll(
        history, rng, lambda poll: poll.topic == topic and poll.committed and poll.last > row[0] >= poll.since
    )
    if row[2] >= 0 or at is None:
        return False
    poll = history.polls[at]
    history.polls[at] = replace(poll, messages=tuple(sorted([*poll.messages, row[:2]])))
    return True


@plants("uncommitted")
def a_transaction_is_shown_before_its_commit_was_asked_for(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.transaction is not None and write.transaction.asked_s < inf)
    at = some_poll(history, rng, lambda poll: poll.committed and bool(write and shows(poll, write)))
    if write is None or write.transaction is None or at is None:
        return False
    write.transaction.asked_s = write.transaction.committed_s = history.polls[at].ended_s + 1
    return True


@plants("stale")
def an_instance_shows_an_older_end(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: write.outcome == "acknowledged" and write.transaction is None)
    committed = rng.choice((True, False))
    at = some_poll(history, rng, is_last_of(history, write.topic, committed=committed)) if write else None
    if write is None or at is None:
        return False
    history.polls[at] = end_before(history.polls[at], ids_of(history, write)[0])
    return True


@plants("commit unseen")
def a_reader_does_not_see_what_was_committed_before(history: History, rng: Random) -> bool:
    write = some_write(history, rng, lambda write: bool(write.transaction and write.transaction.committed_s < inf))
    ids = ids_of(history, write) if write else []
    at = some_poll(history, rng, is_last_of(history, write.topic, committed=True)) if write else None
    if at is None or not ids:
        return False
    poll = end_before(history.polls[at], ids[0])
    # Messages before it in the log would also count as missed, unless the page had passed them.
    behind = [message_id for message_id, _ in history.polls[at].messages if message_id < ids[0]]
    history.polls[at] = replace(poll, through=max(behind, default=poll.through))
    return True


@plants("held by the decided")
def a_reader_is_held_by_what_was_undone(history: History, rng: Random) -> bool:
    each = some_transaction(history, rng, lambda each: each.undone_s < inf)
    topics = [topic for topic in history.logs if each and rows_of(history, each, topic)]
    if each is None or not topics:
        return False
    topic = rng.choice(topics)
    at = some_poll(history, rng, is_last_of(history, topic, committed=True))
    if at is None:
        return False
    poll = end_before(history.polls[at], rows_of(history, each, topic)[0])
    history.polls[at] = replace(poll, end="held", held_by=each.id)
    return True


@plants("held by the decided")
def a_reader_is_held_by_nothing(history: History, rng: Random) -> bool:
    at = some_poll(history, rng, lambda poll: poll.committed and poll.end == "end")
    if at is not None:
        history.polls[at] = replace(history.polls[at], end="held", held_by=77)
    return at is not None
