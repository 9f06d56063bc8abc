"""One connection of a Tephra client: frames in, answers out, one at a time and in order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from protocol.errors import Overloaded
from protocol.transactions.thrift import MalformedThrift
from protocol.transactions.thrift_frames import Frames, FrameTooLarge, framed

if TYPE_CHECKING:
    from broker.http.bodies import BodyBudget, Holding

log = logging.getLogger("plainsong.thrift")

_RECEIVE_BYTES = 64 << 10
#: How long a frame may take to come in once it has begun, and an answer to be read; idle connections may stay.
FRAME_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0


class Methods(Protocol):
    """Who answers: the service of this instance, or of whichever owns it."""

    async def answer(self, message: bytes) -> bytes:
        """The message that answers a message. Raises MalformedThrift: it is no call."""
        ...


class Connection:
    """Serves one client until it leaves, or sends what is no call."""

    def __init__(self, stream: trio.SocketStream, methods: Methods, budget: BodyBudget) -> None:
        self._stream = stream
        self._methods = methods
        self._budget = budget
        self._frames = Frames()
        self._idle = trio.CancelScope()
        self._stopping = False

    def stop(self) -> None:
        """Take no further call; one that is being carried out is answered."""
        self._stopping = True
        self._idle.cancel()

    async def run(self) -> None:
        """Returns when the connection is over, whoever ended it."""
        try:
            with self._budget.hold() as holding:
                while not self._stopping and (message := await self._next(holding)) is not None:
                    answer = framed(await self._methods.answer(message))
                    holding.release()
                    with trio.fail_after(SEND_TIMEOUT_S):
                        await self._stream.send_all(answer)
        except (FrameTooLarge, MalformedThrift) as error:
            log.warning("a Thrift connection sent what is no call: %s", error)
        except Overloaded as error:
            log.warning("a Thrift connection was closed: %s", error.detail)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the client left, or reads and sends too slowly to be served

    async def _next(self, holding: Holding) -> bytes | None:
        """The next whole message; None: the client has left, or nothing more is to be taken."""
        message = self._frames.take()
        if message is not None:
            return message
        if not self._frames.missing_bytes:
            with trio.CancelScope() as self._idle:
                if not await self._receive(holding):
                    return None
            if self._idle.cancelled_caught:
                return None
        with trio.fail_after(FRAME_TIMEOUT_S):
            while (message := self._frames.take()) is None:
                if not await self._receive(holding):
                    return None
        return message

    async def _receive(self, holding: Holding) -> bool:
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        holding.grow(len(data))
        self._frames.feed(data)
        return bool(data)
