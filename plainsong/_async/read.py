"""A reader: its messages one by one, for a loop and for ``get``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic

from plainsong._async._backend import Messages, is_running, now, shielded
from plainsong.errors import Closed
from plainsong.protocol.errors import PlainsongError
from plainsong.serializers import V

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from plainsong._async.reading import AsyncReading
    from plainsong.messages import Message
    from plainsong.protocol.page import Held

log = logging.getLogger("plainsong.reader")

#: How long a save may take when an exception or a cancellation leaves the block.
_LAST_SAVE_S = 5.0


class AsyncReader(Generic[V]):
    """The messages of one or several topics, in order; made by ``AsyncClient.read``, which explains the options.

    Iterate over it once, in one task. With a position, a message is finished when the loop asks for the next one. Use
    it in an ``async with`` block: its normal end finishes the message at hand and saves the position; after an
    exception that message is delivered again. Without a block, a loop left early saves nothing more, and messages since
    the last save are delivered again.
    """

    def __init__(self, reading: AsyncReading) -> None:
        self._reading = reading
        self._messages = Messages(reading)
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return self._messages

    async def __anext__(self) -> Message[V]:
        return await self._messages.__anext__()

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll; only for committed or transactional reads."""
        return self._reading.held

    @property
    def is_time_up(self) -> bool:
        """True if reading ends because 90 % of its transaction's time has passed."""
        return self._reading.is_time_up()

    async def get(self, timeout_s: float | None = None) -> Message[V] | None:
        """The next message. A loop over the reader and calls of ``get`` may take turns.

        Args:
          timeout_s: how long to wait for one, while following; None: as long as it takes. The daemon is asked once, even
            if it is 0. The answer may be late by a quarter of a second. If answers take longer, each ``get`` that ends
            before its answer doubles this allowance, up to ``request_timeout_s``.
        Returns:
          None: no message arrived in time, or the reader has ended (``has_ended`` tells which).
        Raises:
          as the loop does.
        """
        reading = self._reading
        reading.begin_get(timeout_s)
        try:
            return await self._messages.__anext__()
        except StopAsyncIteration:
            self._has_ended = True
            return None
        finally:
            reading.end_get()

    @property
    def has_ended(self) -> bool:
        """True once ``get`` has returned None because no more messages will follow."""
        return self._has_ended

    def stop(self) -> None:
        """Ends the loop after the message at hand, as at the end of the topic: its position is saved. Idempotent.

        Other tasks call it while the loop waits.
        """
        self._reading.end()

    async def save(self) -> None:
        """Finishes the message at hand and saves now (in a transaction: at its end).

        Raises:
          PositionNotSaved, PositionChanged: messages since the last save will be delivered again.
        """
        self._reading.done_with_message_at_hand(now())
        await self._reading.save()

    async def aclose(self) -> None:
        """Saves the position of the finished messages, and ends. Idempotent. Raises the same as ``save``.

        While the loop waits elsewhere this is ``stop``: the loop ends, and saves.
        """
        if self._reading.closed:
            return
        if is_running(self._messages):
            self._reading.end()
            return
        self._reading.closed = True
        await self._messages.aclose()
        await self._reading.save()

    async def __aenter__(self) -> Self:
        if self._reading.closed:
            raise Closed("the reader is closed")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reading.done_with_message_at_hand(now())
            await self.aclose()
            return
        with shielded(_LAST_SAVE_S):
            try:
                await self.aclose()
            except PlainsongError as error:
                log.warning("a reader's position was not saved after an error: %s", error.detail)
