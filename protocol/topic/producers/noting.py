"""When what is known of producers is due to be written, and what becomes of it when a topic is loaded or re-created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, Table
from protocol.keys import PRODUCERS, system_key
from protocol.topic.bookkeeping import write_mark
from protocol.topic.producers.book import Book
from protocol.topic.producers.record import Remembering

if TYPE_CHECKING:
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def note_later(state: TopicState, now: Now) -> None:
    """If something has changed, see that it does not go unwritten for longer than it may."""
    book = state.producers
    if book.changed and book.due_s is None:
        book.due_s = now.mono_s + state.limits.snapshot_interval_ms / 1000


def is_due(state: TopicState, now: Now) -> bool:
    """Whether a snapshot is due although there may be nothing else to write."""
    due_s = state.producers.due_s
    return due_s is not None and now.mono_s >= due_s


def remove_torn(state: TopicState, step: Step) -> None:
    """Take away what a cut-off commit left of an atomic request: nobody has seen it, and nobody will."""
    rows = len(state.torn)
    ts_ms = int.from_bytes(state.torn[-1][-10:-2], "big")
    state.usage.cleaned(ts_ms, ts_ms, rows, state.torn_bytes, state.usage.own_expiry_ms())
    state.appended -= rows
    # The last one first: cut off again, it is still found to be in parts.
    step.write(Delete(Table.MESSAGE, state.torn))
    state.torn = []
    write_mark(state, step)


def renew(state: TopicState, step: Step, generation: int) -> None:
    """A new generation knows no producers; epochs go on, so that no session of an older one fits into it."""
    old = state.producers
    book = state.producers = Book(state.limits.producer_retention_ms)
    epochs = max([old.epochs, *(producer.epoch for producer in old.known.values())])
    if epochs:
        book.record = Remembering(on=False, switched=old.switched, epochs=epochs)
        key = system_key(PRODUCERS, state.name, generation)
        step.write(Put(Table.METADATA, key, (b"",), (book.record.encode(),)))
