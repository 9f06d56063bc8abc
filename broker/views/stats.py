"""Numbers of one topic: how much, how old, how fast, and how far behind a reader is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from broker.handlers.views_of_readers import fresh_for, view_for
from broker.views.counting import count_for_reader, count_from, expired_from, newest_from
from broker.views.producers import bound
from broker.views.route import json_answer
from protocol.errors import TransactionsUnavailable
from protocol.ids import FIRST_BOUND, after, parse_id, unpack_position
from protocol.page import items_in
from protocol.topic.asks import Describe, Stats
from protocol.topic.pointer_asks import ListPointers
from protocol.topic.producers.asks import ListProducers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.names import TopicName
    from protocol.topic.asks import Span, TopicStats
    from protocol.topic.pointer_asks import PointerView


async def stats(service: Service, request: ViewRequest) -> HttpAnswer:
    """What the topic holds now; with ``reader=<id>`` also what lies before one who read up to there.

    Raises:
      TopicNotFound, InvalidMessageId, StoreError: nothing happens by looking.
    """
    name = request.name
    parameters = request.parameters("reader")
    reader = parse_id(parameters["reader"]) if "reader" in parameters else None
    found = await service.directory.ask(name, Stats())
    span, now_s = found.span, trio.current_time()
    count = await count_from(service.store, found, FIRST_BOUND)
    undecided = await service.directory.ask(name, ListPointers())
    producers = await service.directory.ask(name, ListProducers(limit=1))
    described = await service.directory.ask(name, Describe())
    oldest_id, newest_id = await _oldest(service, name, span), await newest_from(service.store, span)
    numbers: dict[str, Any] = {
        "messages": count.messages,
        "bytes": count.bytes,
        "estimated": count.estimated,
        "oldestId": None if oldest_id is None else oldest_id.hex(),
        "newestId": None if newest_id is None else newest_id.hex(),
        "end": span.until.hex(),
        "oldestAgeMs": None if oldest_id is None else max(0, span.now_ms - unpack_position(oldest_id[:10])[0]),
        "publishPerSecond": round(service.rates.publishing.per_second(name, now_s), 3),
        "pollPerSecond": round(service.rates.polling.per_second(name, now_s), 3),
        "openTransactions": sum(not each.rolled_back for each in undecided),
        "producers": producers.total,
        "enabledFrom": bound(producers.enabled_from),
        "owner": None if service.cluster is None else service.cluster.ownership.me.address,
        "parkedPolls": _parked(service, name),
        "generation": span.generation,
        "createdMs": described.metadata.created_ms,
    }
    if reader is not None:
        numbers["reader"] = await _reader(service, found, after(reader), undecided)
    return json_answer(numbers)


async def _oldest(service: Service, name: TopicName, span: Span) -> bytes | None:
    page = await service.read(name, span, limit=1, max_bytes=1)
    return next((message_id for part in page.parts for message_id, _ in items_in(part)), None)


async def _reader(
    service: Service, found: TopicStats, since: bytes, undecided: Sequence[PointerView]
) -> dict[str, Any]:
    """What is before a committed reader; without a transaction service, before one who reads everything."""
    try:
        await fresh_for(service, "committed")
        view = view_for(service, "committed", None)
    except TransactionsUnavailable:
        view = None
    if view is None:
        count = await count_from(service.store, found, since)
    else:
        count = await count_for_reader(service.store, found, since, view, undecided)
    expired, more = await expired_from(service.store, found.span, since, view)
    return {
        "visible": count.messages,
        "hidden": count.hidden,
        "expiredUnread": expired + count.expired,
        "estimated": count.estimated or more,
    }


def _parked(service: Service, name: TopicName) -> int:
    core = service.directory.entry(name).actor.core
    return 0 if core is None else len(core.parking)
