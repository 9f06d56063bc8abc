# Written by scripts/unasync.py from plainsong/_async/progress.py: change that, and run it (make sync).
"""The progress of a reader: the messages that its loop has finished, and the position that saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from plainsong._sync._backend import run_blocking, run_from_worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong import calls
    from plainsong._sync.retry import Channel
    from plainsong.messages import Message
    from plainsong.positions import Position

T = TypeVar("T")


class BlockingChannel:
    """The daemon for positions: each call blocks its thread until the answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.namespace = channel.namespace

    def call(self, call: calls.Call[T]) -> T:
        """The answer, after as many attempts as are allowed."""
        answer: T = run_from_worker(self._channel.call, call)
        return answer


class Progress:
    """The last finished message of each topic since the last save. A save never passes an unfinished message.

    Args:
      position: None: nothing is saved.
      save_every, save_interval_s: a save is due after that many messages, or after that many seconds.
    """

    def __init__(self, position: Position | None, save_every: int, save_interval_s: float) -> None:
        self._position = position
        self._save_every = save_every
        self._save_interval_s = save_interval_s
        self._done: dict[str, bytes] = {}
        self._done_messages = 0
        self._saved_s: float | None = None

    @property
    def transactional(self) -> bool:
        """True if a transaction's participants commit the position."""
        return bool(getattr(self._position, "transactional", False))

    def load(self, channel: Channel, topics: Iterable[str]) -> dict[str, bytes]:
        """The saved ids of these topics; topics without one are left out."""
        if self._position is None:
            return {}
        return run_blocking(self._position.load, BlockingChannel(channel), topics)

    def save_starts(self, channel: Channel, starts: Mapping[str, bytes]) -> None:
        """Saves where reading begins: unsaved, a start that moves with the clock or the topic would skip messages after a crash."""
        if self._position is not None and starts:
            run_blocking(self._position.save, BlockingChannel(channel), starts)

    def begin(self, now_s: float) -> None:
        """Starts the first save interval."""
        self._saved_s = now_s

    def finish(self, message: Message[Any], now_s: float) -> bool:
        """Marks a message as finished. Returns True if a save is due."""
        self._done[message.topic] = message.id_bytes
        self._done_messages += 1
        if self._done_messages >= self._save_every:
            return True
        return self._saved_s is not None and now_s - self._saved_s >= self._save_interval_s

    def save(self, channel: Channel) -> None:
        """Saves the position of the finished messages.

        Raises:
          PositionNotSaved, PositionChanged, DeadlineExceeded: messages since the last save will be delivered again.
        """
        if self._position is None or not self._done:
            return
        done, self._done, self._done_messages = self._done, {}, 0
        try:
            run_blocking(self._position.save, BlockingChannel(channel), done)
        except BaseException:
            self._done = {**done, **self._done}
            raise
        self._saved_s = channel.now()
