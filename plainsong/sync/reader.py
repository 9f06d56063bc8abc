"""Reading in a loop: an iterator over messages that keeps its place."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from plainsong.errors import Closed
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Self

    from plainsong.core.reading import Reading
    from plainsong.messages import Held, Message
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
        generator = _all if reading.keeps_position else _all_without_position
        self._messages = (_all_inside if reading.is_inside else generator)(reading, shell)

    def __iter__(self) -> Iterator[Message]:
        return self._messages

    def __next__(self) -> Message:
        return next(self._messages)

    @property
    def held(self) -> dict[str, Held]:
        """Who holds up which topic, as of its last poll; only with committed messages, or in a transaction."""
        return self._reading.held

    @property
    def is_time_up(self) -> bool:
        """Whether it ends, or ended, because 90 % of its transaction's time are over."""
        return self._reading.is_time_up()

    def save(self) -> None:
        """Count the message at hand as done, and save now (in a transaction: with its end).

        Raises:
          PositionNotSaved, PositionChanged: what was read since the last save will come again.
        """
        self._reading.done_with_message_at_hand(monotonic())
        self._shell.run(self._reading.save())

    def close(self) -> None:
        """Save what the loop is done with, and end. Idempotent. Raises as ``save`` does."""
        if not self._reading.closed:
            self._reading.closed = True
            self._messages.close()
            self._shell.run(self._reading.save())

    def __enter__(self) -> Self:
        if self._reading.closed:
            raise Closed("the reader is closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reading.done_with_message_at_hand(monotonic())
        try:
            self.close()
        except PlainsongError as error:
            if kind is None:
                raise
            log.warning("a reader's position was not saved after an error: %s", error.detail)


# The generators know nothing of the reader, so that a loop that is left frees, and thereby ends, its generator.


def _all(reading: Reading, shell: Shell) -> Generator[Message, None, None]:
    run = shell.run
    try:
        while (page := run(reading.next_page())) is not None:
            for message in page:
                reading.at_hand = message
                yield message
                if reading.done_with_message_at_hand(monotonic()):
                    run(reading.save(patiently=True))
        run(reading.save())
    except BaseException:
        if not reading.closed:
            _leave(reading, shell)
        raise


def _leave(reading: Reading, shell: Shell) -> None:
    """The loop was left: save what it was done with before, and be quiet: nobody is there to hear of an error."""
    try:
        shell.run(reading.save())
    except PlainsongError as error:
        log.warning("a reader's position was not saved: %s", error.detail)


def _all_without_position(reading: Reading, shell: Shell) -> Generator[Message, None, None]:
    run, next_page = shell.run, reading.next_page
    while (page := run(next_page())) is not None:
        yield from page


def _all_inside(reading: Reading, shell: Shell) -> Generator[Message, None, None]:
    """Part of a transaction, which saves; no message is handed out for which there is no time left."""
    while (page := shell.run(reading.next_page())) is not None:
        for message in page:
            if reading.is_time_up():
                return
            reading.at_hand = message
            yield message
            reading.done_with_message_at_hand(monotonic())
