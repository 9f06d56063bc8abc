"""Streams of publishes to topics owned by another instance: the client's side, the owner's side, and the way between.

Streams of publishes to topics owned elsewhere: the owner's end of one, and how a client's stream finds its owner.

A stream is a row of *legs*, each a conversation with whoever owns the topic: the next one begins when the view has
changed and all that the one before took is answered. So the order of answers is that of requests, as ever.
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

from broker.api.route import LOOP_BYTES
from broker.api.stream import REQUEST_BYTES, PublishStream, StreamBounds, encoded_answer
from broker.cluster.owners import PATIENCE_S
from broker.http.messages import OWNER_HEADER
from broker.link.flow import LinkBroken
from plainsong.protocol.codec import stream as codec
from plainsong.protocol.errors import MalformedBody, NoOwner, OutcomeUnknown, Overloaded, PlainsongError, ShuttingDown
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.ownership import Instance
    from broker.cluster.owners import Owners, Search
    from broker.http.budgets import Holding
    from broker.http.messages import Conversation
    from broker.link.client import Channel
    from broker.link.server import ServedChannel
    from broker.service import Service

#: In front of answers that travel: how many requests of the conversation are answered with them.
ANSWERED = struct.Struct(">Q")


async def serve_stream(
    service: Service,
    owners: Owners,
    channel: ServedChannel,
    namespace: str,
    topic: str,
    request_id: str,
    held: Holding,
) -> None:
    """The owner's end: what comes is put into the topic's mailbox, and answered.

    Whoever sent it may see later than this instance that the topic has gone. What comes until then is passed on to its
    next owner, as from a client of this instance: nobody is refused because views are not changed in one moment.

    Raises:
      NoOwner: the topic is not this instance's; nothing was taken.
    """
    name = topic_name(namespace, topic)
    if not owners.ownership.is_mine(name):
        raise NoOwner(f"{name} is not owned by {owners.ownership.me.name}")
    stream = RoutedStream(service, owners, namespace, topic, request_id, held)
    try:
        await converse(stream, channel)
    finally:
        stream.close()


async def converse(conversation: Conversation, channel: ServedChannel) -> None:
    """Answer what comes over a channel, until no more comes and all is answered."""

    async def take() -> None:
        with suppress(MalformedBody):  # whoever sent it has read it, too, and says so to the client
            while (message := await channel.receive()) is not None:
                await conversation.take([message])
        conversation.finish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        while (answers := await conversation.answers()) is not None:
            await channel.send(ANSWERED.pack(conversation.answered) + answers)
        nursery.cancel_scope.cancel()


class _LocalStream(PublishStream):
    """A leg at this instance; where nobody owns the topic, its directory refuses what is asked, request by request."""

    owner: Instance | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it takes more."""
        return not self._finished


class RoutedStream:
    """A client's stream; a ``Conversation``."""

    def __init__(
        self, service: Service, owners: Owners, namespace: str, topic: str, request_id: str, held: Holding
    ) -> None:
        self._service = service
        self._owners = owners
        self._name = topic_name(namespace, topic)
        self._request_id = request_id
        self._held = held
        self._legs: deque[_LocalStream | RemoteStream] = deque()
        self._finished = False
        self._answered_before = 0
        self._taking = False
        self._changed = trio.Event()
        owners.watch(self)
        self._begun_s = perf_counter()
        self._first = owners.elsewhere(self._name)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Where the owner is, for the client's next stream."""
        return [] if self._first is None else [(OWNER_HEADER, self._first.address)]

    @property
    def answered(self) -> int:
        """Requests that have been answered."""
        return self._answered_before + (self._legs[0].answered if self._legs else 0)

    async def opened(self) -> None:
        """As ``Conversation.opened`` says: nothing to wait for."""

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return any(leg.waiting for leg in self._legs)

    async def take(self, messages: Sequence[bytes]) -> None:
        """As ``Conversation.take`` says."""
        self._taking = True
        try:
            leg = await self._leg()
            if leg is not None:
                await leg.take(messages)
        finally:
            self._taking = False

    def look(self) -> None:
        """The view has changed: a leg to who does not own the topic any more ends, once all it took is answered."""
        last = self._legs[-1] if self._legs else None
        if last is not None and not self._taking and last.owner != self._owners.elsewhere(self._name):
            last.finish()

    async def _leg(self) -> _LocalStream | RemoteStream | None:
        """Where requests go now; None: nowhere any more."""
        search = self._owners.search(trio.current_time() + PATIENCE_S)
        while not self._finished:
            search.look()
            is_mine, owner = self._owners.ownership.is_mine(self._name), self._owners.elsewhere(self._name)
            last = self._legs[-1] if self._legs else None
            if last is not None and last.is_usable and last.owner == owner and (is_mine or owner is not None):
                return last
            if last is not None:
                await self._drained(last)
                search.until_s = trio.current_time() + PATIENCE_S
            leg = await self._opened(is_mine, owner, search)
            if leg is not None and not self._finished:
                self._legs.append(leg)
                self._wake()
                return leg
        return None

    async def _opened(
        self, is_mine: bool, owner: Instance | None, search: Search
    ) -> _LocalStream | RemoteStream | None:
        """A leg to the owner; None: the view is to be looked at again."""
        if owner is not None:
            try:
                link = await self._owners.links.to(owner.address)
                channel = await link.converse("stream", [*self._name, self._request_id])
                self._owners.counted.forwarded("out")
                return RemoteStream(channel, owner, self._held)
            except (LinkBroken, NoOwner, ShuttingDown):
                pass  # nothing was sent
        if not is_mine and await search.goes_on():
            return None
        return _LocalStream(self._service, *self._name, self._request_id, self._held)

    async def _drained(self, leg: _LocalStream | RemoteStream) -> None:
        leg.finish()
        while leg in self._legs:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def answers(self) -> bytes | None:
        """As ``Conversation.answers`` says."""
        while True:
            while not self._legs:
                if self._finished:
                    return None
                await self._changed.wait()
            answers = await self._legs[0].answers()
            if answers is not None:
                return answers
            over = self._legs.popleft()
            self._answered_before += over.answered
            over.close()
            self._wake()

    def finish(self) -> None:
        """As ``Conversation.finish`` says."""
        self._finished = True
        for leg in self._legs:
            leg.finish()
        self._wake()

    def close(self) -> None:
        """As ``Conversation.close`` says."""
        self.finish()
        while self._legs:
            self._legs.popleft().close()
        self._held.release()
        if self._first is not None:
            seconds = perf_counter() - self._begun_s
            self._service.access.begin(self._request_id)
            self._service.access.answered("stream", str(self._name), 101, seconds, self.headers)


