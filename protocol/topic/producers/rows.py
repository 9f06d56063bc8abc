"""Writing what is known of producers: their rows before the high-water mark, so that replay begins behind both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, Table, put_one
from protocol.ids import pack_position
from protocol.keys import PRODUCER, PRODUCERS, system_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.topic.producers.record import Producer, Remembering
    from protocol.topic.state import TopicState
    from protocol.topic.step import Step


def last_position(state: TopicState) -> bytes | None:
    """The last position given out in the topic; None before the first."""
    last = state.sequence
    return None if last.last_sequence_id < 0 else pack_position(last.last_ts_ms, last.last_sequence_id)


def write_producer(state: TopicState, step: Step, producer: Producer) -> None:
    """Write one producer's row now."""
    key = system_key(PRODUCER, state.name, state.living_or_last().generation, producer.name.encode())
    step.write(put_one(Table.METADATA, key, producer.encode()))


def write_changed(state: TopicState, step: Step) -> None:
    """Write the rows of all producers that have changed; the mark follows."""
    book = state.producers
    if book.changed:
        rows = sorted((name.encode(), book.known[name].encode()) for name in book.changed)
        prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
        step.write(Put(Table.METADATA, prefix, [row[0] for row in rows], [row[1] for row in rows]))
    if book.record_changed and book.record is not None:
        write_record(state, step, book.record)
    book.noted(last_position(state), state.time_ms)


def write_record(state: TopicState, step: Step, record: Remembering) -> None:
    """Write, now, whether producers are remembered."""
    book = state.producers
    book.record, book.record_changed = record, False
    key = system_key(PRODUCERS, state.name, state.living_or_last().generation)
    step.write(put_one(Table.METADATA, key, record.encode()))


def delete_rows(state: TopicState, step: Step, names: Iterable[str]) -> None:
    """Remove producers' rows."""
    prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
    keys = sorted(prefix + name.encode() for name in names)
    if keys:
        step.write(Delete(Table.METADATA, keys))
