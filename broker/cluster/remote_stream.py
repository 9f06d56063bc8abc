"""Streams of publishes to the topics of other instances.

A stream is local, remote or routed. ``LocalStream`` (``broker.api.messages.stream``) puts requests into the mailbox
of a topic that this instance owns. ``RemoteStream`` sends them over a link to the owner, where ``serve_stream`` answers
them. ``RoutedStream`` is what a client of a cluster gets: a sequence of local and remote streams, since its
topic may move while it lives. The next one begins when everything sent to the last one is answered, so answers keep the
order of the requests.
"""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from broker.api.answers import LOOP_BYTES
from broker.api.messages.stream import REQUEST_BYTES, StreamBounds, encoded_answer
from broker.cluster.owners import PATIENCE_S
from broker.link.flow import LinkBroken
from broker.link.version_0_1 import sender
from broker.security.identity import ANONYMOUS, Identity
from plainsong.protocol.cluster import OWNER_HEADER
from plainsong.protocol.codec import stream as codec
from plainsong.protocol.errors import MalformedBody, NoOwner, OutcomeUnknown, Overloaded, PlainsongError, ShuttingDown
from plainsong.protocol.names import topic_name
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.ownership import Instance
    from broker.api.messages.stream import LocalStream, Streams
    from broker.cluster.owners import Owners
    from broker.http.budgets import Reservation
    from broker.http.messages import Conversation
    from broker.link.client import Channel
    from broker.link.server import ServedChannel

#: Precedes the answers in a message: the number of requests answered so far, including these.
ANSWERED = struct.Struct(">Q")


