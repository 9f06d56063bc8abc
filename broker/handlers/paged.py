"""Reading a page within what answers may hold: whole while there is plenty, shorter while there is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.http.answers import AnswerRoom
    from protocol.page import Page

#: What a page is counted for, as a multiple of its payload: itself, and what it is encoded to.
TIMES = 2
#: What is read before anything is asked for: most pages have no more, and need not wait for what they do not use.
FIRST_BYTES = 256 << 10


async def read_within(
    room: AnswerRoom | None, limit: int, max_bytes: int, read: Callable[[int], Awaitable[Page]]
) -> Page:
    """A page of at most ``max_bytes``, which ``room`` holds; it may be shorter than what there is, as any may be.

    Args:
      room: None: nobody counts.
      limit: messages that ``read`` reads at most.
      read: a page of at most so many bytes, but with one message at least.
    Raises:
      Overloaded: there was no room for even a short one in time; nothing is held.
    """
    if room is None:
        return await read(max_bytes)
    is_first = not room.takes_now(TIMES * max_bytes)
    size = min(max_bytes, FIRST_BYTES) if is_first else max_bytes
    while True:
        page = await read(size)
        needs = TIMES * page.payload_bytes
        if is_first and size < max_bytes and page.end == "more" and page.count < limit:
            most = max(needs, TIMES * max_bytes)
        elif room.has(needs):
            return page
        else:
            most = needs  # more than was thought, since a page has one message at least
        is_first = False
        del page  # while it waits it must not be held
        size = await room.take(max(needs, TIMES), max(most, TIMES)) // TIMES


async def bytes_within(room: AnswerRoom | None, max_bytes: int) -> int:
    """How many bytes of payload an answer that is no one page may gather, which ``room`` holds; ``max_bytes`` at most.

    Raises:
      Overloaded: there was no room in time; nothing is held.
    """
    if room is None or room.takes_now(TIMES * max_bytes):
        return max_bytes
    least = min(max_bytes, FIRST_BYTES)
    return await room.take(TIMES * least, TIMES * max_bytes) // TIMES


def gathered(room: AnswerRoom | None, payload_bytes: int) -> None:
    """Says how much it was. Raises Overloaded: more than was held, by a message that is larger, and there is no room."""
    if room is not None and not room.has(TIMES * payload_bytes):
        raise room.refusal()
