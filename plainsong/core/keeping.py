"""What a reader's loop is done with, and when that is kept: after so much of it, at its end, or with its transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core.effects import Now

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.core.plan import Plan
    from plainsong.messages import Message
    from plainsong.positions import Position
    from plainsong.transactions.values import Transaction


class Keeping:
    """The position of one reader.

    Args:
      patient: operations that wait for a daemon that is away, if the reader follows.
      bounded: operations that do not.
    """

    def __init__(
        self,
        patient: Operations,
        bounded: Operations,
        plan: Plan,
        position: Position | None,
        transaction: Callable[[], Transaction] | None,
    ) -> None:
        #: The message that the loop has been given and is not done with yet.
        self.at_hand: Message | None = None
        self._operations = patient
        self._bounded = bounded
        self._plan = plan
        self._position = position
        self._transaction = transaction
        self._done: dict[str, bytes] = {}
        self._done_messages = 0
        self._saved_s: float | None = None

    @property
    def keeps_position(self) -> bool:
        """Whether ``done_with_message_at_hand`` has to be told."""
        return self._position is not None

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """The loop is done with it, and all before it; whether it is time to save."""
        message, self.at_hand = self.at_hand, None
        if message is None:
            return False
        self._done[message.topic] = message.id_bytes
        self._done_messages += 1
        if self._done_messages >= self._plan.save_every:
            return True
        return self._saved_s is not None and now_s - self._saved_s >= self._plan.save_interval_s

    def save(self, *, patiently: bool = False) -> Steps[None]:
        """Keep what the loop is done with; inside a transaction that is for its end (``settle``).

        Args:
          patiently: wait for a daemon that is away, if the reader follows.
        Raises:
          PositionNotSaved, PositionChanged, DeadlineExceeded: what was read since the last save will come again.
        """
        if self._transaction is None:
            yield from self._save(patiently=patiently)

    @property
    def transactional(self) -> bool:
        """Whether the position is kept by what the transaction's participants commit."""
        return bool(getattr(self._position, "transactional", False))

    def settle(self) -> Steps[None]:
        """The transaction ends: keep what the loop is done with. Raises as ``save`` does."""
        yield from self._save(patiently=False)

    def _save(self, *, patiently: bool) -> Steps[None]:
        if self._position is None or not self._done:
            return
        done, self._done, self._done_messages = self._done, {}, 0
        try:
            yield from self._position.save(self._operations if patiently else self._bounded, done)
        except BaseException:
            self._done = {**done, **self._done}
            raise
        self._saved_s = yield Now()
