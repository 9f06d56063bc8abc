"""Adds entries for requests, changes and loads to a topic's chain; see ``plainsong.protocol.topic.chain``."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import NotFound
from plainsong.protocol.ids import pack_position, unpack_position
from plainsong.protocol.keys import CHAIN_POINTER, metadata_key, payload_prefix
from plainsong.protocol.records import ChainEnd
from plainsong.protocol.topic.asks import ChainView
from plainsong.protocol.topic.chain import (
    BEGIN,
    END,
    MAX_BYTES,
    MAX_ROWS,
    RESTORED,
    Chain,
    ChainEntry,
    digest_of_stored,
    pieces,
    record_of,
    record_of_stored,
    record_of_wire,
)
from plainsong.protocol.topic.step import OpenEntry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.rows import Stored
    from plainsong.protocol.topic.asks import DescribeChain
    from plainsong.protocol.topic.row_extras import RowExtras
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import RowBatch, Step


def chain_rows(
    state: TopicState,
    step: Step,
    batch: RowBatch,
    first: int,
    size: int,
    ttls_s: Sequence[int | None] | None,
    pointer: int | None,
    row_extras: RowExtras | None,
) -> None:
    """Add the entries for one request's rows: the rows of ``batch`` from ``first`` on, ``size`` bytes in total."""
    chain = state.chain
    assert chain is not None
    alike = ttls_s is None and pointer is None and (row_extras is None or not row_extras.has_attributes)
    if alike:
        entry = step.open_entry
        if entry is not None and entry.join(batch, size):
            return
        if len(batch) - first <= MAX_ROWS and size <= MAX_BYTES:
            step.write_entry()
            step.open_entry = OpenEntry(chain, chain_prefix(state), batch, first, size)
            return
    step.write_entry()
    suffixes, values = batch.suffixes[first:], batch.values[first:]
    prefix = chain_prefix(state)
    items = [] if alike else batch.items_from(first)
    attributes: Mapping[int, Mapping[str, str]] = {}
    if row_extras is not None and row_extras.has_attributes:
        attributes = row_extras.attributes_from(0, len(suffixes))
    for start, stop in pieces(list(map(len, values))):
        covered = suffixes[start:stop]
        if alike:
            record = record_of_wire(covered[0], stop - start, batch.wire_of(first + start, first + stop))
        else:
            own = None if ttls_s is None else ttls_s[start:stop]
            theirs = {index - start: attributes[index] for index in range(start, stop) if index in attributes}
            record = record_of(covered, items[start:stop], theirs, own, pointer or 0)
        step.add_link(prefix, covered[-1], chain.next(covered[-1], record))


def chain_stored(
    state: TopicState,
    step: Step,
    position: bytes,
    stored: Stored,
    links: Mapping[int, bytes],
    ttl_s: int | None,
    pointer: int,
) -> None:
    """Add the entry for a row that publishes stored messages, if the topic has a chain.

    Args:
      links: the links of the winning segments, by index.
      pointer: the row's write pointer; 0 if it has none.
    """
    chain = state.chain
    if chain is None:
        return
    record = record_of_stored(position, digest_of_stored(position, stored, links), ttl_s, pointer)
    step.add_link(chain_prefix(state), position, chain.next(position, record))


def chain_prefix(state: TopicState) -> bytes:
    """Return the key prefix of the chain's entries."""
    return payload_prefix(state.name, state.living_or_last().generation, CHAIN_POINTER)


def add_entry(state: TopicState, step: Step, kind: str, **record: object) -> None:
    """Add an entry that covers no messages, at its own position. Does nothing if the topic has no chain."""
    chain = state.chain
    if chain is None:
        return
    step.write_entry()
    (run,) = state.sequence.take(max(1, state.time_ms), 1)
    position = pack_position(run.ts_ms, run.first)
    step.add_link(chain_prefix(state), position, chain.next(position, {"k": kind, **record}))


def begin_chain(state: TopicState, step: Step) -> None:
    """Add the entry that begins the chain; earlier messages are not covered.

    If the topic had a chain before, the new entry continues from its end.
    """
    metadata = state.living_or_last()
    if state.chain is None:
        end = metadata.chain_end
        state.chain = Chain(state.epoch) if end is None else Chain(state.epoch, end.number, end.position, end.link)
    add_entry(state, step, BEGIN, t=[str(state.name), metadata.generation])


def end_chain(state: TopicState, step: Step) -> ChainEnd:
    """Add the entry that ends the chain; return its end, from which a later chain continues."""
    assert state.chain is not None
    add_entry(state, step, END)
    end = ChainEnd(state.chain.position, state.chain.number, state.chain.link)
    state.chain = None
    return end


def write_due(state: TopicState, step: Step) -> None:
    """Add the entries that the load found missing."""
    chain = state.chain
    assert chain is not None
    chain.due = False
    prefix = chain_prefix(state)
    for suffix, value in chain.found:
        step.add_link(prefix, suffix, value)
    chain.found = []
    if chain.begins:
        chain.begins = False
        begin_chain(state, step)
    say_restored(state, step)


def say_restored(state: TopicState, step: Step) -> None:
    """Add the entry for a restore from a backup, if it is missing."""
    metadata = state.living_or_last()
    if metadata.restored is not None:
        add_entry(state, step, RESTORED, l=metadata.restored)
        state.metadata = replace(metadata, restored=None)
        step.write(put_one(Table.METADATA, metadata_key(state.name), state.metadata.encode()))


def describe_chain(state: TopicState, step: Step, ask: DescribeChain, now: Now) -> ChainView:
    """Return the end of the chain. Raises TopicNotFound, or NotFound if the topic has no chain."""
    del now
    step.write_entry()
    metadata, chain = state.living(), state.chain
    if chain is None:
        raise NotFound(
            f"topic {state.name} is not chained", hint=f"plainsong topic set {state.name} chain=sha256 begins a chain"
        )
    open_pointers = (each.pointer for each in state.pending.values() if each.pointer > 0 and not each.rolled_back)
    return ChainView(
        metadata.generation,
        chain.number,
        chain.position,
        chain.link,
        state.prefix,
        chain_prefix(state),
        state.oldest_ms,
        state.time_ms,
        tuple(islice(open_pointers, ask.undecided)),
    )


# --- loading ----------------------------------------------------------------------------------------


def restore_chain(state: TopicState, last: tuple[bytes, bytes] | None) -> bytes | None:
    """Continue from the last entry of the last generation, given as position and value; None if there is none.

    Returns the position after which rows have no entry; None if the chain begins with the next step.

    Raises DamagedRow: the entry cannot be read, and the next step begins a new chain.
    """
    metadata = state.living_or_last()
    end = metadata.chain_end
    chain = state.chain = Chain(state.epoch, due=True, begins=True)
    if end is not None:
        chain.number, chain.position, chain.link = end.number, end.position, end.link
    if last is not None:
        state.sequence.advance_past(*unpack_position(last[0]))
    entry = None if last is None else ChainEntry.decode(*last)
    if entry is not None and (end is None or entry.position >= end.position):
        chain.number, chain.position, chain.link = entry.number, entry.position, entry.link
    # A commit may have been cut off after the metadata that switched the chain on, or before the metadata that switched
    # it off.
    chain.begins = entry is None or entry.kind == END or (end is not None and entry.position <= end.position)
    chain.due = chain.begins or metadata.restored is not None
    return None if chain.begins else chain.position
