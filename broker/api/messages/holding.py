"""Lets committed readers wait for a decision about a message.

    woken by                     through
      a decision, a rollback       ``PointerIndex.wake`` of the pointer
      the topic: changed, deleted, created, restored, cleaned, closed   ``PointerIndex.wake`` of the topic
      the message's expiry         a deadline, by the clock; a clock that jumps ahead wakes all readers
      the daemon's shutdown        ``PointerIndex.close``

The reader then checks again, and may find that the same message still holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from actors.directory import Directory
    from actors.observe import Clock
    from actors.pointers import PointerIndex
    from broker.authority import Transactions
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.page import Held

#: A reader checks again after this time if nothing can wake it. That applies to a pointer unknown to the transaction
#: service, which becomes visible once the read pointer has passed it, and to a topic of another instance, whose changes
#: wake no reader here.
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Holds:
    """The waits of all routes."""

    directory: Directory
    transactions: Transactions
    pointers: PointerIndex
    clock: Clock

    @property
    def mark(self) -> int:
        """Read this before the view and the page, and pass it to ``wait``, which then misses no later wake-up."""
        return self.pointers.mark

    async def wait(self, name: TopicName, held: Held, until_ms: int, mark: int, deadline_s: float) -> None:
        """Wait until the hold may have ended, or until the deadline.

        Args:
          until_ms: when the message that holds the reader expires by its own ttl; 0 if it has none.
          mark: the value of ``mark`` before the view and the page were read.
          deadline_s: on trio's clock.
        Raises:
          Overloaded: too many readers are waiting already.
        """
        now_s = trio.current_time()
        is_mine = self.directory.environment.ownership.is_mine(name)
        if not is_mine or self.transactions.standing(held.write_pointer) == "unknown":
            deadline_s = min(deadline_s, now_s + PATIENCE_S)
        expires_ms = self._expires_ms(name, held, until_ms)
        if expires_ms is not None:
            # A message is alive through the millisecond in which it expires.
            deadline_s = min(deadline_s, now_s + max(0, expires_ms + 1 - self.clock.now_ms()) / 1000)
        with trio.move_on_at(deadline_s):
            await self.pointers.wait(held.write_pointer, mark, name)

    def _expires_ms(self, name: TopicName, held: Held, until_ms: int) -> int | None:
        """Return when the message expires, by the topic's ttl or its own; None if that is not known here."""
        state = self.directory.peek(name)
        if state is None or state.metadata is None or held.since_ms is None:
            return until_ms or None
        topic_ms = held.since_ms + state.metadata.properties.ttl_ms
        return min(topic_ms, until_ms) if until_ms else topic_ms
