"""Forgetting producers: the inactive, those that make room for a new one, those that somebody removes.

What is known of the others is written first and the high-water mark behind it, so that no replay ever finds stamps
of the forgotten; the removal comes last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.errors import TooManyProducers
from protocol.topic.bookkeeping import write_mark
from protocol.topic.producers.record import Remembering
from protocol.topic.producers.rows import delete_rows, last_position, write_record

if TYPE_CHECKING:
    from collections.abc import Collection

    from protocol.topic.state import TopicState
    from protocol.topic.step import Step


def forget(state: TopicState, step: Step, names: Collection[str]) -> None:
    """These are unknown from now on; their sessions are over, their sequence ids may be used again."""
    book = state.producers
    gone = [book.pop(name) for name in names]
    epochs = max([book.epochs, *(producer.epoch for producer in gone if producer is not None)])
    write_mark(state, step)
    record = replace(book.record or Remembering(switched=book.switched), forgotten=last_position(state), epochs=epochs)
    write_record(state, step, record)
    delete_rows(state, step, names)


def forget_expired(state: TopicState, step: Step) -> None:
    """Forget those that have been inactive for as long as they are remembered."""
    gone = state.producers.expired(state.time_ms)
    if gone:
        forget(state, step, gone)
        step.told["expired"] += len(gone)


def make_room(state: TopicState, step: Step) -> None:
    """See that one more producer may come: the expired go first, then the longest idle, a few at a time.

    Raises TooManyProducers: none of them has been idle for long; nothing happened.
    """
    book, limits = state.producers, state.limits
    if len(book.known) < limits.max_producers:
        return
    forget_expired(state, step)
    if len(book.known) < limits.max_producers:
        return
    # Each time costs a high-water mark; a topic full of producers that come once should not write one for each.
    at_most = len(book.known) - limits.max_producers + 1 + limits.max_producers // 64
    gone = book.idle(state.time_ms - limits.producer_active_ms, at_most)
    if len(book.known) - len(gone) >= limits.max_producers:
        raise TooManyProducers(
            f"topic {state.name} remembers {len(book.known)} producers, all of them active lately",
            hint="use fewer names, delete producers that are done, or raise deduplication.max_producers",
        )
    forget(state, step, gone)
    step.told["evicted"] += len(gone)
