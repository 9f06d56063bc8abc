"""A stream of publishes for threads: each call returns at once, with what stands for its answer."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, cast

from plainsong.core import calls
from plainsong.core.effects import Failure
from plainsong.core.operations import outgoing_request
from plainsong.core.options import EXIT_TIMEOUT_S
from plainsong.core.outcomes import Tally
from plainsong.core.places import is_elsewhere
from plainsong.core.streaming import Streaming, receipt_of
from plainsong.errors import Closed, NotSent
from plainsong.protocol.errors import OutcomeUnknown, PlainsongError
from plainsong.serializers import BYTES, SerializerLike, encoded, serializer_for
from plainsong.sync.afterlife import watch
from plainsong.transport.thread import SocketThread

if TYPE_CHECKING:
    from typing import Self

    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest, PublishResponse

log = logging.getLogger("plainsong.stream")


class Ticket:
    """What becomes of one request of a stream.

    ``result(timeout)`` is its receipt, once it is durable (its ``PublishResponse``, under a write pointer). It raises
    what went wrong, whose ``outcome`` says whether the request happened; ``TimeoutError`` when there is no answer yet.
    """

    __slots__ = ("_answer", "_condition", "asked", "messages", "number", "size")

    number: int
    size: int

    def __init__(self, condition: threading.Condition, messages: int) -> None:
        self._condition = condition
        self._answer: Any = None
        self.messages = messages
        #: Whether anybody has asked what became of it.
        self.asked = False

    def __repr__(self) -> str:
        return f"<Ticket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether its fate is known."""
        return self._answer is not None

    def result(self, timeout: float | None = None) -> Receipt | PublishResponse:
        """The receipt, once there is one."""
        outcome = self._outcome(timeout)
        if isinstance(outcome, PlainsongError):
            raise outcome
        return outcome

    def exception(self, timeout: float | None = None) -> PlainsongError | None:
        """What went wrong, once its fate is known; None: nothing."""
        outcome = self._outcome(timeout)
        return outcome if isinstance(outcome, PlainsongError) else None

    def told(self, status: int, fields: dict[str, Any]) -> None:
        """There is an answer; whoever reads it takes it apart."""
        self._answer = status, fields

    def failed(self, error: PlainsongError) -> None:
        """There will be none."""
        self._answer = error

    def _outcome(self, timeout: float | None) -> Receipt | PublishResponse | PlainsongError:
        self.asked = True
        if self._answer is None:
            with self._condition:
                if not self._condition.wait_for(self.done, timeout):
                    raise TimeoutError
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        return cast("Receipt | PublishResponse | PlainsongError", self._answer)


