"""The options of a producer, checked: what both clients take, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from plainsong.core import options
from plainsong.core.producing.lightweight import TIMEOUT_S
from plainsong.messages import Outgoing, with_attributes
from plainsong.protocol.errors import InvalidParameter
from plainsong.serializers import BYTES, Serializer, encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.core.gathering import Bounds, Overflow

#: How long a lightweight transaction stays open, unless it says otherwise.
TRANSACTION_TIMEOUT_S = TIMEOUT_S


def producer_bounds(
    *,
    linger_ms: float,
    max_batch_messages: int,
    max_batch_bytes: int,
    max_pending_bytes: int,
    overflow: Overflow,
    delivery_timeout_s: float | None,
) -> Bounds:
    """What a producer gathers and holds. Raises InvalidParameter."""
    if overflow == "drop":
        raise InvalidParameter("a producer drops nothing", hint='use wait, or raise; client.publisher has "drop"')
    return options.publisher_bounds(
        linger_ms=linger_ms,
        max_batch_messages=max_batch_messages,
        max_batch_bytes=max_batch_bytes,
        max_pending_bytes=max_pending_bytes,
        delivery_timeout_s=delivery_timeout_s,
        mode="reliable",
        overflow=overflow,
        retry_unknown=False,
        connections=1,
    )


class Prepared(NamedTuple):
    """One message as it goes out, before it has a number."""

    payload: bytes
    ttl_s: int | None
    attributes: Mapping[str, str] | None
    sequence_id: int | None


def prepared(
    value: Any,
    serializer: Serializer,
    sequence_id: int | None,
    attributes: Mapping[str, str] | None,
    routing_key: str | None,
) -> Prepared:
    """A value, or an ``Outgoing`` around it. Raises NotEncodable, InvalidParameter: nothing happened."""
    ttl_s = None
    if attributes is not None or routing_key is not None:
        value = with_attributes(value, attributes, routing_key)
    strings = None
    if type(value) is Outgoing:
        ttl_s, strings = value.ttl_s, value.strings
        sequence_id = value.sequence_id if sequence_id is None else sequence_id
        value = value.value
    payload = value if type(value) is bytes and serializer is BYTES else encoded(serializer, value)
    return Prepared(payload, ttl_s, strings, sequence_id)
