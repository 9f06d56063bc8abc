"""A producer at work: its session, its numbers, what waits, and the one transaction that is open; without threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from plainsong.core.operations import outgoing_request
from plainsong.core.outcomes import Tally
from plainsong.core.producing.delivery import Delivery
from plainsong.core.producing.lightweight import Lightweight, check_routing_key, check_size
from plainsong.core.producing.numbering import Numbering
from plainsong.core.producing.waiting import Single, Waiting
from plainsong.errors import Closed, SequenceIdsMixed, TransactionInProgress
from plainsong.messages import Outgoing, all_with_attributes
from plainsong.protocol.errors import InvalidParameter, NoMessages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.core.effects import Steps
    from plainsong.core.gathering import Bounds
    from plainsong.core.operations import Operations
    from plainsong.core.outcomes import Asked
    from plainsong.core.producing.options import Prepared
    from plainsong.core.producing.receipts import Delivered
    from plainsong.core.producing.session import Session
    from plainsong.core.producing.waiting import Ended, Parcel
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.requests import PublishRequest
    from plainsong.serializers import Serializer

S = TypeVar("S", bound="Asked")


class Producing(Generic[S]):
    """What both kinds of producers decide; called under the lock of whoever has threads."""

    def __init__(
        self,
        operations: Operations,
        session: Session,
        bounds: Bounds,
        serializer: Serializer,
        initial_sequence_id: int | None,
        transaction_timeout_s: float,
    ) -> None:
        if not transaction_timeout_s > 0:
            raise InvalidParameter(f"transaction_timeout_s is {transaction_timeout_s}", hint="use a number above 0")
        self.operations = operations
        self.session = session
        self.serializer = serializer
        self.waiting: Waiting[S] = Waiting(bounds)
        self.tally = Tally[S]()
        self.transaction_timeout_s = transaction_timeout_s
        self.closed = False
        self._open: Lightweight | None = None
        first = session.last_sequence_id + 1 if initial_sequence_id is None else initial_sequence_id
        self._numbering = Numbering(first)

    # --- in ------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises Closed, or what the producer stopped for: nothing happened."""
        if self.closed:
            raise Closed("the producer is closed")
        self.waiting.check()

    def take(self, message: Prepared, sent: S, now_s: float) -> bool:
        """Take one message; whether somebody should come and look. Raises SequenceIdsMixed, InvalidSequenceIds."""
        sequence_id = self._numbering.take(message.sequence_id)
        waiting = self.waiting
        nobody_looks = waiting.next_s() is None
        waiting.put(Single(message.payload, message.ttl_s, message.attributes, sequence_id, sent, now_s))
        return waiting.under_way is None or nobody_looks

    def take_whole(
        self,
        request: PublishRequest,
        sequence_ids: Sequence[int | None] | None,
        sent: S,
        now_s: float,
        limit_s: float | None = None,
    ) -> None:
        """Take messages that go in one request. Raises as ``take``."""
        given = None
        if sequence_ids is not None and any(each is not None for each in sequence_ids):
            given = [each for each in sequence_ids if each is not None]
            if len(given) != len(sequence_ids):
                raise SequenceIdsMixed("some messages have sequence ids and some have none", hint="all, or none")
        request.sequence_ids = self._numbering.take_many(given, len(request.messages))
        self.waiting.put_whole(request, sent, now_s, limit_s)

    @property
    def explicit(self) -> bool:
        """Whether the caller names the ids."""
        return bool(self._numbering.explicit)

    # --- out -----------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """When there is something to do: to deliver, or to give up a transaction whose time is over."""
        times = [self.waiting.next_s(), self._open.until_s if self._open is not None else None]
        return min((each for each in times if each is not None), default=None)

    def work(self, now_s: float) -> tuple[Parcel[S] | None, list[Ended[S]]]:
        """What to deliver now, and what is given up."""
        self.expire(now_s)
        ended = self.overdue(now_s)
        return self.waiting.take(now_s), ended

    def overdue(self, now_s: float) -> list[Ended[S]]:
        """What has waited too long, and what ends with it; also while something is under way."""
        return self.waiting.overdue(now_s, explicit=self.explicit)

    def steps(self, parcel: Parcel[S]) -> Steps[Delivered]:
        """Bring it to its end; see ``Delivery``."""
        return Delivery(self.operations, self.session, parcel.request, self.waiting.until_s(parcel)).steps()

    def delivered(self, parcel: Parcel[S]) -> list[Ended[S]]:
        """It is durable; what ends although: all behind it, where deduplication was switched off."""
        self.waiting.delivered(parcel)
        self.tally.delivered(len(parcel.request.messages))
        return self.waiting.stop(self.session.over) if self.session.over is not None else []

    def failed(self, parcel: Parcel[S], error: PlainsongError) -> list[Ended[S]]:
        """It was given up; what ends with it."""
        ended = self.waiting.failed(parcel, error, explicit=self.explicit)
        if self.session.over is not None:
            ended += self.waiting.stop(self.session.over)
        return ended

    # --- lightweight transactions --------------------------------------------------------------

    def begin(self, routing_key: str, timeout_s: float | None, now_s: float) -> Lightweight:
        """Open one. Raises TransactionInProgress: there is one, InvalidParameter, and as ``check_usable``."""
        self.check_usable()
        self.expire(now_s)
        if self._open is not None and self._open.state in ("open", "committing"):
            raise TransactionInProgress(
                f"a transaction of {self._open.routing_key!r} is {self._open.state} on this producer",
                hint="commit or abort it first: one at a time",
            )
        limit_s = self.transaction_timeout_s if timeout_s is None else timeout_s
        if not limit_s > 0:
            raise InvalidParameter(f"timeout_s is {limit_s}", hint="use a number above 0")
        self._open = Lightweight(routing_key, self.serializer, limit_s, now_s + limit_s)
        return self._open

    def expire(self, now_s: float) -> None:
        """Forget a transaction that has ended, or whose time is over."""
        if self._open is not None:
            self._open.expire(now_s)
            if self._open.state not in ("open", "committing"):
                self._open = None

    def abort_open(self) -> None:
        """The producer ends: what was not committed is forgotten."""
        if self._open is not None and self._open.state == "open":
            self._open.abort()


