"""What clients ask of a topic and what they are told, whatever the encoding.

Codecs make these from bytes and back; routes, lane and actors pass them on. They are plain data: the
numbers are as the client sent them, checked for shape by the codec and for sense by ``checked``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from protocol import ids
from protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Isolation = Literal["uncommitted", "committed"]

#: The longest a poll may be held. Source: the HTTP contract, section 5.
MAX_WAIT_MS = 60_000
#: The longest time to live, in seconds: what an Avro int and the seed's ttl property hold.
MAX_TTL_S = (1 << 31) - 1


@dataclass(slots=True)
class PublishRequest:
    """The body of publish and store; the fields after ``write_pointer`` are version 2."""

    messages: Sequence[bytes]
    write_pointer: int | None = None
    ttl_s: int | None = None
    producer: str | None = None
    producer_epoch: int | None = None
    generation: int | None = None
    sequence_ids: Sequence[int] | None = None
    atomic: bool = False
    routing_key: str | None = None
    segment: str | None = None
    segments: Sequence[str] | None = None
    message_ttls_s: Sequence[int | None] | None = None
    attributes: Sequence[Mapping[str, str]] | None = None


@dataclass(slots=True)
class PollRequest:
    """The body of poll; the fields after ``transaction`` are version 2.

    ``start_from`` is an id of 20 bytes, a timestamp in milliseconds, or None for the oldest.
    """

    start_from: bytes | int | None = None
    inclusive: bool = True
    limit: int | None = None
    transaction: bytes | None = None
    end_before: bytes | None = None
    wait_ms: int | None = None
    max_bytes: int | None = None
    isolation: Isolation | None = None

    @property
    def since(self) -> bytes:
        """The inclusive lower bound this poll starts at.

        Raises:
          InvalidMessageId: the id has not 20 bytes.
          InvalidParameter: the timestamp is below 0.
        """
        return bound_of(self.start_from, inclusive=self.inclusive)


def bound_of(start_from: bytes | int | None, *, inclusive: bool) -> bytes:
    """The inclusive lower bound of a start position: an id, a timestamp in ms, or None (the oldest).

    Raises:
      InvalidMessageId: the id has not 20 bytes.
      InvalidParameter: the timestamp is below 0.
    """
    if start_from is None:
        return ids.FIRST_BOUND
    if isinstance(start_from, int):
        if start_from < 0:
            raise InvalidParameter(f"start time {start_from} is below 0", hint="use milliseconds since 1970")
        return ids.bound_at(start_from if inclusive else start_from + 1)
    ids.checked_id(start_from)
    return start_from if inclusive else ids.after(start_from)


@dataclass(frozen=True, slots=True)
class ProducerVerdict:
    """What became of a publish that had a producer; no codec writes it, headers show it."""

    duplicate: Literal["true", "false", "partial"]
    """Whether nothing new was stored, all of it, or a part."""
    last_sequence_id: int | None
    """The highest id stored of the producer; None where deduplication is switched off."""


@dataclass(slots=True)
class PublishResponse:
    """Where the rows of a write pointer went; unread, it is what rollback takes."""

    write_pointer: int | None
    start_timestamp_ms: int
    start_sequence_id: int
    end_timestamp_ms: int
    end_sequence_id: int
    duplicate: bool = False
    verdict: ProducerVerdict | None = field(default=None, compare=False)
    """Set when the request had a producer."""


@dataclass(slots=True)
class Receipt:
    """What became of a publish; ids are None when they are not known any more."""

    first_id: bytes | None
    last_id: bytes | None
    generation: int
    duplicate: bool = False
    deduplicated: bool = False
    last_sequence_id: int | None = None
    stored: Sequence[int] | None = None
    dropped: Sequence[int] | None = None
    verdict: ProducerVerdict | None = field(default=None, compare=False)
    """Set when the request had a producer."""
