"""One leg of a stream whose topic is owned elsewhere: messages go as they are, and their numbers are kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.handlers.publish import LOOP_BYTES
from broker.handlers.stream import REQUEST_BYTES, StreamBounds, encoded_answer
from broker.peering.answers import LinkBroken
from protocol.codec import stream as codec
from protocol.errors import NoOwner, OutcomeUnknown, Overloaded, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.ownership import Instance
    from broker.http.bodies import Holding
    from broker.peering.channels import Channel

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


class AwayLeg:
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
