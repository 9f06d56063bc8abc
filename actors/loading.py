"""Loads a topic from disk, in the same way at the first start, after a crash and after a power cut."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from actors.chain_loading import cover_rest, load_chain
from plainsong.protocol.effects import Table
from plainsong.protocol.keys import (
    HIGH_WATER,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    DamagedRow,
    metadata_key,
    parse_pointer_key,
    stop_after,
    system_key,
)
from plainsong.protocol.records import HighWater, Metadata, Reader
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.topic.state import TopicLimits, TopicState
from plainsong.protocol.topic.transactional import apply_known_decisions
from plainsong.protocol.topic.upkeep import torn_ranges
from plainsong.protocol.transactions.transaction import NoAuthority

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.transaction import Authority
    from storage.base import Row, Store

log = logging.getLogger(__name__)


async def load_topic(
    name: TopicName,
    store: Store,
    limits: TopicLimits,
    authority: Authority | None = None,
    *,
    lacks: Collection[bytes] = (),
    epoch: int = 0,
) -> TopicState:
    """Load a topic's state: metadata, mark, undecided pointers, producers, messages since the mark, readers.

    Args:
      lacks: kinds of system rows that the topic does not have (``Claim.lacks``).
      epoch: the owner's epoch (``Claim.epoch``).
    Raises:
      StoreError: the store cannot be read.
      DamagedRow: the metadata row, or the row about the topic's producers, cannot be decoded.
    """
    state = TopicState(name, limits, authority=NoAuthority() if authority is None else authority, epoch=epoch)
    value = await store.get(Table.METADATA, metadata_key(name))
    if value is None:
        return state
    metadata = Metadata.decode(value)
    mark = None if HIGH_WATER in lacks else await _load_high_water(name, metadata.generation, store)
    start = state.begin(metadata, mark)
    if POINTER not in lacks:
        await _load_pointers(state, metadata.generation, store)
    if PRODUCERS not in lacks and not metadata.partly_cleaned:
        await load_producers(state, metadata.generation, store)
    begun_s = trio.current_time()

    def replay(rows: Sequence[Row]) -> bool:
        state.replay(rows)
        return True

    await store.scan(Table.MESSAGE, start, stop_after(state.prefix), replay)
    if READER not in lacks:
        await _load_readers(state, metadata.generation, store)
    covered = await load_chain(state, store)
    state.loaded()
    await cover_rest(state, store, covered)
    state.producers.replay_ms = round((trio.current_time() - begun_s) * 1000)
    apply_known_decisions(state)
    if not store.traits.whole_commits:
        await _find_torn_payloads(state, store)
    return state


async def _load_high_water(name: TopicName, generation: int, store: Store) -> HighWater | None:
    value = await store.get(Table.METADATA, system_key(HIGH_WATER, name, generation))
    if value is None:
        return None
    try:
        return HighWater.decode(value)
    except DamagedRow as error:
        # Everything in it but the topic's time can be computed from the rows, which only takes longer.
        log.warning(
            "high-water mark unreadable, replaying the whole topic", extra={"topic": str(name), "why": str(error)}
        )
        return None


async def _load_pointers(state: TopicState, generation: int, store: Store) -> None:
    start = system_key(POINTER, state.name, generation)

    def take(rows: Sequence[Row]) -> bool:
        for key, value in rows:
            try:
                pointer = parse_pointer_key(key)[2]
            except DamagedRow as error:
                log.warning("pointer row unreadable", extra={"topic": str(state.name), "why": str(error)})
                continue
            try:
                state.pending[pointer] = Pending.decode(pointer, value)
            except DamagedRow as error:
                # The authority decides on its visibility; a rollback is possible too, by reading the whole topic.
                log.warning(
                    "pointer row unreadable",
                    extra={"topic": str(state.name), "pointer": pointer, "why": str(error)},
                )
                state.pending[pointer] = Pending.of_damaged(pointer, state.time_ms)
        return True

    await store.scan(Table.METADATA, start, stop_after(start), take)


async def _find_torn_payloads(state: TopicState, store: Store) -> None:
    def take(rows: Sequence[Row]) -> bool:
        state.torn_payloads += [key for key, _ in rows]
        return True

    for start, stop in torn_ranges(state):
        await store.scan(Table.PAYLOAD, start, stop, take, values=False)


async def _load_readers(state: TopicState, generation: int, store: Store) -> None:
    start = system_key(READER, state.name, generation)

    def take(rows: Sequence[Row]) -> bool:
        for key, value in rows:
            try:
                state.readers[key[len(start) :].decode("ascii")] = Reader.decode(value)
            except (DamagedRow, UnicodeDecodeError) as error:
                # Do not fail the topic for one reader's position; the row stays for inspection.
                log.warning("reader unreadable", extra={"topic": str(state.name), "key": key.hex(), "why": str(error)})
        return True

    await store.scan(Table.METADATA, start, stop_after(start), take)


async def load_producers(state: TopicState, generation: int, store: Store) -> None:
    """Load the topic's producers as of the high-water mark. The caller then replays the messages since the mark.

    Raises:
      StoreError: the store cannot be read.
      DamagedRow: the record that applies to all producers cannot be decoded, so deduplication would be incomplete.
    """
    value = await store.get(Table.METADATA, system_key(PRODUCERS, state.name, generation))
    if value is None:
        return
    start = system_key(PRODUCER, state.name, generation)
    found: dict[str, Producer | None] = {}

    def take(rows: Sequence[Row]) -> bool:
        for key, row in rows:
            name = key[len(start) :].decode("utf-8", "replace")
            try:
                found[name] = Producer.decode(name, row)
            except DamagedRow as error:
                # Requests of this producer are refused until it is deleted; the others are not affected.
                log.warning(
                    "producer row unreadable", extra={"topic": str(state.name), "producer": name, "why": str(error)}
                )
                found[name] = None
        return True

    await store.scan(Table.METADATA, start, stop_after(start), take)
    state.producers.load(DeduplicationRecord.decode(value), found)
