"""The daemon's answers as this package reads them: plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class TopicDescription(NamedTuple):
    """A topic that exists."""

    name: str
    generation: int
    ttl_s: int
    properties: Mapping[str, str]
    remembers: bool
    """Whether it knows a producer's sequence ids again."""


class Extent(NamedTuple):
    """A bounded read, measured."""

    end: bytes
    """The exclusive bound, 20 bytes: where the next read starts."""
    messages: int
    size_bytes: int
    """As messages travel, ids included."""
    splits: tuple[bytes, ...]
    """Bounds between the parts, ascending."""
    earliest: bytes
    """The bound before which everything has expired by the topic's time to live."""
    generation: int
    expired: bool
    """Messages at or behind its start have expired by the topic's time to live, or may have."""


class News(NamedTuple):
    """What waiting for several topics came to."""

    topics: frozenset[str]
    """Those with something to read."""
    quiet: Mapping[str, bytes]
    """Those with nothing, decided or not, and the position up to which there is nothing."""
    unreadable: Mapping[str, str]
    """Topics that cannot be read, with the error's code."""


class FramesPage(NamedTuple):
    """A page of messages."""

    body: bytes
    """Frames, complete."""
    last_id: bytes | None
    """Where to go on, exclusively; None: there was never anything."""
    end: str
    """Why it ends: ``end``, ``more`` or ``held``."""
    held_by: str | None
    """The write pointer of the undecided message that holds it."""


class TransactionService(NamedTuple):
    """Who decides transactions for the daemon."""

    service: str
    """``embedded``, ``tephra`` or ``off``."""
    available: bool
    why: str
    """Why it is not available."""


class Receipt(NamedTuple):
    """What became of a publish."""

    duplicate: bool
    """It was there before; nothing new was stored."""
    deduplicated: bool
    """Whether the topic remembers it, so that a repeated one will be known."""
    last_sequence_id: int | None
    generation: int | None


class ProducerState(NamedTuple):
    """What a topic remembers of a producer."""

    producer: str
    epoch: int
    last_sequence_id: int
    """-1: of a new one."""
    generation: int
    recent: tuple[tuple[int, int], ...] = ()
    """The sequence ids, first and last, of its last publishes; five of them at most."""

    def has(self, sequence_id: int) -> bool:
        """Whether one of those is known to have published the id."""
        return any(first <= sequence_id <= last for first, last in self.recent)
