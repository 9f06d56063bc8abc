"""What a client can do besides its long-lived parts, as steps: one method for each, for both shells."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.core import calls, polls
from plainsong.core.attempts import Call, attempts
from plainsong.core.places import Places
from plainsong.core.plan import checked_isolation
from plainsong.ids import MessageId
from plainsong.messages import Origin, Outgoing, all_with_attributes, check_ttl, parts_of
from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter, NoMessages
from plainsong.protocol.requests import MAX_WAIT_MS, PollRequest, PublishRequest
from plainsong.serializers import SerializerLike, encoded, serializer_for
from plainsong.starts import NEWEST, as_bound, parse_start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plainsong.core.effects import Steps
    from plainsong.messages import Page, Receipt
    from plainsong.protocol.requests import Isolation
    from plainsong.settings import Settings
    from plainsong.starts import Start

T = TypeVar("T")


class Operations:
    """The decisions of one client.

    Args:
      random: a number from 0 to 1.
      wall_ms: this computer's time of day, in milliseconds since 1970.
      clock: seconds that only go forward, by which transactions count their time.
      endless: no call has a deadline.
    """

    def __init__(
        self,
        settings: Settings,
        random: Callable[[], float],
        wall_ms: Callable[[], int],
        places: Places | None = None,
        *,
        endless: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self.places = places or Places(settings.urls, follow=settings.follow_owners, clock=clock)
        self.endless = endless
        self.random = random
        self.wall_ms = wall_ms
        self.clock = clock

    def without_end(self) -> Operations:
        """The same, except that every call is tried until it works or fails for good."""
        return Operations(self.settings, self.random, self.wall_ms, self.places, endless=True, clock=self.clock)

    def call(self, call: Call[T], deadline_s: float | None = None) -> Steps[T]:
        """One call with its retries."""
        return attempts(call, self.settings, self.places, self.random, deadline_s=deadline_s, endless=self.endless)

    # --- publish and poll ------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        messages: Any,
        *,
        ttl_s: int | None,
        serializer: SerializerLike,
        retry_unknown: bool,
        deadline_s: float | None,
    ) -> Steps[Receipt]:
        """One request. A list or tuple is many messages, anything else is one."""
        many = messages if isinstance(messages, (list, tuple)) else [messages]
        if not many:
            raise NoMessages("the list is empty")
        request = outgoing_request(many, serializer, ttl_s)
        return self.call(calls.publish(self.namespace, topic, request, retry_unknown=retry_unknown), deadline_s)

    def poll(
        self,
        topic: str,
        start: Start,
        *,
        inclusive: bool | None,
        limit: int | None,
        max_bytes: int | None,
        wait_ms: int | None,
        until: Start,
        serializer: SerializerLike,
        deadline_s: float | None,
        isolation: Isolation | None = None,
        snapshot: bytes | None = None,
    ) -> Steps[Page]:
        """One page; ``snapshot`` is that of a transaction."""
        checked_isolation(isolation)
        if isolation is not None and snapshot is not None:
            raise InvalidParameter(
                "a transaction reads its own snapshot", hint="leave isolation out, or say direct=True"
            )
        if wait_ms is not None and not 0 <= wait_ms <= MAX_WAIT_MS:
            raise InvalidParameter(f"wait_ms is {wait_ms}", hint=f"use 0 to {MAX_WAIT_MS}")
        for name, number in (("limit", limit), ("max_bytes", max_bytes)):
            if number is not None and not (isinstance(number, int) and 0 < number < 1 << 31):
                raise InvalidParameter(f"{name} is {number!r}", hint="use a whole number above 0")
        origin = Origin(topic, serializer_for(serializer))
        position = yield from self.resolve(topic, start, deadline_s)
        request = PollRequest(position, is_inclusive(position, inclusive), limit)
        request.max_bytes = max_bytes
        request.wait_ms = wait_ms
        request.isolation = isolation
        request.transaction = snapshot
        if until is not None:
            request.end_before = yield from self.resolve_end(topic, until, deadline_s)
        return (yield from self.call(polls.poll(self.namespace, origin, request), deadline_s))

    def resolve(self, topic: str, start: Start, deadline_s: float | None = None) -> Steps[bytes | int | None]:
        """A start as an id, a time or None for the oldest; ``newest`` is asked of the daemon."""
        if start != NEWEST:
            return parse_start(start, self.wall_ms())
        stats = yield from self.call(calls.topic_stats(self.namespace, topic), deadline_s)
        newest, end = stats.get("newestId"), stats.get("end")
        if newest is None and end is not None and int(end, 16):
            # Nothing of the last that was published can be read any more: what comes stands behind it.
            return ids.before(bytes.fromhex(end))
        return None if newest is None else bytes(MessageId(newest))

    def resolve_end(self, topic: str, until: Start, deadline_s: float | None = None) -> Steps[bytes | None]:
        """An end as a bound, exclusive; ``newest`` ends after the newest message there is now."""
        position = yield from self.resolve(topic, until, deadline_s)
        if position is None:
            return None
        return ids.after(position) if until == NEWEST and isinstance(position, bytes) else as_bound(position)

    def position_of_last(self, topic: str, count: int) -> Steps[MessageId | None]:
        """The id after which the last ``count`` messages stand; None: there are no more than that."""
        if count < 0:
            raise InvalidParameter(f"count is {count}", hint="use 0 or more")
        all_of_it = yield from self.call(calls.topic_offsets(self.namespace, topic, {}))
        before = int(all_of_it["count"]) - count
        if before <= 0:
            return None
        bounds = {"maxMessages": before, "end": all_of_it["end"]}
        upto = yield from self.call(calls.topic_offsets(self.namespace, topic, bounds))
        return MessageId((int.from_bytes(MessageId(upto["end"]), "big") - 1).to_bytes(20, "big"))


def outgoing_request(
    values: Sequence[Any],
    serializer: SerializerLike,
    ttl_s: int | None,
    given: Mapping[str, str] | None = None,
    routing_key: str | None = None,
    *,
    numbered: bool = False,
) -> PublishRequest:
    """Values as they go out, with attributes besides their own; sequence ids only where others number them.

    Raises NotEncodable, InvalidParameter: nothing happened.
    """
    using = serializer_for(serializer)
    if ttl_s is not None:
        check_ttl(ttl_s)
    payloads, ttls_s, attributes = [], [], []
    for value in all_with_attributes(list(values), given, routing_key):
        own, strings = None, None
        if isinstance(value, Outgoing):
            value, own, strings = parts_of(replace(value, sequence_id=None) if numbered else value)
        payloads.append(value if type(value) is bytes and serializer is None else encoded(using, value))
        ttls_s.append(own)
        attributes.append(dict(strings or {}))
    return PublishRequest(
        payloads,
        ttl_s=ttl_s,
        message_ttls_s=calls.own_ttls(ttls_s),
        attributes=attributes if any(attributes) else None,
    )


def is_inclusive(position: bytes | int | None, asked: bool | None) -> bool:
    """A time is inclusive and an id exclusive, unless somebody says otherwise."""
    return not isinstance(position, bytes) if asked is None else asked


def checked_properties(properties: Mapping[str, Any], ttl_s: int | None) -> dict[str, Any]:
    """Properties as they are sent; ``ttl_s`` is the daemon's ``ttl``."""
    return {**properties, **({} if ttl_s is None else {"ttl": ttl_s})}
