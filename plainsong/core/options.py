"""The options of publishers and readers, checked: what both clients take, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core.gathering import Bounds, Mode, Overflow
from plainsong.core.plan import Plan
from plainsong.protocol.errors import InvalidParameter
from plainsong.serializers import SerializerLike, serializer_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.protocol.requests import Isolation
    from plainsong.starts import Start

DEFAULT_BATCH_MESSAGES = 10_000
DEFAULT_BATCH_BYTES = 1 << 20
DEFAULT_PENDING_BYTES = 32 << 20
RELIABLE_TIMEOUT_S = 120.0
BEST_EFFORT_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 5.0
DEFAULT_PAGE_MESSAGES = 10_000


def publisher_bounds(
    *,
    linger_ms: float,
    max_batch_messages: int,
    max_batch_bytes: int,
    max_pending_bytes: int,
    delivery_timeout_s: float | None,
    mode: Mode,
    overflow: Overflow,
    retry_unknown: bool,
    connections: int,
) -> Bounds:
    """What a publisher gathers and holds. Raises InvalidParameter."""
    numbers = {
        "max_batch_messages": max_batch_messages,
        "max_batch_bytes": max_batch_bytes,
        "max_pending_bytes": max_pending_bytes,
        "connections": connections,
        "delivery_timeout_s": 1 if delivery_timeout_s is None else delivery_timeout_s,
    }
    for name, number in numbers.items():
        if not number > 0:
            raise InvalidParameter(f"{name} is {number}", hint="use a number above 0")
    if linger_ms < 0:
        raise InvalidParameter(f"linger_ms is {linger_ms}", hint="0 sends at once what there is")
    if mode not in ("reliable", "best_effort"):
        raise InvalidParameter(f"mode is {mode!r}", hint="use reliable or best_effort")
    if overflow not in ("wait", "raise", "drop"):
        raise InvalidParameter(f"overflow is {overflow!r}", hint="use wait, raise or drop")
    if mode == "best_effort" and overflow != "drop":
        raise InvalidParameter("best effort never waits and never raises", hint='leave overflow out, or say "drop"')
    if delivery_timeout_s is None:
        delivery_timeout_s = RELIABLE_TIMEOUT_S if mode == "reliable" else BEST_EFFORT_TIMEOUT_S
    return Bounds(
        linger_ms / 1000,
        max_batch_messages,
        max_batch_bytes,
        max_pending_bytes,
        delivery_timeout_s,
        mode,
        retry_unknown,
    )


def read_plan(
    topics: str | Iterable[str],
    start: Start,
    *,
    until: Start,
    follow: bool,
    limit: int | None,
    serializer: SerializerLike,
    page_messages: int,
    save_every: int,
    save_interval_s: float,
    isolation: Isolation | None = None,
) -> Plan:
    """What a reader reads. Raises InvalidParameter."""
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    using = serializer_for(serializer)
    return Plan(names, start, until, follow, limit, using, page_messages, save_every, save_interval_s, isolation)
