"""The requests of a publish stream in one order: first those that were sent and not answered, then those not sent yet.

Nothing here waits, reads a clock, or locks. A stream calls it under its lock: its sender takes messages to send, and its
receiver hands in the answers. ``T`` is the type of the tickets.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from plainsong.errors import Closed, ConnectionLost, problem_error
from plainsong.messages import UTF8_HINT, MessageId, Receipt
from plainsong.protocol.codec.stream import decode_answers, encode_request, encode_single
from plainsong.protocol.errors import (
    BodyTooLarge,
    InvalidParameter,
    MalformedBody,
    OutcomeUnknown,
    PlainsongError,
    ShuttingDown,
)
from plainsong.protocol.requests import PublishResponse

if TYPE_CHECKING:
    from plainsong.protocol.requests import PublishRequest

#: Memory of a request in addition to its bytes: its ticket, and its places in queues. Measured, rounded up.
REQUEST_BYTES = 300
#: The size limit of a WebSocket message that carries several requests; a larger request is sent alone.
MESSAGE_BYTES = 1 << 17
DEFAULT_PENDING_BYTES = 8 << 20
_SHUTTING_DOWN, _TOO_BIG = 1001, 1009


class PendingRequest(Protocol):
    """A ticket: ``answered`` or ``failed`` is called once."""

    number: int
    size: int
    messages: int

    def answered(self, status: int, fields: dict[str, Any]) -> None:
        """The daemon answered."""
        ...

    def failed(self, error: PlainsongError) -> None:
        """The request will get no answer."""
        ...


T = TypeVar("T", bound=PendingRequest)


class StreamQueue(Generic[T]):
    """The requests of one stream."""

    def __init__(self, max_pending_bytes: int = DEFAULT_PENDING_BYTES) -> None:
        self.max_pending_bytes = max_pending_bytes
        self.pending_bytes = 0
        """Memory of all requests without an answer."""
        self.ended: PlainsongError | None = None
        """The error that ended the stream."""
        self.answered = 0
        """The number of answered requests."""
        self.halted = False
        """True once sending has stopped."""
        self.flushing = False
        """Required by the sender; has no effect, since nothing lingers here."""
        self._number = 0
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        """Bytes of the requests not sent yet."""
        #: The tickets of all requests without an answer, the unsent ones last.
        self._unanswered: deque[T] = deque()

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._unanswered)

    @property
    def sent(self) -> int:
        """Requests sent and not answered."""
        return len(self._unanswered) - len(self._unsent)

    @property
    def oldest_bytes(self) -> int:
        """Bytes of the request whose answer comes next; 0: there is none."""
        return self._unanswered[0].size if self._unanswered else 0

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._unanswered)

    @property
    def unsent(self) -> int:
        """Requests not sent yet."""
        return len(self._unsent)

    # --- in ------------------------------------------------------------------------------------

    def put_single(self, payload: bytes, ticket: T) -> bool:
        """Takes a request of one plain message; False when there is no room now."""
        return self._put(encode_single(self._number, payload), ticket)

    def put(self, request: PublishRequest, ticket: T) -> bool:
        """Takes any request; False when there is no room now. Raises InvalidParameter: it cannot be written."""
        try:
            packed = encode_request(self._number, request)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidParameter(
                f"the request cannot be written: {type(error).__name__}: {error}", hint=UTF8_HINT
            ) from error
        return self._put(packed, ticket)

    def _put(self, packed: bytes, ticket: T) -> bool:
        size = len(packed) + REQUEST_BYTES
        if self.ended is not None:
            raise Closed("the stream has ended", hint=f"open another; this one: {self.ended.detail}")
        # A request larger than the bound is accepted alone, so that a stream accepts every request that publish does.
        if self._unanswered and self.pending_bytes + size > self.max_pending_bytes:
            return False
        ticket.number, ticket.size = self._number, size
        self._number += 1
        self.pending_bytes += size
        self._unsent.append(packed)
        self.unsent_bytes += len(packed)
        self._unanswered.append(ticket)
        return True

    # --- out -----------------------------------------------------------------------------------

    def work(self, now_s: float) -> tuple[bytes | None, list[T]]:
        """The next message to send. Nothing here becomes overdue."""
        return (None if self.halted else self.take()), []

    def next_s(self) -> float | None:
        """None, since no work appears without a call."""
        return None

    def wants_another(self, now_s: float) -> bool:
        """False, since one message is sent at a time."""
        return False

    def clear(self) -> list[T]:
        """Returns nothing: requests end with the connection (``end``)."""
        return []

    def take(self) -> bytes | None:
        """The next message to send; None if nothing waits."""
        unsent = self._unsent
        if not unsent:
            return None
        if self.unsent_bytes <= MESSAGE_BYTES:
            message = b"".join(unsent)
            unsent.clear()
        else:
            taken = [unsent.popleft()]
            size = len(taken[0])
            while unsent and size + len(unsent[0]) <= MESSAGE_BYTES:
                size += len(unsent[0])
                taken.append(unsent.popleft())
            message = b"".join(taken)
        self.unsent_bytes -= len(message)
        return message

    def take_answers(self, message: bytes) -> list[T]:
        """Completes the answered tickets, and returns those whose request was refused or failed.

        Raises:
          MalformedBody: the message does not match the open requests; the stream must end.
        """
        answers = decode_answers(message)
        unanswered, wrong = self._unanswered, []
        if len(answers) > self.sent:
            raise MalformedBody("there are more answers than requests")
        for number, status, fields in answers:
            ticket = unanswered[0]
            if number != ticket.number or type(fields) is not dict:
                raise MalformedBody(f"an answer to request {number}, expected one to request {ticket.number}")
            unanswered.popleft()
            ticket.answered(status, fields)
            self.pending_bytes -= ticket.size
            if status != 200:
                wrong.append(ticket)
        self.answered += len(answers)
        return wrong

    def end(self, error: PlainsongError, *, orderly: bool) -> list[T]:
        """Fails all tickets, since no more answers will arrive, and returns them.

        Args:
          orderly: the daemon closed after it answered all that it executed; otherwise it may have executed what was sent.
        """
        if self.ended is None:
            self.ended = error
        sent, unanswered = self.sent, list(self._unanswered)
        for index, ticket in enumerate(unanswered):
            ticket.failed(_not_taken(error) if orderly or index >= sent else _unknown(error))
        self._unanswered.clear()
        self._unsent.clear()
        self.pending_bytes = self.unsent_bytes = 0
        return unanswered


def close_error(code: int, reason: str) -> PlainsongError:
    """The error of a daemon's close frame: it did not execute the requests it left unanswered."""
    detail = f"the daemon closed the stream: {reason or code}"
    error: PlainsongError = ConnectionLost(detail)
    if code == _SHUTTING_DOWN:
        error = ShuttingDown(detail)
    elif code == _TOO_BIG:
        error = BodyTooLarge(detail)
    error.outcome = "not-applied"
    return error


