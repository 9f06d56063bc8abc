"""Loads the chain of a topic, as a part of ``actors.loading``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import DamagedRow, stop_after
from plainsong.protocol.topic.chain import StoredRows, row_of
from plainsong.protocol.topic.chain_rules import chain_prefix, restore_chain
from storage.base import read_rows
from storage.cleaning import is_message, is_reference, payloads_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from plainsong.protocol.topic.chain import Chain, ChainedRow
    from plainsong.protocol.topic.state import TopicState
    from storage.base import Row, Store

log = logging.getLogger(__name__)


async def load_chain(state: TopicState, store: Store) -> bytes | None:
    """Load the last entry of the topic's chain before ``TopicState.loaded``, since its position counts as assigned.

    Returns the position after which rows have no entry, for ``cover_rest``; None if the topic has no chain, or no such
    position.
    """
    metadata = state.living_or_last()
    if metadata.properties.chain == "none" or metadata.partly_cleaned:
        return None
    start = chain_prefix(state)
    rows = await read_rows(store, Table.PAYLOAD, start, stop_after(start), limit=1, reverse=True)
    last = (rows[0][0][len(start) :], rows[0][1]) if rows else None
    try:
        return restore_chain(state, last)
    except DamagedRow as error:
        # Later messages are covered; verification reports the damaged entry.
        log.warning("entry of the chain unreadable", extra={"topic": str(state.name), "why": str(error)})
        return None


async def cover_rest(state: TopicState, store: Store, covered: bytes | None) -> None:
    """Cover message rows after the last entry, left by an interrupted commit; none was acknowledged.

    Call it after ``TopicState.loaded``, which finds the torn rows.
    """
    if covered is None:
        return
    chain, torn = state.chain, frozenset(state.torn)
    assert chain is not None
    start: bytes | None = state.prefix + covered + b"\x00"
    while start is not None:
        start = await _cover_some(chain, store, torn, start, stop_after(state.prefix))


async def _cover_some(chain: Chain, store: Store, torn: Collection[bytes], start: bytes, stop: bytes) -> bytes | None:
    """Cover rows up to and including the first one that publishes stored messages, whose payload rows must be read.

    Returns the key after that row; None if there was none.
    """
    found: list[tuple[ChainedRow, Row]] = []

    def take(rows: Sequence[Row]) -> bool:
        rows = [row for row in rows if row[0] not in torn]
        at = next((at for at, row in enumerate(rows) if is_reference(row) and is_message(row)), len(rows))
        chain.cover(rows[:at], {})
        found.extend((row_of(row[0][-POSITION_BYTES:], row[1]), row) for row in rows[at : at + 1])
        return not found

    await store.scan(Table.MESSAGE, start, stop, take)
    if not found:
        return None
    ((reference, row),) = found
    assert reference.stored is not None  # it is a reference, and can be read
    digest = StoredRows(reference.position, reference.stored)

    def take_stored(rows: Sequence[Row]) -> bool:
        for key, value in rows:
            digest.take(key[-POSITION_BYTES:], value)
        return True

    await store.scan(Table.PAYLOAD, *payloads_of(row), take_stored)
    chain.cover([row], {reference.position: digest.digest()})
    return row[0] + b"\x00"
