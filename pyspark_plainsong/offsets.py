"""A stream's offsets: for each topic a generation and the next id to read, as JSON in Spark's checkpoints.

    {"v": 1, "topics": {"namespace:topic": {"gen": 3, "next": "<40 hex digits>"}}}

Ranges are half-open. Spark compares offsets as text, so each position has exactly one form and topics are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

ID_BYTES = 20
#: The position before every message.
FIRST = bytes(ID_BYTES)
VERSION = 1


class Position(NamedTuple):
    """A stream's position in one topic."""

    generation: int
    next: bytes
    """The first id to read, 20 bytes; zeros: from the oldest message."""


def after(message_id: bytes) -> bytes:
    """Return the position right after a message."""
    return (int.from_bytes(message_id, "big") + 1).to_bytes(ID_BYTES, "big")


def before(position: bytes) -> bytes:
    """Return the last id that a message before a position can have; the position is not the first one."""
    return (int.from_bytes(position, "big") - 1).to_bytes(ID_BYTES, "big")


def at_time(milliseconds: int) -> bytes:
    """Return the position before all messages published at this time or later."""
    return min(milliseconds, 2**63 - 1).to_bytes(8, "big") + bytes(12)


def to_offset(namespace: str, positions: Mapping[str, Position]) -> dict[str, Any]:
    """Convert positions to the offset that Spark stores."""
    topics = {
        f"{namespace}:{topic}": {"gen": position.generation, "next": position.next.hex()}
        for topic, position in sorted(positions.items())
    }
    return {"v": VERSION, "topics": topics}


def from_offset(namespace: str, offset: Mapping[str, Any]) -> dict[str, Position]:
    """Convert an offset made by ``to_offset`` back to positions by topic.

    Raises:
      ValueError: the offset has an unknown version or another namespace.
    """
    if offset.get("v") != VERSION:
        raise ValueError(f"the checkpoint has an offset of version {offset.get('v')}, this package reads {VERSION}")
    positions = {}
    for name, each in offset["topics"].items():
        of, _, topic = name.partition(":")
        if of != namespace:
            raise ValueError(
                f"the checkpoint is of the namespace {of}, and the option namespace is {namespace}: a query cannot "
                "change it; use another checkpoint"
            )
        positions[topic] = Position(int(each["gen"]), bytes.fromhex(each["next"]))
    return positions
