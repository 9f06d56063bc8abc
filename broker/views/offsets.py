"""Where a bounded read would end and how to cut it in parts, told without moving a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from broker.handlers.later import refuse_later_poll
from broker.views.route import json_answer
from protocol.checks import check_poll
from protocol.codec import json_values as values
from protocol.codec.positions import parse_position
from protocol.effects import Table
from protocol.errors import InvalidParameter
from protocol.ids import bound_at
from protocol.requests import PollRequest
from protocol.topic.asks import Look
from protocol.topic.extent import Extent
from protocol.topic.paging import key_range

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
    refuse_later_poll(read)
    span, extent = await _measured(service, name, read)
    return json_answer(
        {
            "end": extent.end.hex(),
            "count": extent.count,
            "bytes": extent.bytes,
            "splits": [bound.hex() for bound in extent.splits(parts or 1)],
            "earliest": bound_at(span.oldest_ms).hex(),
            "generation": span.generation,
        }
    )


async def _measured(service: Service, name: TopicName, read: PollRequest) -> tuple[Span, Extent]:
    """An extent with messages, or an empty one when the time to wait is over."""
    since = read.since
    deadline_s = None
    if read.wait_ms:
        deadline_s = trio.current_time() + min(read.wait_ms, service.config.poll.max_wait_ms) / 1000
    while True:
        span = await service.directory.ask(name, Look(since, read.end_before, deadline_s))
        extent = Extent(span, read.limit, read.max_bytes)
        if span.start < span.until:
            start, stop = key_range(span)
            await service.store.scan(Table.MESSAGE, start, stop, extent.feed_rows)
        nothing_to_wait_for = deadline_s is None or span.since >= span.until or trio.current_time() >= deadline_s
        if extent.count or nothing_to_wait_for:
            return span, extent
        # All there was has expired: wait for what comes after it.
        since = span.until