# --- away ------------------------------------------------------------------------------------------
#
# One leg of a stream whose topic is owned elsewhere: messages go as they are, and their numbers are kept.


#: Messages that came together travel as one, up to so many bytes.
JOINED_BYTES = 64 << 10


@dataclass(slots=True)
class _Sent:
    """Requests that travel together."""

    numbers: deque[int]
    size: int
    """What it holds."""
    error: PlainsongError | None
    """Why there is no answer from the owner."""


class RemoteStream:
    """A conversation with the owner; see ``Conversation``. ``owner`` is whose it is."""

    def __init__(self, channel: Channel, owner: Instance, held: Holding, bounds: StreamBounds | None = None) -> None:
        self.owner: Instance | None = owner
        self._channel = channel
        self._held = held
        self._bounds = bounds or StreamBounds()
        self._reader = codec.RequestReader()
        self._sent: deque[_Sent] = deque()
        self._requests = 0
        #: Requests that the owner has answered.
        self.answered = 0
        self._finished = False
        self._broken: Exception | None = None
        self._changed = trio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether it takes more."""
        return self._broken is None and not self._finished

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return bool(self._sent)

    # --- in ------------------------------------------------------------------------------------

    async def take(self, messages: Sequence[bytes]) -> None:
        """As ``Conversation.take`` says."""
        joined: list[bytes] = []
        numbers: list[int] = []
        for message in messages:
            read = partial(self._reader.read, message)
            parts, fault = read() if len(message) <= LOOP_BYTES else await trio.to_thread.run_sync(read)
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
            return  # nothing that could be answered
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
        """Why requests of so many bytes are not sent. They are then the oldest: the owner's answers pass nobody by."""
        while self._broken is None:
            try:
                self._held.grow(size)
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
            if self._requests + requests <= bounds.requests and self._held.held_bytes + size <= bounds.bytes:
                return
            await self._changed.wait()

    def finish(self) -> None:
        """As ``Conversation.finish`` says."""
        if not self._finished:
            self._finished = True
            self._channel.finish()
            self._wake()

    def close(self) -> None:
        """As ``Conversation.close`` says."""
        self.finish()
        self._channel.close()

    # --- out -----------------------------------------------------------------------------------

    async def answers(self) -> bytes | None:
        """As ``Conversation.answers`` says."""
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
            self._settle(answered - self.answered)
            self.answered = answered
            return answers

    def _settle(self, requests: int) -> None:
        """So many, the oldest, are answered."""
        self._requests -= requests
        while requests and self._sent:
            oldest = self._sent[0]
            some = min(requests, len(oldest.numbers))
            for _ in range(some):
                oldest.numbers.popleft()
            requests -= some
            if not oldest.numbers:
                self._sent.popleft()
                self._held.shrink(oldest.size)
        self._wake()

    def _refused(self, error: PlainsongError) -> bytes:
        """What the oldest are answered that the owner does not answer."""
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
    unknown = OutcomeUnknown("the topic's owner was lost before it answered", hint="read to see whether it happened")
    unknown.__cause__ = error
    return unknown
