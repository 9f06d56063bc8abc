"""Rolling back write pointers in every topic that has rows of them, within a deadline."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from protocol.errors import PlainsongError, ShuttingDown, Unavailable
from protocol.topic.pointer_asks import RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from actors.pointer_index import PointerIndex
    from protocol.names import TopicName
    from protocol.topic.asks import Ask

    #: ``Directory.ask``.
    AskTopic = Callable[[TopicName, Ask[Any]], Awaitable[Any]]

log = logging.getLogger(__name__)

#: Topics asked at the same time.
_AT_ONCE = 16
#: Pauses before a topic that could not do it is asked again; the last one repeats.
_PAUSES_S = (0.02, 0.1, 0.5, 1.0)


async def roll_back(index: PointerIndex, ask: AskTopic, pointers: Iterable[int], deadline_s: float) -> set[int]:
    """Roll these pointers back wherever they have rows; which of them have no row left that could be seen.

    The authority must refuse writes under them already. A topic that cannot do it now is asked again until
    ``deadline_s``, on the monotonic clock; done twice, it changes nothing. Never raises.
    """
    done: set[tuple[TopicName, int]] = set()
    wanted = tuple(pointers)
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(name: TopicName, pointer: int) -> None:
        async with limit:
            if await _roll_back_one(ask, name, pointer):
                done.add((name, pointer))

    with trio.move_on_at(deadline_s):
        async with trio.open_nursery() as nursery:
            for pointer in wanted:
                for name in index.topics_of((pointer,)):
                    nursery.start_soon(one, name, pointer)
    # A write that was under way when the first look was taken is in the index since before that look.
    return {pointer for pointer in wanted if all((name, pointer) in done for name in index.topics_of((pointer,)))}


async def _roll_back_one(ask: AskTopic, name: TopicName, pointer: int) -> bool:
    failures = 0
    while True:
        try:
            await ask(name, RollBackPointer(pointer, by_client=False))
        except (Unavailable, ShuttingDown) as error:
            if isinstance(error, ShuttingDown):
                return False
        except PlainsongError as error:
            log.warning("rollback refused", extra={"topic": str(name), "pointer": pointer, "why": error.detail})
            return False
        else:
            return True
        await trio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
        failures += 1
