"""Reading in an asynchronous loop: an iterator over messages that keeps its place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from plainsong.errors import Closed
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from plainsong.aio.shell import AsyncShell
    from plainsong.core.reading import Reading
    from plainsong.messages import Held, Message

log = logging.getLogger("plainsong.reader")

#: How long a save may take when the block is left by an error or cancelled.
_LAST_SAVE_S = 5.0


class AsyncReader:
    """The messages of one or several topics, in order; made by ``AsyncClient.read``, which explains the options.

    Iterate over it once, in one task. With a position, the loop is done with a message when it asks for the next
    one. Use it in an ``async with`` block: when that ends without an exception, the message at hand counts as
    done, and the position is saved; after an exception, that message comes again. Without a block, a loop that
    is left early saves nothing more: what came after the last save comes again.
    """

    def __init__(self, reading: Reading, shell: AsyncShell) -> None:
        self._reading = reading
        self._shell = shell
        # No asynchronous generator: one that is left early complains, and cannot be ended where it is forgotten.
        self._page: Iterator[Message] = iter(())
        self._keeps_position = reading.keeps_position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._keeps_position:
            await self._finish_message_at_hand()
        if self._reading.is_inside and self._reading.is_time_up():
            raise StopAsyncIteration
        for message in self._page:
            if self._keeps_position:
                self._reading.at_hand = message
            return message
        return await self._first_of_next_page()

    async def _finish_message_at_hand(self) -> None:
        if self._reading.done_with_message_at_hand(anyio.current_time()):
            await self._shell.run(self._reading.save(patiently=True))

    async def _first_of_next_page(self) -> Message:
        page = None if self._reading.closed else await self._shell.run(self._reading.next_page())
        if page is None:
            await self._shell.run(self._reading.save())
            raise StopAsyncIteration
        self._page = iter(page)
        return await self.__anext__()

    @property
    def held(self) -> dict[str, Held]:
        """Who holds up which topic, as of its last poll; only with committed messages, or in a transaction."""
        return self._reading.held

    @property
    def is_time_up(self) -> bool:
        """Whether it ends, or ended, because 90 % of its transaction's time are over."""
        return self._reading.is_time_up()

    async def save(self) -> None:
        """Count the message at hand as done, and save now (in a transaction: with its end).

        Raises:
          PositionNotSaved, PositionChanged: what was read since the last save will come again.
        """
        self._reading.done_with_message_at_hand(anyio.current_time())
        await self._shell.run(self._reading.save())

    async def aclose(self) -> None:
        """Save what the loop is done with, and end. Idempotent. Raises as ``save`` does."""
        self._reading.closed = True
        self._reading.at_hand = None
        self._page = iter(())
        await self._shell.run(self._reading.save())

    async def __aenter__(self) -> Self:
        if self._reading.closed:
            raise Closed("the reader is closed")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.save()
            await self.aclose()
            return
        with anyio.move_on_after(_LAST_SAVE_S, shield=True):
            try:
                await self.aclose()
            except PlainsongError as error:
                log.warning("a reader's position was not saved after an error: %s", error.detail)
