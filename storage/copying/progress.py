"""How far a copy has come, in rows of its target: nothing that is done is done again, nothing that is not is left out.

    00 'c'                    the copy       f from  t topics (none: all)  x with the transaction
                              service  s state  b begun (ms)  e ended (ms)
    00 'c' ns:topic: 0        of a topic     t table  k the last key that was copied; d: it is complete

A topic's row is of the same commit as the rows that it speaks of. Rows of topics go when all of it was compared; that
of the copy stays, so that a daemon refuses a store that is copied in part, and the same copy is known to be done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol.effects import Table
from protocol.keys import COPYING, SYSTEM, DamagedRow, parse_system_key, system_key
from protocol.records import pack_record, unpack_record
from storage.base import StoreUnusable

if TYPE_CHECKING:
    from protocol.names import TopicName
    from storage.base import Store

COPY_KEY = SYSTEM + COPYING
#: States of a copy: rows are being written; all are there and were compared; and nothing is left to tidy up.
WRITING, COMPARED, DONE = "writing", "compared", "done"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """What the target knows of the copy."""

    origin: str
    """The source, as it was named."""
    topics: tuple[str, ...] | None
    """Those that were chosen; None: all."""
    service: bool = True
    """Whether the transaction service is copied: not to where there is one."""
    state: str = WRITING
    begun_ms: int = 0
    ended_ms: int = 0

    def is_same(self, other: CopyRow) -> bool:
        """Whether it is the same copy, however far it has come."""
        return (self.origin, self.topics) == (other.origin, other.topics)

    def encode(self) -> bytes:
        """The row's value."""
        told: dict[str, Any] = {"f": self.origin, "x": self.service, "s": self.state}
        told |= {"b": self.begun_ms, "e": self.ended_ms}
        return pack_record(told if self.topics is None else {**told, "t": list(self.topics)})

    @classmethod
    def decode(cls, value: bytes) -> CopyRow:
        """Read the row's value. Raises DamagedRow."""
        told = unpack_record(value, "copy")
        try:
            topics = told.get("t")
            chosen = None if topics is None else tuple(topics)
            times = int(told["b"]), int(told["e"])
            return cls(str(told["f"]), chosen, bool(told["x"]), str(told["s"]), *times)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a copy's row without what it needs: {error!r}") from error


@dataclass(frozen=True, slots=True)
class TopicRow:
    """How far a topic has come: up to ``key`` of ``table``, and with the tables before that one."""

    table: Table = Table.PAYLOAD
    key: bytes = b""
    complete: bool = False

    def encode(self) -> bytes:
        """The row's value."""
        return pack_record({"t": int(self.table), "k": self.key, **({"d": 1} if self.complete else {})})

    @classmethod
    def decode(cls, value: bytes) -> TopicRow:
        """Read the row's value. Raises DamagedRow."""
        told = unpack_record(value, "copied topic")
        try:
            return cls(Table(told["t"]), bytes(told["k"]), bool(told.get("d")))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a copied topic's row without what it needs: {error!r}") from error


def topic_key(name: TopicName) -> bytes:
    """The key of a topic's row: one that the topic's head governs where there are heads."""
    return system_key(COPYING, name, 0)


def is_copying_key(key: bytes) -> bool:
    """Whether a row of the metadata table is a copy's."""
    return key.startswith(COPY_KEY)


def copying_fields(key: bytes, value: bytes) -> dict[str, object]:
    """What such a row says, ready for JSON. Raises DamagedRow."""
    if key == COPY_KEY:
        row = CopyRow.decode(value)
        times = {"begun_ms": row.begun_ms, "ended_ms": row.ended_ms or None}
        topics = None if row.topics is None else list(row.topics)
        return {"from": row.origin, "topics": topics, "service": row.service, "state": row.state, **times}
    name, topic = parse_system_key(key).name, TopicRow.decode(value)
    return {"topic": str(name), "table": topic.table.name.lower(), "up_to": topic.key.hex(), "complete": topic.complete}


async def copy_row(store: Store) -> CopyRow | None:
    """What a store knows of a copy into it. Raises StoreError, DamagedRow."""
    value = await store.get(Table.METADATA, COPY_KEY)
    return None if value is None else CopyRow.decode(value)


async def topic_row(store: Store, name: TopicName) -> TopicRow | None:
    """How far a topic has come; None: it has not begun. Raises StoreError, DamagedRow."""
    value = await store.get(Table.METADATA, topic_key(name))
    return None if value is None else TopicRow.decode(value)


async def refuse_unfinished(store: Store) -> None:
    """What a daemon asks before it serves. Raises StoreUnusable: the store was copied in part."""
    row = await copy_row(store)
    if row is not None and row.state == WRITING:
        raise StoreUnusable(
            f"a copy of {row.origin} into this store is not complete",
            hint="run the same `plainsong copy` again: it goes on where it ended",
        )
