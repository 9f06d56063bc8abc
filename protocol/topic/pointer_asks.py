"""What a topic's actor can be asked about write pointers: publish and store under one, roll it back, list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.requests import PublishResponse
from protocol.topic.asks import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.requests import PublishRequest


@dataclass(slots=True)
class PublishUnder(Ask[PublishResponse]):
    """Publish messages, and what was stored, under the request's write pointer, all in one commit."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class StoreUnder(Ask[None]):
    """Keep messages in the payload table under the request's write pointer, seen by nobody until published."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class RollBackPointer(Ask[None]):
    """Roll back what a write pointer has in the topic, also in one that is deleted; done again, it changes nothing."""

    pointer: int
    within: tuple[bytes, bytes] | None = None
    """First and last position (10 bytes each) of a ``PublishResponse``. None: everything, stored messages too, and
    whatever comes later under this pointer is refused."""
    by_client: bool = True
    """A client's is refused when the topic does not exist; the service's and the janitor's never are."""


@dataclass(slots=True)
class ClosePointers(Ask[None]):
    """Once this is answered, nothing more is written under these pointers unless they are enlisted again."""

    pointers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PointerView:
    """One write pointer that a topic has not seen decided."""

    pointer: int
    since_ms: int
    """When it was first used in the topic."""
    first: bytes | None
    """Position (10 bytes) of its first published row that is not rolled back; None: nothing is published."""
    messages: int
    """Published under it, stored ones included."""
    bytes: int
    stored: int
    """Stored and not published yet."""
    stored_bytes: int
    rolled_back: bool
    hidden: int
    """Messages of the topic from its first row on, which a transactional reader cannot pass; 0 without rows."""


@dataclass(slots=True)
class ListPointers(Ask[list[PointerView]]):
    """All undecided pointers of the topic, oldest first row first."""
