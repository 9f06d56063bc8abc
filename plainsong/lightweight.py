"""The state of a lightweight transaction: it keeps messages of one routing key until one request publishes them.

    open ─ commit → committing → committed │ unknown │ open again, if it certainly was not stored
    open ─ abort, or time-out → aborted

The time-out applies only while it is open: a commit under way is never given up for being slow.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

from plainsong.errors import MaxTransactionSizeExceeded, NoTransaction, TransactionTimedOut
from plainsong.messages import Outgoing, attributes_of, outgoing_request
from plainsong.protocol.errors import InvalidParameter, NoMessages, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest
    from plainsong.serializers import Serializer

#: Serialized bytes of all messages of one transaction, as docs/http.md promises.
MAX_BYTES = 16 << 20
MAX_MESSAGES = 65_536
TIMEOUT_S = 30.0

LightweightState = Literal["open", "committing", "committed", "aborted", "unknown"]


def check_size(messages: int, size: int) -> None:
    """Raises MaxTransactionSizeExceeded beyond the limits of one atomic request."""
    if messages > MAX_MESSAGES:
        raise MaxTransactionSizeExceeded(f"there are {messages} messages", hint=f"the maximum is {MAX_MESSAGES}")
    if size > MAX_BYTES:
        raise MaxTransactionSizeExceeded(
            f"the messages have {size} bytes", hint=f"the maximum is {MAX_BYTES} serialized bytes"
        )


def check_routing_key(routing_key: object) -> str:
    """Raises InvalidParameter unless it is a str that a request can carry."""
    if not isinstance(routing_key, str):
        raise InvalidParameter(f"the routing key is {routing_key!r}", hint="use a str")
    attributes_of(None, routing_key)
    return routing_key


class Lightweight:
    """The messages and state of one lightweight transaction.

    The caller writes and commits while a worker of the producer expires it, so every method that checks and then
    changes the state holds the lock for both.

    Args:
      until_s: when it times out, unless a commit has begun.
    """

    def __init__(self, routing_key: str, serializer: Serializer, timeout_s: float, until_s: float) -> None:
        self.routing_key = check_routing_key(routing_key)
        self.state: LightweightState = "open"
        self.until_s = until_s
        self.size = 0
        """Serialized bytes so far."""
        self.receipt: Receipt | None = None
        self._lock = threading.RLock()
        self._error: PlainsongError | None = None
        self._timeout_s = timeout_s
        self._serializer = serializer
        self._messages: list[bytes] = []
        self._ttls_s: list[int | None] = []
        self._attributes: list[Mapping[str, str]] = []
        self._sequence_ids: list[int | None] = []

    def __len__(self) -> int:
        return len(self._messages)

    def write(self, value: Any, *, sequence_id: int | None, ttl_s: int | None, now_s: float) -> None:
        """Adds a message.

        Raises:
          MaxTransactionSizeExceeded, NotEncodable, InvalidParameter: the transaction stays open without the message.
          NoTransaction, TransactionTimedOut: it has ended.
        """
        self.check_open(now_s)
        if value is None or (isinstance(value, Outgoing) and value.value is None):
            raise InvalidParameter("None is not a message", hint="write bytes, or a value that the serializer accepts")
        request = outgoing_request([value], self._serializer, ttl_s, numbered=True)
        attributes = dict(request.attributes[0]) if request.attributes else {}
        if attributes.setdefault("routingKey", self.routing_key) != self.routing_key:
            raise InvalidParameter("the message has another routing key", hint="use one transaction per routing key")
        del attributes["routingKey"]
        payload = request.messages[0]
        own_id = value.sequence_id if isinstance(value, Outgoing) else None
        with self._lock:
            self.check_open(now_s)
            check_size(len(self._messages) + 1, self.size + len(payload))
            self.size += len(payload)
            self._messages.append(payload)
            self._ttls_s.append(request.message_ttls_s[0] if request.message_ttls_s else request.ttl_s)
            self._attributes.append(attributes)
            self._sequence_ids.append(own_id if sequence_id is None else sequence_id)

    def committing(self, now_s: float) -> PublishRequest:
        """Begins the commit and returns its request, without the sequence ids, which ``sequence_ids`` has.

        Raises:
          NoMessages: it is empty, and stays open. NoTransaction, TransactionTimedOut: it has ended.
        """
        with self._lock:
            self.check_open(now_s)
            if not self._messages:
                raise NoMessages("the transaction is empty", hint="write a message, or abort it")
            request = outgoing_request(list(self._messages), None, None)
            request.atomic = True
            request.routing_key = self.routing_key
            request.message_ttls_s = list(self._ttls_s) if any(ttl is not None for ttl in self._ttls_s) else None
            request.attributes = list(self._attributes) if any(self._attributes) else None
            self.state = "committing"
            return request

    @property
    def sequence_ids(self) -> list[int | None]:
        """The caller's sequence id of each message, or None."""
        return self._sequence_ids

    # --- its end -------------------------------------------------------------------------------

    def committed(self, receipt: Receipt) -> None:
        """Records that it is durable."""
        with self._lock:
            self.receipt = receipt
            self._end("committed")

    def failed(self, error: PlainsongError, now_s: float) -> None:
        """The commit failed. If nothing was stored it may be committed again in time; otherwise the transaction ends as unknown."""
        with self._lock:
            if error.outcome == "not-applied":
                self.state = "open"
                self.expire(now_s)
            else:
                self._error = error
                self._end("unknown")

    def abort(self) -> None:
        """Drops the messages. Idempotent. Raises NoTransaction: it is committed, may be, or a commit is under way."""
        with self._lock:
            if self.state == "open":
                self._end("aborted")
            elif self.state != "aborted":
                raise NoTransaction(f"the transaction is {self.state}", hint="only an open one can be aborted")

    def expire(self, now_s: float) -> bool:
        """Aborts it if its time is over. Returns True if it did."""
        with self._lock:
            if self.state != "open" or now_s < self.until_s:
                return False
            self._error = TransactionTimedOut(
                f"the transaction was open for more than {self._timeout_s:g} s and was aborted",
                hint="timeout_s of begin is the limit",
            )
            self._end("aborted")
            return True

    def check_open(self, now_s: float) -> None:
        """Raises NoTransaction, TransactionTimedOut, TransactionOutcomeUnknown: how it ended."""
        self.expire(now_s)
        if self.state == "open":
            return
        if self._error is not None:
            raise self._error
        raise NoTransaction(f"the transaction is {self.state}", hint="begin another one")

    def _end(self, state: LightweightState) -> None:
        self.state = state
        self.size = 0
        for column in (self._messages, self._ttls_s, self._attributes, self._sequence_ids):
            column.clear()