class RoutedStream:
    """A client's stream to a topic of any instance; a ``Conversation``."""

    def __init__(
        self,
        streams: Streams,
        owners: Owners,
        namespace: str,
        topic: str,
        request_id: str,
        reservation: Reservation,
        who: Identity = ANONYMOUS,
    ) -> None:
        self._who = who
        self._streams = streams
        self._owners = owners
        self._name = topic_name(namespace, topic)
        self._request_id = request_id
        self._reservation = reservation
        #: The last part accepts requests, the first one answers.
        self._parts: deque[LocalStream | RemoteStream] = deque()
        self._finished = False
        self._answered_before = 0
        self._taking = False
        self._changed = trio.Event()
        owners.listen(self)
        self._begun_s = perf_counter()
        self._first_owner = owners.remote_owner(self._name)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The owner's address, for the client's next stream."""
        return [] if self._first_owner is None else [(OWNER_HEADER, self._first_owner.address)]

    @property
    def answered(self) -> int:
        return self._answered_before + (self._parts[0].answered if self._parts else 0)

    async def opened(self) -> None:
        """See ``Conversation``. There is nothing to wait for."""

    @property
    def waiting(self) -> bool:
        return any(part.waiting for part in self._parts)

    async def take(self, messages: Sequence[bytes]) -> None:
        self._taking = True
        try:
            part = self._current_part() or await self._next_part()
            if part is not None:
                await part.take(messages)
        finally:
            self._taking = False

    def on_view_change(self) -> None:
        """End the last part if its instance no longer owns the topic; requests that it accepted are answered first."""
        last = self._parts[-1] if self._parts else None
        if last is not None and not self._taking and last.owner != self._owners.remote_owner(self._name):
            last.finish()

    def _current_part(self) -> LocalStream | RemoteStream | None:
        """Return the last part, if it still leads to the owner."""
        last, owner = self._parts[-1] if self._parts else None, self._owners.remote_owner(self._name)
        if last is None or not last.is_usable or last.owner != owner:
            return None
        return last if owner is not None or self._owners.ownership.is_mine(self._name) else None

    async def _next_part(self) -> LocalStream | RemoteStream | None:
        """Return the part that accepts requests now; None: the stream has finished."""
        attempts = self._owners.attempts(trio.current_time() + PATIENCE_S)
        async for _ in attempts:
            if self._finished:
                return None
            current = self._current_part()
            if current is not None:
                return current
            is_mine, owner = self._owners.ownership.is_mine(self._name), self._owners.remote_owner(self._name)
            if self._parts:
                await self._drained(self._parts[-1])
                attempts.until_s = trio.current_time() + PATIENCE_S
            part = None if owner is None else await self._open_remote(owner)
            if part is not None:
                return self._appended(part)
            if is_mine:
                break
        # Without an owner, the topic's directory refuses each request.
        return self._appended(self._streams.begin(*self._name, self._request_id, self._reservation))

    def _appended(self, part: LocalStream | RemoteStream) -> LocalStream | RemoteStream | None:
        if self._finished:
            return None
        self._parts.append(part)
        self._wake()
        return part

    async def _open_remote(self, owner: Instance) -> RemoteStream | None:
        """Open a stream to the owner; None: nothing was sent, and the view may have changed."""
        try:
            link = await self._owners.links.to(owner.address)
            channel = await link.converse("stream", [*self._name, self._request_id, *sender(self._who)])
        except (LinkBroken, NoOwner, ShuttingDown):
            return None
        if self._finished:
            channel.close()
            return None
        self._owners.metrics.forwarded("out")
        return RemoteStream(channel, owner, self._reservation)

    async def _drained(self, part: LocalStream | RemoteStream) -> None:
        part.finish()
        while part in self._parts:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def answers(self) -> bytes | None:
        while True:
            while not self._parts:
                if self._finished:
                    return None
                await self._changed.wait()
            answers = await self._parts[0].answers()
            if answers is not None:
                return answers
            done = self._parts.popleft()
            self._answered_before += done.answered
            done.close()
            self._wake()

    def finish(self) -> None:
        self._finished = True
        for part in self._parts:
            part.finish()
        self._wake()

    def close(self) -> None:
        self.finish()
        while self._parts:
            self._parts.popleft().close()
        self._reservation.release()
        if self._first_owner is not None:
            seconds = perf_counter() - self._begun_s
            access = self._streams.accounting.access
            access.begin(self._request_id)
            access.answered("stream", str(self._name), 101, seconds, self.headers)


# --- remote ----------------------------------------------------------------------------------------


#: Messages that arrive together are sent as one, up to this size.
JOINED_BYTES = 64 << 10


@dataclass(slots=True)
class _Sent:
    """Requests sent together."""

    numbers: deque[int]
    size: int
    """Its share of the budget, in bytes."""
    error: PlainsongError | None
    """The answer to these requests if the owner does not answer them."""


class RemoteStream:
    """A stream over a link to the topic's owner, or to the process that owns the store; a ``Conversation``.

    Messages are sent unchanged. Their numbers are kept, to answer them if the owner is lost.
    """

    def __init__(
        self, channel: Channel, owner: Instance, reservation: Reservation, bounds: StreamBounds | None = None
    ) -> None:
        self.owner: Instance | None = owner
        self._channel = channel
        self._reservation = reservation
        self._bounds = bounds or StreamBounds()
        self._reader = codec.RequestReader()
        self._sent: deque[_Sent] = deque()
        self._requests = 0
        #: Number of answered requests: by the owner, or here because the owner did not answer them.
        self.answered = 0
        #: Number of requests that the owner has answered, as it counts them.
        self._owner_answered = 0
        self._finished = False
        self._broken: Exception | None = None
        self._changed = trio.Event()

    @property
    def is_usable(self) -> bool:
        """True if it accepts more requests."""
        return self._broken is None and not self._finished

    @property
    def waiting(self) -> bool:
        return bool(self._sent)

    # --- in ------------------------------------------------------------------------------------

    async def take(self, messages: Sequence[bytes]) -> None:
        joined: list[bytes] = []
        numbers: list[int] = []
        for message in messages:
            read = partial(self._reader.read, message)
            parts, fault = read() if len(message) <= LOOP_BYTES else await in_thread(read)
            for part in parts:
                numbers += part.numbers if isinstance(part, codec.Singles) else [part.number]
            joined.append(message)
            if fault is not None or sum(map(len, joined)) >= JOINED_BYTES:
                await self._send(joined, numbers)
                joined, numbers = [], []
            if fault is not None:
                raise fault
        await self._send(joined, numbers)

    async def _send(self, joined: list[bytes], numbers: list[int]) -> None:
        if not numbers:
            return  # nothing in it needs an answer
        data = b"".join(joined)
        size = len(data) + REQUEST_BYTES * len(numbers)
        await self._room(len(numbers), size)
        if self._finished:
            return
        refusal = await self._refusal(size)
        sent = _Sent(deque(numbers), size if refusal is None else 0, refusal)
        self._sent.append(sent)
        self._requests += len(numbers)
        self._wake()
        if sent.error is None:
            try:
                await self._channel.send(data)
            except (LinkBroken, PlainsongError) as error:
                self._break(error)

    async def _refusal(self, size: int) -> PlainsongError | None:
        """Return why requests of this size cannot be sent; earlier ones are answered first, to keep the order."""
        while self._broken is None:
            try:
                self._reservation.grow(size)
            except Overloaded as error:
                if not self._sent:
                    return error
                await self._changed.wait()
            else:
                return None
        return NoOwner("the topic's owner was lost before this was sent")

    async def _room(self, requests: int, size: int) -> None:
        bounds = self._bounds
        while not self._finished and self._sent:
            if self._requests + requests <= bounds.requests and self._reservation.reserved_bytes + size <= bounds.bytes:
                return
            await self._changed.wait()

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._channel.finish()
            self._wake()

    def close(self) -> None:
        self.finish()
        self._channel.close()

    # --- out -----------------------------------------------------------------------------------

    async def answers(self) -> bytes | None:
        while True:
            while not self._sent:
                if self._finished or self._broken is not None:
                    return None
                await self._changed.wait()
            if self._sent[0].error is not None:
                return self._refused(self._sent[0].error)
            try:
                data = await self._channel.receive()
                if data is None:
                    raise LinkBroken("the owner ended the stream", sent=True)
            except (LinkBroken, PlainsongError) as error:
                self._break(error)
                continue
            answered, answers = int.from_bytes(data[:8], "big"), data[8:]
            self._settle(answered - self._owner_answered)
            self._owner_answered = answered
            return answers

    def _settle(self, requests: int) -> None:
        """Remove the oldest ``requests`` requests, which are answered."""
        self._requests -= requests
        self.answered += requests
        while requests and self._sent:
            oldest = self._sent[0]
            some = min(requests, len(oldest.numbers))
            for _ in range(some):
                oldest.numbers.popleft()
            requests -= some
            if not oldest.numbers:
                self._sent.popleft()
                self._reservation.shrink(oldest.size)
        self._wake()

    def _refused(self, error: PlainsongError) -> bytes:
        """Return the answers to the oldest requests, which the owner does not answer."""
        numbers = list(self._sent[0].numbers)
        self._settle(len(numbers))
        return b"".join([encoded_answer(number, error) for number in numbers])

    def _break(self, error: Exception) -> None:
        self._broken = error
        for sent in self._sent:
            sent.error = sent.error or _unknown(error)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _unknown(error: Exception) -> PlainsongError:
    unknown = OutcomeUnknown(
        "the topic's owner was lost before it answered", hint=("read the topic to check whether it happened")
    )
    unknown.__cause__ = error
    return unknown


# --- the owner's end -------------------------------------------------------------------------------


async def serve_stream(
    streams: Streams,
    owners: Owners,
    channel: ServedChannel,
    namespace: str,
    topic: str,
    request_id: str,
    reservation: Reservation,
    who: Identity = ANONYMOUS,
) -> None:
    """Publish what arrives on a channel from another instance, and answer it.

    That instance may notice later than this one that the topic has moved. Requests that arrive until then are routed to
    the next owner, like those of a client: none is refused because two views differ for a moment.

    Raises:
      NoOwner: this instance does not own the topic; no request was accepted.
    """
    name = topic_name(namespace, topic)
    if not owners.ownership.is_mine(name):
        raise NoOwner(f"{name} is not owned by {owners.ownership.me.name}")
    stream = RoutedStream(streams, owners, namespace, topic, request_id, reservation, who)
    try:
        await converse(stream, channel)
    finally:
        stream.close()


async def converse(conversation: Conversation, channel: ServedChannel) -> None:
    """Answer the messages of a channel, until no more arrive and all are answered."""

    async def take() -> None:
        with suppress(MalformedBody):  # the other end has detected it, too, and reports it to the client
            while (message := await channel.receive()) is not None:
                await conversation.take([message])
        conversation.finish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        while (answers := await conversation.answers()) is not None:
            await channel.send(ANSWERED.pack(conversation.answered) + answers)
        nursery.cancel_scope.cancel()
