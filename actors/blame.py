"""Where undecided transactions have rows, and how many messages they hide: asked of the topics themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from protocol.errors import PlainsongError
from protocol.topic.pointer_asks import ListPointers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.settling import AskTopic
    from actors.whereabouts import Whereabouts
    from protocol.names import TopicName
    from protocol.transactions.manager.answers import TransactionStatus

#: How long topics may take to say it.
_PATIENCE_S = 2.0
#: Topics asked for one answer; of others it is not known what is hidden in them.
_MAX_TOPICS = 200
_AT_ONCE = 16


async def with_topics(
    statuses: Sequence[TransactionStatus], index: Whereabouts, ask: AskTopic
) -> list[TransactionStatus]:
    """The same, with topics; and with what is hidden by those in progress."""
    topics = {status.transaction_id: sorted(index.topics_of(status.pointers)) for status in statuses}
    holding = {name for each in statuses if each.state == "in_progress" for name in topics[each.transaction_id]}
    hidden = await _hidden(sorted(holding)[:_MAX_TOPICS], ask)
    return [
        replace(
            each,
            topics=tuple(topics[each.transaction_id]),
            hidden_messages=_most(each, topics[each.transaction_id], hidden) if each.state == "in_progress" else 0,
        )
        for each in statuses
    ]


def _most(
    status: TransactionStatus, topics: Iterable[TopicName], hidden: dict[TopicName, dict[int, int]]
) -> int | None:
    most = 0
    for name in topics:
        if name not in hidden:
            return None
        most = max(most, *(hidden[name].get(pointer, 0) for pointer in status.pointers))
    return most


async def _hidden(topics: Sequence[TopicName], ask: AskTopic) -> dict[TopicName, dict[int, int]]:
    """Per topic that answers in time: what each pointer hides in it."""
    found: dict[TopicName, dict[int, int]] = {}
    if not topics:
        return found
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(name: TopicName) -> None:
        async with limit:
            try:
                found[name] = {view.pointer: view.hidden for view in await ask(name, ListPointers())}
            except PlainsongError:
                return  # gone, or not to be had now: it is not known

    with trio.move_on_after(_PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for name in topics:
                nursery.start_soon(one, name)
    return found
