"""The batches that the commit hands to the second copy: all durable ones, numbered by their journal entries."""

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
    """A batch of the newest volume that is durable, or will be unless the process ends."""

    number: int
    """The number of its journal entry; with a shipper each batch has one, so the numbers have no gaps."""
    time_ms: int
    rows: Sequence[Put | Delete]
    """Rows of messages and payloads, in order."""
    changes: Changes
    """Changes of the metadata's database."""
    rolled_back: Sequence[Row]
    """Messages of sealed volumes as they are after the keeper has made the changes in ``sealed``."""
    sealed: Sequence[SealedChange]
    """Changes in sealed volumes by the same group. The batch is complete only once the keeper has made them."""
    size: int
    """Approximate bytes."""


#: Above every commit number.
NO_COMMIT = 1 << 63


class Shipper(Protocol):
    """Takes batches for the second copy (``storage.replication.outbox``). Called in any thread; never waits."""

    @property
    def is_early(self) -> bool:
        """True if batches are handed over while the disk syncs them. Then a sync that fails ends the process."""
        ...

    @property
    def unsent(self) -> int:
        """The first commit that the log lacks. A start needs the journal from there on: its volumes are kept."""
        ...

    def opened(self, number: int) -> None:
        """Record that the tables were opened, and that their last batch has this number."""

    def numbered(self, number: int) -> None:
        """Record that a batch with this number may become visible from now on."""

    def hand_over(self, batch: Handed) -> None:
        """Take a batch."""

    def write_failed(self, number: int) -> None:
        """Record that a write failed, and that the last batch that is certainly durable has this number."""


def keys_of(rows: Sequence[Put | Delete], rolled_back: Sequence[Row]) -> Keys:
    """Return the keys of a batch. With them the second copy finds what it lacks after a crash."""
    found: list[tuple[int, bytes, Sequence[bytes]]] = [
        (int(each.table), each.prefix, each.suffixes) if isinstance(each, Put) else (int(each.table), b"", each.keys)
        for each in rows
    ]
    if rolled_back:
        found.append((int(Table.MESSAGE), b"", [key for key, _ in rolled_back]))
    return found
