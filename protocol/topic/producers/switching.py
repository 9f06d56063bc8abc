"""Following what topic, namespace and service say about remembering producers.

on → off    everything is forgotten at once, rows too
off → on    nothing is known: sequence ids used before are taken again, and ``since`` says from where on
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.topic.producers.book import Seen
from protocol.topic.producers.policy import effective
from protocol.topic.producers.record import Remembering
from protocol.topic.producers.rows import delete_rows, last_position, write_record

if TYPE_CHECKING:
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def follow_policy(state: TopicState, step: Step, now: Now) -> None:
    """Do what is said now; cheap while that is what was said before."""
    metadata, book = state.metadata, state.producers
    if metadata is None or metadata.deleted_ms is not None:
        return
    own = metadata.properties.deduplication
    seen = Seen(metadata.generation, own, now.deduplication)
    if seen == book.seen and not book.leftover:
        return
    book.seen = seen
    book.policy = effective(state.name, own, now.deduplication, default=state.limits.deduplication_default)
    if book.leftover:
        delete_rows(state, step, book.leftover)
        book.leftover = []
    record = book.record
    if record is None:
        return
    was_off = own == "inherit" and record.switched != now.deduplication.switched
    if record.on and (was_off or not book.enabled):
        _forget_all(state, step, record)
    elif record.switched != now.deduplication.switched:
        book.record, book.record_changed = replace(record, switched=now.deduplication.switched), True


def _forget_all(state: TopicState, step: Step, record: Remembering) -> None:
    book = state.producers
    names = [*book.known, *book.damaged]
    epochs = max([record.epochs, *(producer.epoch for producer in book.known.values())])
    # First: from here on rows and stamps mean nothing, whatever is left of them.
    write_record(state, step, replace(record, on=False, switched=book.switched, epochs=epochs))
    delete_rows(state, step, names)
    book.clear()


def begin_remembering(state: TopicState, step: Step) -> None:
    """A producer comes: from here on stamps count, if they did not."""
    book = state.producers
    if book.record is None or not book.record.on:
        record = Remembering(switched=book.switched, since=last_position(state), epochs=book.epochs)
        write_record(state, step, record)
