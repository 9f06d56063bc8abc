"""What the commit hands to the second copy: each durable batch, numbered by its journal entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from plainsong.protocol.effects import Put, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.effects import Delete
    from storage.base import Row
    from storage.leveldb.metadata import Changes, Keys
    from storage.leveldb.operations import SealedChange


@dataclass(frozen=True, slots=True)
class Handed:
    """A batch of the newest volume that is durable."""

    number: int
    """Of its journal entry; with a shipper each batch has one, so the numbers have no gaps."""
    time_ms: int
    rows: Sequence[Put | Delete]
    """Of messages and payloads, in order."""
    changes: Changes
    """Of the metadata's database."""
    rolled_back: Sequence[Row]
    """Messages of sealed volumes as they are once the keeper has made ``sealed``."""
    sealed: Sequence[SealedChange]
    """Changes of the same group in sealed volumes: until the keeper has made them, the batch is not complete."""
    size: int
    """Approximate bytes."""


class Shipper(Protocol):
    """Takes batches for the second copy (``storage.replication.outbox``). Called in any thread; never waits."""

    def opened(self, number: int) -> None:
        """Note that the tables were opened, and that their last batch has this number."""

    def hand_over(self, batch: Handed) -> None:
        """Take a durable batch."""


def keys_of(rows: Sequence[Put | Delete], rolled_back: Sequence[Row]) -> Keys:
    """Return the keys of a batch. With them the second copy finds what it lacks after a crash."""
    found: list[tuple[int, bytes, Sequence[bytes]]] = [
        (int(each.table), each.prefix, each.suffixes) if isinstance(each, Put) else (int(each.table), b"", each.keys)
        for each in rows
    ]
    if rolled_back:
        found.append((int(Table.MESSAGE), b"", [key for key, _ in rolled_back]))
    return found
