# Written by scripts/unasync.py from plainsong/_async/read.py: change that, and run it (make sync).
"""A reader: its messages one by one, for a loop and for ``get``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic

from plainsong._sync._backend import Messages, is_running, now, shielded
from plainsong.errors import Closed
from plainsong.protocol.errors import PlainsongError
from plainsong.serializers import V

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from plainsong._sync.reading import Reading
    from plainsong.messages import Message
    from plainsong.protocol.page import Held

log = logging.getLogger("plainsong.reader")

#: How long a save may take when an exception or a cancellation leaves the block.
_LAST_SAVE_S = 5.0


class Reader(Generic[V]):
    """The messages of one or several topics, in order; made by ``Client.read``, which explains the options.

    Iterate over it once. With a position, a message is finished when the loop asks for the next one. If ``break``,
    ``return`` or an exception leaves the loop, the message at hand is not finished, and is delivered again; the normal
    end of a ``with`` block does finish it. Not thread-safe: one thread at a time.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._messages = Messages(reading)
        self._has_ended = False

    def __iter__(self) -> Iterator[Message[V]]:
        return self._messages

    def __next__(self) -> Message[V]:
        return self._messages.__next__()

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll; only for committed or transactional reads."""
        return self._reading.held

    @property
    def is_time_up(self) -> bool:
        """True if reading ends because 90 % of its transaction's time has passed."""
        return self._reading.is_time_up()

    def get(self, timeout_s: float | None = None) -> Message[V] | None:
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
            return self._messages.__next__()
        except StopIteration:
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

        Other threads, and signal handlers, call it while the loop waits.
        """
        self._reading.end()

    def save(self) -> None:
        """Finishes the message at hand and saves now (in a transaction: at its end).

        Raises:
          PositionNotSaved, PositionChanged: messages since the last save will be delivered again.
        """
        self._reading.done_with_message_at_hand(now())
        self._reading.save()

    def close(self) -> None:
        """Saves the position of the finished messages, and ends. Idempotent. Raises the same as ``save``.

        While the loop waits elsewhere this is ``stop``: the loop ends, and saves.
        """
        if self._reading.closed:
            return
        if is_running(self._messages):
            self._reading.end()
            return
        self._reading.closed = True
        self._messages.close()
        self._reading.save()

    def __enter__(self) -> Self:
        if self._reading.closed:
            raise Closed("the reader is closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reading.done_with_message_at_hand(now())
            self.close()
            return
        with shielded(_LAST_SAVE_S):
            try:
                self.close()
            except PlainsongError as error:
                log.warning("a reader's position was not saved after an error: %s", error.detail)