class Stream:
    """One WebSocket to a topic; made by ``Client.stream``, which explains the options.

    Thread-safe. The order of calls is the order in the topic. Ends with its connection: what was not answered then
    is unknown, unless the daemon closed in good order, and nothing is sent again. A forked child must open its own.
    """

    def __init__(
        self, operations: Operations, topic: str, *, max_pending_bytes: int, serializer: SerializerLike
    ) -> None:
        self._topic = topic
        self.exit_timeout_s = EXIT_TIMEOUT_S
        self._serializer = serializer_for(serializer)
        self._as_it_is = self._serializer is BYTES
        self._streaming: Streaming[Ticket] = Streaming(max_pending_bytes)
        self._tally: Tally[Ticket] = Tally()
        self._start_afresh()
        self._thread = self._opened(operations, calls.topic_path(operations.namespace, topic, "/stream"))
        watch(self)

    def _opened(self, operations: Operations, path: str) -> SocketThread:
        """Connected to the first daemon that can be reached."""
        places, left = operations.places, len(operations.places.urls)
        while True:
            url = places.where(path)
            try:
                return self._opened_at(url, path, operations)
            except PlainsongError as error:
                goes_back = places.heard(path, url, Failure("connect", error.detail), error)
                left -= not goes_back
                if not left or not (goes_back or is_elsewhere(error)):
                    raise

    def _opened_at(self, url: str, path: str, operations: Operations) -> SocketThread:
        thread = SocketThread(path, operations.settings, _Talk(self))
        places = operations.places
        connect_s = places.connect_s(url, operations.settings.connect_timeout_s)
        places.told(path, url, thread.open(url, connect_s))
        return thread

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        #: Something was answered, or the end has come: told to those who wait for room, and for answers.
        self._room = threading.Condition(self._lock)
        self._settled = threading.Condition(threading.RLock())
        self._resting = False
        self._closing = False

    def __repr__(self) -> str:
        return f"<Stream to {self._topic}: {len(self._streaming)} without an answer>"

    def publish(self, messages: Any, *, ttl_s: int | None = None) -> Ticket:
        """Hand over a request, and get what stands for its answer; waits only while the buffer is full.

        Args:
          messages: one, or a list of several, which are one request; as for ``Client.publish``.
          ttl_s: seconds they live, if that is shorter than the topic's ttl.
        Raises:
          Closed, NotEncodable, InvalidParameter: nothing happened.
        """
        if type(messages) is bytes and self._as_it_is and ttl_s is None:
            return self._hand_over(messages, None, Ticket(self._settled, 1))
        many = messages if isinstance(messages, list | tuple) else [messages]
        if type(messages) is not bytes or ttl_s is not None:
            return self.send(outgoing_request(many, self._serializer, ttl_s))
        return self._hand_over(encoded(self._serializer, messages), None, Ticket(self._settled, 1))

    def send(self, request: PublishRequest) -> Ticket:
        """Hand over a request with any of a publish's fields; as ``publish``."""
        return self._hand_over(b"", request, Ticket(self._settled, len(request.messages)))

    def _hand_over(self, payload: bytes, request: PublishRequest | None, ticket: Ticket) -> Ticket:
        streaming = self._streaming
        with self._lock:
            if self._closing:
                raise Closed("the stream is closed")
            while not (streaming.put_single(payload, ticket) if request is None else streaming.put(request, ticket)):
                self._wake_with_lock()
                self._room.wait()
                if self._closing:
                    raise Closed("the stream was closed while this request waited for room")
            wake, self._resting = self._resting, False
        if wake:
            self._thread.wake()
        return ticket

    def _wake_with_lock(self) -> None:
        if self._resting:
            self._resting = False
            self._thread.wake()

    # --- the end -------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is answered.

        Raises:
          NotSent: something is not answered after ``timeout_s``, or failed since the last flush and nobody asked its
            ticket. Nothing is given up by it.
        """
        with self._lock:
            self._room.wait_for(lambda: not len(self._streaming), timeout_s)
            waiting = len(self._streaming)
        self._tally.raise_if_unheard(0, waiting)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, then close; what is not answered after ``timeout_s`` is given up. Idempotent. Raises as ``flush``."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._room.notify_all()
            self._wake_with_lock()
        self._thread.join(timeout_s)
        with self._lock:
            lost = self._streaming.end(OutcomeUnknown("the stream was closed before the answer came"), said=False)
        self._thread.wake()  # so that it ends, if it still waits for what was given up
        self._lose(lost)
        self._tally.raise_if_unheard(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except NotSent as error:
            if kind is None:
                raise
            log.warning("a block with a stream was left by an error: %s", error.detail)

    def _lose(self, lost: list[Ticket]) -> None:
        if lost:
            self._tally.failed(lost, OutcomeUnknown())
        with self._settled:
            self._settled.notify_all()

    def after_fork(self) -> None:
        """In a child: the connection is the parent's."""
        self._start_afresh()
        self._closing = True
        self._streaming.end(OutcomeUnknown("the process forked: the parent has this stream"), said=False)

    def at_exit(self) -> None:
        """The interpreter leaves: wait a moment for what has been handed over."""
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            log.error("a stream was never closed, and the program ended: %s", error.detail)


class _Talk:
    """The stream as its socket sees it, in the socket's thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def take(self) -> bytes | None:
        """The next message to send."""
        stream = self._stream
        with stream._lock:
            message = stream._streaming.take()
            stream._resting = message is None
        return message

    def finished(self) -> bool:
        """Whether the stream is closed, and all is answered."""
        return self._stream._closing and not len(self._stream._streaming)

    def heard(self, message: bytes) -> None:
        """Answers."""
        stream = self._stream
        with stream._lock:
            wrong = stream._streaming.take_answers(message)
            stream._room.notify_all()
        with stream._settled:
            stream._settled.notify_all()
        if wrong:
            stream._tally.failed(wrong, PlainsongError())

    def ended(self, error: PlainsongError, *, said: bool) -> None:
        """The connection is over."""
        stream = self._stream
        with stream._lock:
            lost = stream._streaming.end(error, said=said)
            stream._room.notify_all()
        stream._lose(lost)

    def answered(self) -> int | None:
        """How many were answered, if some are not."""
        streaming = self._stream._streaming
        return streaming.answered if streaming.sent else None
