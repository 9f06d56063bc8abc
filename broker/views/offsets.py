"""Where a bounded read would end and how to cut it in parts, told without moving a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from actors.reading import walk_rows
from broker.handlers.held import wait_for_decision
from broker.handlers.views_of_readers import fresh_for, view_for
from broker.views.route import json_answer
from protocol.checks import check_poll
from protocol.codec import json_values as values
from protocol.codec.positions import parse_position
from protocol.errors import InvalidParameter
from protocol.ids import bound_at
from protocol.requests import PollRequest
from protocol.topic.asks import Look
from protocol.topic.extent import Extent

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.names import TopicName
    from protocol.topic.asks import Span

#: Parts a range can be cut into at once.
MAX_SPLITS = 1_000

_POSITION = values.nullable(parse_position)
_INT = values.nullable(values.int64, "int", "long")
_OFFSETS = {
    "start": ("start_from", _POSITION),
    "end": ("end", _POSITION),
    "maxMessages": ("limit", _INT),
    "maxBytes": ("max_bytes", _INT),
    "splits": ("splits", _INT),
    "isolation": ("isolation", values.nullable(values.text, "Isolation")),
    "transaction": ("transaction", values.nullable(values.binary)),
    "waitMs": ("wait_ms", _INT),
}


async def offsets(service: Service, request: ViewRequest) -> HttpAnswer:
    """The exclusive end, the count and the bytes of a bounded read, and bounds that cut it.

    Raises:
      TopicNotFound, InvalidParameter, TransactionsUnavailable: nothing happened.
    """
    name = request.name
    request.parameters()
    given = request.fields(_OFFSETS)
    parts = given.pop("splits", None)
    if parts is not None and not 1 <= parts <= MAX_SPLITS:
        raise InvalidParameter(f"splits is {parts}", hint=f"use 1 to {MAX_SPLITS} parts")
    end = given.pop("end", None)
    read = PollRequest(**given, end_before=bound_at(end) if isinstance(end, int) else end)
    if read.isolation not in (None, "uncommitted", "committed"):
        raise InvalidParameter("isolation is none we know", hint="use one of: uncommitted, committed")
    check_poll(read)
    span, extent, expired = await _measured(service, name, read, request.waited_ms)
    return json_answer(
        {
            "end": extent.end.hex(),
            "count": extent.count,
            "bytes": extent.bytes,
            "splits": [bound.hex() for bound in extent.splits(parts or 1)],
            "earliest": bound_at(span.oldest_ms).hex(),
            "expired": expired,
            "generation": span.generation,
        }
    )


async def _measured(
    service: Service, name: TopicName, read: PollRequest, waited_ms: int = 0
) -> tuple[Span, Extent, bool]:
    """An extent with messages, or an empty one when the time to wait is over or waiting is of no use.

    Last whether messages had expired between the start and all that was looked at.
    """
    since = read.since
    deadline_s = None
    if read.wait_ms:
        wait_ms = min(read.wait_ms, service.config.poll.max_wait_ms) - waited_ms
        deadline_s = trio.current_time() + wait_ms / 1000
    expired = False
    parks = read.isolation != "committed"
    await fresh_for(service, read.isolation, read.transaction)
    while True:
        # In this order, as for a poll: of what the view shows nothing stands behind the span.
        mark = service.pointers.mark
        view = view_for(service, read.isolation, read.transaction)
        span = await service.directory.ask(name, Look(since, read.end_before, deadline_s if parks else None))
        expired |= span.expired
        extent = Extent(span, read.limit, read.max_bytes, view)
        await walk_rows(service.store, extent)
        if extent.count or deadline_s is None or service.stopping or trio.current_time() >= deadline_s:
            return span, extent, expired
        if extent.held is not None:
            if read.transaction is not None:
                return span, extent, expired  # the snapshot never learns what becomes of the pointer
            await wait_for_decision(service, extent.held, mark, deadline_s)
        elif parks and span.since >= span.until:
            return span, extent, expired  # the topic had nothing for as long
        elif not parks:
            later = await service.directory.ask(name, Look(extent.end, read.end_before, deadline_s))
            if later.since >= later.until:
                return span, extent, expired
        # All there was is expired or rolled back, or held until now: go on from there.
        since = extent.end
