"""Reading in an asynchronous loop: an iterator over messages that keeps its place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from plainsong.errors import Closed, PlainsongError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from typing import Self

    from plainsong.aio.shell import AsyncShell
    from plainsong.core.reading import Reading
    from plainsong.messages import Message

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
        # Generators, since their every step costs half of a method's; nothing in them needs to be closed.
        self._messages = self._all() if reading.keeps_position else self._all_without_position()
        self._at_hand: Message | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages

    async def __anext__(self) -> Message:
        return await anext(self._messages)

    async def _all(self) -> AsyncGenerator[Message, None]:
        reading, run = self._reading, self._shell.run
        while not self._closed and (page := await run(reading.next_page())) is not None:
            for message in page:
                self._at_hand = message
                yield message
                if self._closed:
                    return
                if self._at_hand is message and reading.did(message, anyio.current_time()):
                    await run(reading.save())
            self._at_hand = None
        await run(reading.save())

    async def _all_without_position(self) -> AsyncGenerator[Message, None]:
        run, next_page = self._shell.run, self._reading.next_page
        while not self._closed and (page := await run(next_page())) is not None:
            for message in page:
                yield message

    async def save(self) -> None:
        """Count the message at hand as done, and save now.

        Raises:
          PositionNotSaved, PositionChanged: what was read since the last save will come again.
        """
        if self._at_hand is not None:
            at_hand, self._at_hand = self._at_hand, None
            self._reading.did(at_hand, anyio.current_time())
        await self._shell.run(self._reading.save())

    async def aclose(self) -> None:
        """Save what the loop is done with, and end. Idempotent. Raises as ``save`` does."""
        self._closed = True
        self._at_hand = None
        await self._shell.run(self._reading.save())

    async def __aenter__(self) -> Self:
        if self._closed:
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
