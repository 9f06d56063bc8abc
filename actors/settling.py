"""What topics do before a transaction is decided, each at its owner and all within a deadline: roll back, or close."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from protocol.errors import PlainsongError, ShuttingDown, Unavailable
from protocol.topic.pointer_asks import ClosePointers, RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from actors.whereabouts import Whereabouts
    from protocol.names import TopicName
    from protocol.topic.asks import Ask

    #: ``Directory.ask``, or what asks a topic wherever its owner is.
    AskTopic = Callable[[TopicName, Ask[Any]], Awaitable[Any]]

log = logging.getLogger(__name__)

#: Topics asked at the same time.
_AT_ONCE = 16
#: Pauses before a topic that could not do it is asked again; the last one repeats.
_PAUSES_S = (0.02, 0.1, 0.5, 1.0)


async def roll_back(index: Whereabouts, ask: AskTopic, pointers: Iterable[int], deadline_s: float) -> set[int]:
    """Roll these pointers back wherever they have rows; which of them have no row left that could be seen.

    The authority must refuse writes under them already. A topic that cannot do it now is asked again until
    ``deadline_s``, on the monotonic clock; done twice, it changes nothing. Never raises.
    """
    done: set[tuple[TopicName, int]] = set()
    wanted = tuple(pointers)
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(name: TopicName, pointer: int) -> None:
        async with limit:
            if await _insist(ask, name, RollBackPointer(pointer, by_client=False)):
                done.add((name, pointer))

    with trio.move_on_at(deadline_s):
        async with trio.open_nursery() as nursery:
            for pointer in wanted:
                for name in index.topics_of((pointer,)):
                    nursery.start_soon(one, name, pointer)
    # A write that was under way when the first look was taken is in the index since before that look.
    return {pointer for pointer in wanted if all((name, pointer) in done for name in index.topics_of((pointer,)))}


async def close_pointers(
    ask: AskTopic, topics: Iterable[TopicName], pointers: Sequence[int], deadline_s: float
) -> set[TopicName]:
    """Have these topics close pointers that nobody can enlist them for any more; which of them did not in time.

    What the others have written under them is durable, and they write nothing more. Never raises.
    """
    missing = set(topics)
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(name: TopicName) -> None:
        async with limit:
            if await _insist(ask, name, ClosePointers(pointers)):
                missing.discard(name)

    with trio.move_on_at(deadline_s):
        async with trio.open_nursery() as nursery:
            for name in sorted(missing):
                nursery.start_soon(one, name)
    return missing


async def _insist(ask: AskTopic, name: TopicName, wanted: Ask[Any]) -> bool:
    """Ask until there is an answer; False: it was refused, or the daemon is leaving."""
    failures = 0
    while True:
        try:
            await ask(name, wanted)
        except (Unavailable, ShuttingDown):
            pass  # it recovers, or changes hands
        except PlainsongError as error:
            what = "rollback refused" if isinstance(wanted, RollBackPointer) else "closing refused"
            log.warning(what, extra={"topic": str(name), "asked": repr(wanted), "why": error.detail})
            return False
        else:
            return True
        await trio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
        failures += 1
