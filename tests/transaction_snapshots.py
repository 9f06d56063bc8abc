"""Decodes a transaction manager's whole snapshot, including change sets, which the daemon itself never reads."""

from __future__ import annotations

from dataclasses import replace

from plainsong.protocol.codec.avro_cursor import Cursor
from plainsong.protocol.tephra.state import ManagerState, decode_visibility_state, encode_snapshot


def decode_snapshot(data: bytes) -> ManagerState:
    """Decode a snapshot that ``encode_snapshot`` wrote."""
    state = decode_visibility_state(data)
    # Without change sets, the last two bytes are the two empty lists.
    cursor = Cursor(data, len(encode_snapshot(state)) - 2)
    committing, committed = _change_sets(cursor), _change_sets(cursor)
    assert cursor.at == len(data)
    return replace(state, committing=committing, committed=committed)


def _change_sets(cursor: Cursor) -> dict[int, tuple[bytes, ...]]:
    found = {}
    while count := cursor.int32():
        for _ in range(count):
            pointer, keys = cursor.long(), list[bytes]()
            while keys_in_block := cursor.int32():
                keys += [cursor.octets() for _ in range(keys_in_block)]
            found[pointer] = tuple(keys)
    return found