def _not_taken(error: PlainsongError) -> PlainsongError:
    return _again(type(error), error, "not-applied")


def _unknown(error: PlainsongError) -> PlainsongError:
    return _again(OutcomeUnknown, error, "unknown")


def _again(
    kind: type[PlainsongError], error: PlainsongError, outcome: Literal["not-applied", "unknown"]
) -> PlainsongError:
    """A copy of the error for each request, since raising one adds a traceback to it."""
    made = kind(error.detail, hint=error.hint)
    made.outcome = outcome
    made.__cause__ = error.__cause__
    return made


def receipt_of(status: int, fields: dict[str, Any], messages: int) -> Receipt | PublishResponse | PlainsongError:
    """Decodes an answer: a receipt, a response under a write pointer, or an error."""
    if status != 200:
        error = problem_error(fields, status)
        retry_after = fields.get("retryAfter")
        if isinstance(retry_after, int):
            error.retry_after_s = retry_after
        return error
    try:
        return _response(fields) if "transactionWritePointer" in fields else _receipt(fields, messages)
    except (KeyError, TypeError, PlainsongError) as broken:
        unread = OutcomeUnknown(
            "the answer cannot be read", hint="check that client and daemon have compatible versions"
        )
        unread.outcome = "applied"
        unread.__cause__ = broken
        return unread


def _receipt(fields: dict[str, Any], messages: int) -> Receipt:
    first_id = fields["firstId"]
    last_id = fields.get("lastId", first_id)
    return Receipt(
        None if first_id is None else MessageId(first_id),
        None if last_id is None else MessageId(last_id),
        messages,
        fields["generation"],
        fields.get("duplicate", False),
        fields.get("deduplicated", False),
        fields.get("lastSequenceId"),
        fields.get("stored"),
        fields.get("dropped"),
    )


def _response(fields: dict[str, Any]) -> PublishResponse:
    return PublishResponse(
        fields["transactionWritePointer"],
        fields["startTimestamp"],
        fields["startSequenceId"],
        fields["endTimestamp"],
        fields["endSequenceId"],
        fields.get("duplicate", False),
    )
