"""Opening streams: one WebSocket to a topic, for many small publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core.streaming import DEFAULT_PENDING_BYTES

if TYPE_CHECKING:
    from weakref import WeakSet

    from plainsong.core.operations import Operations
    from plainsong.serializers import SerializerLike
    from plainsong.sync.delivery import Closing
    from plainsong.sync.stream import Stream


class Streams:
    """What ``Client`` streams."""

    _operations: Operations
    _publishers: WeakSet[Closing]

    def stream(
        self, topic: str, *, max_pending_bytes: int = DEFAULT_PENDING_BYTES, serializer: SerializerLike = None
    ) -> Stream:
        """A connection on which publishes go ahead of their answers; use it in a ``with`` block, or close it.

        For loops of single publishes, each with its own receipt. A ``publisher`` outlives its connections and tries
        again; a stream does neither: its tickets say what became of each request. Outside of transactions.

        Args:
          max_pending_bytes: that requests without an answer may occupy, about 300 bytes for each beside its
            messages; ``publish`` waits when they do. A larger request goes alone.
        Raises:
          ConnectFailed, InvalidName, ShuttingDown: nothing happened.
        """
        from plainsong.sync.stream import Stream  # an event loop, which most programs do without

        stream = Stream(self._operations, topic, max_pending_bytes=max_pending_bytes, serializer=serializer)
        self._publishers.add(stream)
        return stream
