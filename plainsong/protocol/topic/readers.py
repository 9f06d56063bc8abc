"""Requests about the stored positions of readers: list, set, compare and set, remove; and their expiry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Table, put_one
from plainsong.protocol.errors import GenerationChanged, NotFound, PositionChanged, QuotaExceeded
from plainsong.protocol.keys import READER, system_key
from plainsong.protocol.plurals import counted
from plainsong.protocol.records import Reader
from plainsong.protocol.topic.asks import ReaderView

if TYPE_CHECKING:
    from plainsong.protocol.topic.asks import ListReaders, RemoveReader, SetReader
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step


def list_readers(state: TopicState, step: Step, ask: ListReaders, now: Now) -> list[ReaderView]:
    """List the readers that have not expired, by name. Raises TopicNotFound."""
    del step, ask, now
    generation = state.living().generation
    return [
        ReaderView(name, reader, generation)
        for name, reader in sorted(state.readers.items())
        if not _expired(state, reader)
    ]


def set_reader(state: TopicState, step: Step, ask: SetReader, now: Now) -> ReaderView:
    """Set a reader's position.

    Raises:
      TopicNotFound, GenerationChanged, PositionChanged, QuotaExceeded: nothing happened.
    """
    del now
    generation = state.living().generation
    if ask.generation is not None and ask.generation != generation:
        raise GenerationChanged(f"the topic is in generation {generation}, not {ask.generation}")
    old = state.readers.get(ask.name)
    if old is not None and _expired(state, old):
        old = None
    if ask.compare and (None if old is None else old.position) != ask.expected:
        there = "there is none" if old is None else f"it is {old.position.hex()}"
        raise PositionChanged(f"reader {ask.name} is not at the expected position: {there}")
    if old is None and ask.name not in state.readers and len(state.readers) >= state.limits.max_readers:
        raise QuotaExceeded(
            f"topic {state.name} already has {counted(len(state.readers), 'reader')}",
            hint="delete unused ones, or raise readers.max_per_topic",
        )
    reader = Reader(ask.position, state.time_ms)
    if ask.dry_run:
        return ReaderView(ask.name, reader, generation)
    state.readers[ask.name] = reader
    step.write(put_one(Table.METADATA, _key(state, ask.name), reader.encode()))
    return ReaderView(ask.name, reader, generation)


def remove_reader(state: TopicState, step: Step, ask: RemoveReader, now: Now) -> None:
    """Forget a reader. Raises TopicNotFound, NotFound."""
    del now
    state.living()
    if ask.name not in state.readers:
        raise NotFound(f"topic {state.name} has no reader {ask.name}")
    if ask.dry_run:
        return
    del state.readers[ask.name]
    step.write(Delete(Table.METADATA, [_key(state, ask.name)]))


def drop_expired_readers(state: TopicState, step: Step) -> None:
    """Forget the readers that have not moved within their retention."""
    gone = [name for name, reader in state.readers.items() if _expired(state, reader)]
    if gone:
        step.write(Delete(Table.METADATA, [_key(state, name) for name in gone]))
        for name in gone:
            del state.readers[name]


def _expired(state: TopicState, reader: Reader) -> bool:
    return state.time_ms > reader.changed_ms + state.limits.readers_retention_ms


def _key(state: TopicState, name: str) -> bytes:
    return system_key(READER, state.name, state.living_or_last().generation, name.encode("ascii"))
