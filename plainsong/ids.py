"""Message ids as users hold them: 20 bytes that compare as the topic is ordered, and read as 40 hex digits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from plainsong.protocol import ids

if TYPE_CHECKING:
    from typing import Self

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class MessageId(bytes):
    """The id of a message: ``str(id)`` is its text form, ``bytes(id)`` what databases keep, ``<`` the topic's order.

    Args:
      value: 20 bytes, or 40 hex digits.
    Raises:
      InvalidMessageId: it is neither.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str) -> Self:  # noqa: D102 - the class says it
        raw = ids.parse_id(value) if isinstance(value, str) else ids.checked_id(value)
        return super().__new__(cls, raw)

    @property
    def publish_time_ms(self) -> int:
        """When the daemon made the message durable, in milliseconds since 1970, by the daemon's clock."""
        return int.from_bytes(self[:8], "big")

    @property
    def publish_time(self) -> datetime:
        """``publish_time_ms`` as a time in UTC. Raises OverflowError beyond the year 9999."""
        return _EPOCH + timedelta(milliseconds=self.publish_time_ms)

    def __str__(self) -> str:
        return self.hex()

    def __format__(self, spec: str) -> str:
        return format(self.hex(), spec)

    def __repr__(self) -> str:
        return f"MessageId('{self.hex()}')"


def nth_id(first_id: bytes, last_id: bytes, index: int, count: int) -> MessageId | None:
    """The id of message ``index`` of ``count`` that one request published; None when it cannot be told.

    A request's messages have consecutive positions; a full millisecond goes over into the next, as adding does.
    """
    first, last = int.from_bytes(first_id[:10], "big"), int.from_bytes(last_id[:10], "big")
    if last - first != count - 1 or first_id[10:] != ids.NO_PAYLOAD_PART or last_id[10:] != ids.NO_PAYLOAD_PART:
        return None
    return MessageId((first + index).to_bytes(10, "big") + ids.NO_PAYLOAD_PART)
