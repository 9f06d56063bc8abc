"""Reading in a loop: an iterator over messages that keeps its place."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from plainsong.errors import Closed, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Self

    from plainsong.core.reading import Reading
    from plainsong.messages import Message
    from plainsong.sync.shell import Shell

log = logging.getLogger("plainsong.reader")


class Reader:
    """The messages of one or several topics, in order; made by ``Client.read``, which explains the options.

    Iterate over it once. With a position, the loop is done with a message when it asks for the next one; when
    the loop is left by ``break``, ``return`` or an exception, the message at hand does not count as done,
    and comes again. In a ``with`` block that ends without an exception it does count: ``with`` says that the
    work on it is finished. Not thread-safe: one thread at a time.
    """

    def __init__(self, reading: Reading, shell: Shell) -> None:
        self._reading = reading
        self._shell = shell
        self._messages = self._all() if reading.keeps_position else self._all_without_position()
        self._at_hand: Message | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Message]:
        return self._messages

    def __next__(self) -> Message:
        return next(self._messages)

    def save(self) -> None:
        """Count the message at hand as done, and save now.

        Raises:
          PositionNotSaved, PositionChanged: what was read since the last save will come again.
        """
        if self._at_hand is not None:
            self._reading.did(self._at_hand, monotonic())
            self._at_hand = None
        self._shell.run(self._reading.save())

    def close(self) -> None:
        """Save what the loop is done with, and end. Idempotent. Raises as ``save`` does."""
        if not self._closed:
            self._closed = True
            self._at_hand = None
            self._messages.close()
            self._shell.run(self._reading.save())

    def __enter__(self) -> Self:
        if self._closed:
            raise Closed("the reader is closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._at_hand is not None:
            self._reading.did(self._at_hand, monotonic())
        try:
            self.close()
        except PlainsongError as error:
            if kind is None:
                raise
            log.warning("a reader's position was not saved after an error: %s", error.detail)

    def _all(self) -> Generator[Message, None, None]:
        reading, run = self._reading, self._shell.run
        try:
            while (page := run(reading.next_page())) is not None:
                for message in page:
                    self._at_hand = message
                    yield message
                    if self._at_hand is message and reading.did(message, monotonic()):
                        run(reading.save())
                self._at_hand = None
            run(reading.save())
        finally:
            if not self._closed:
                self._leave()

    def _leave(self) -> None:
        """The loop was left, or raised: save what it was done with before."""
        try:
            self._shell.run(self._reading.save())
        except PlainsongError as error:
            log.warning("a reader's position was not saved: %s", error.detail)

    def _all_without_position(self) -> Generator[Message, None, None]:
        run, next_page = self._shell.run, self._reading.next_page
        while (page := run(next_page())) is not None:
            yield from page
