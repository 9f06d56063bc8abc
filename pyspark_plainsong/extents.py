"""Measuring a range of any length, in steps that one request each is enough for.

The daemon looks at every message, about a million a second. So a long range is measured piece by piece, and the
pieces are added up: nobody waits longer for one answer than a request may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark_plainsong.answers import Extent
    from pyspark_plainsong.calls import Calls, Isolation

#: Messages measured by one request.
STEP_MESSAGES = 5_000_000


def whole_extent(
    calls: Calls,
    topic: str,
    *,
    start: bytes,
    end: bytes | None,
    isolation: Isolation,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    splits: int | None = None,
) -> Extent:
    """What ``Calls.offsets`` says of one request, of as many as it takes.

    Args:
      splits: parts of each step; between steps there is a bound, too.
    Raises:
      BrokerError: the topic cannot be read.
    """

    def measured(at: bytes, messages: int, size_bytes: int) -> Extent:
        room = STEP_MESSAGES if max_messages is None else min(STEP_MESSAGES, max_messages - messages)
        return calls.offsets(
            topic,
            start=at,
            end=end,
            max_messages=room,
            max_bytes=None if max_bytes is None else max_bytes - size_bytes,
            splits=splits,
            isolation=isolation,
        )

    whole = measured(start, 0, 0)
    step = whole
    while step.messages == STEP_MESSAGES and whole.messages != max_messages and whole.size_bytes != max_bytes:
        step = measured(whole.end, whole.messages, whole.size_bytes)
        if step.generation != whole.generation or not step.messages:
            break
        if max_bytes is not None and whole.size_bytes + step.size_bytes > max_bytes:
            break  # its one message is larger than what is left
        whole = whole._replace(
            end=step.end,
            messages=whole.messages + step.messages,
            size_bytes=whole.size_bytes + step.size_bytes,
            splits=(*whole.splits, whole.end, *step.splits),
        )
    return whole
