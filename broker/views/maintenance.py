"""What a job that cleans a topic from outside may rely on: asked once, durable before it is answered."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from broker.handlers.transactions import longs
from broker.views.producers import bound
from broker.views.route import json_answer
from protocol.errors import TopicNotFound, TransactionsUnavailable
from protocol.ids import unpack_position
from protocol.topic.asks import Describe, PlanCleaning
from protocol.topic.pointer_asks import ListPointers
from protocol.topic.producers.asks import ListProducers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.topic.pointer_asks import PointerView


async def maintain(service: Service, request: ViewRequest) -> HttpAnswer:
    """From when on messages have expired, whose are invalid, and up to where producers' stamps are noted.

    The topic writes its high-water mark and its snapshot of producers first, so all of it stays true.

    Raises:
      TopicNotFound, StoreError: nothing may be removed.
    """
    name = request.name
    as_number = longs(request.parameters("longs"))
    with suppress(TransactionsUnavailable):  # the answer says that nobody can say
        await service.transactions.fresh()
    described = await service.directory.ask(name, Describe())
    plan = await service.directory.ask(name, PlanCleaning(service.config.retention.delete_grace_s * 1000))
    pointers = await service.directory.ask(name, ListPointers())
    producers = await service.directory.ask(name, ListProducers(limit=1))
    if plan.expired is None:
        raise TopicNotFound(f"topic {name} was deleted meanwhile")
    expired_before_ms, _ = unpack_position(plan.expired[1][len(plan.prefix) :])
    invalid = _invalid(service, pointers)
    return json_answer(
        {
            "generation": described.metadata.generation,
            "expiredBefore": expired_before_ms,
            "invalid": None if invalid is None else [as_number(pointer) for pointer in invalid],
            "snapshotPosition": bound(producers.snapshot.position),
        }
    )


def _invalid(service: Service, pointers: Sequence[PointerView]) -> list[int] | None:
    """Of the pointers that the topic has messages of, those of invalid transactions; None: nobody can say."""
    try:
        return sorted(each.pointer for each in pointers if service.transactions.standing(each.pointer) == "invalid")
    except TransactionsUnavailable:
        return None