def whole_request(
    messages: Any,
    serializer: Serializer,
    *,
    ttl_s: int | None = None,
    attributes: Mapping[str, str] | None = None,
    routing_key: str | None = None,
) -> tuple[PublishRequest, list[int | None]]:
    """Messages of one request, and the sequence ids that came with them. Raises NoMessages, NotEncodable, InvalidParameter."""
    many = messages if isinstance(messages, (list, tuple)) else [messages]
    if not many:
        raise NoMessages("the list is empty")
    many = all_with_attributes(many, attributes, routing_key)
    request = outgoing_request(many, serializer, ttl_s, numbered=True)
    return request, [each.sequence_id if isinstance(each, Outgoing) else None for each in many]


def atomic_request(
    routing_key: str, messages: Any, serializer: Serializer, *, ttl_s: int | None = None
) -> tuple[PublishRequest, list[int | None]]:
    """Messages that go in all together or not at all. Raises as ``whole_request``; MaxTransactionSizeExceeded."""
    request, ids = whole_request(messages, serializer, ttl_s=ttl_s)
    request.atomic = True
    request.routing_key = check_routing_key(routing_key)
    for each in request.attributes or ():
        if each.get("routingKey", routing_key) != routing_key:
            raise InvalidParameter("a message has another routing key", hint="one request, one routing key")
    check_size(len(request.messages), sum(map(len, request.messages)))
    return request, ids


def unnumbered_atomic_request(
    routing_key: str,
    messages: Any,
    serializer: Serializer,
    ttl_s: int | None,
    attributes: Mapping[str, str] | None,
) -> PublishRequest:
    """The same of no producer. Raises InvalidParameter: a message has a sequence id."""
    request, ids = atomic_request(routing_key, all_with_attributes(messages, attributes, None), serializer, ttl_s=ttl_s)
    if any(each is not None for each in ids):
        raise InvalidParameter("a sequence id belongs to a producer", hint="use client.producer")
    return request
