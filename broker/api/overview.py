"""All topics at a glance, sorted and paged; and the last hour of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import trio

from broker.api.route import json_answer, off_loop
from broker.http.messages import one_of, whole_number
from broker.metrics import MINUTES, WINDOW_S
from plainsong.protocol.codec import JSON
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.names import TopicName, namespace_name
from plainsong.protocol.topic.asks import Describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.directory import Directory
    from actors.observe import Clock
    from broker.catalogue import Catalogue, Figures
    from broker.http.messages import Answer, Request
    from broker.metrics import Rates

DEFAULT_LIMIT = 100
MAX_LIMIT = 500
#: What sorting one topic is worth, in bytes of JSON: 10 000 are sorted off the event loop.
_ROW_BYTES = 64
Column: TypeAlias = Literal[
    "name", "messages", "bytes", "oldestAgeMs", "publishPerSecond", "pollPerSecond", "hiddenMessages"
]
_KEYS: dict[Column, Callable[[Row], float]] = {
    "name": lambda row: 0,
    "messages": lambda row: row[1].messages,
    "bytes": lambda row: row[1].bytes,
    # By the time itself, so that a place in the list stays where it is while time goes on; none is the youngest.
    "oldestAgeMs": lambda row: -row[1].oldest_ms if row[1].oldest_ms else float("-inf"),
    "publishPerSecond": lambda row: round(row[1].publish_per_s, 3),
    "pollPerSecond": lambda row: round(row[1].poll_per_s, 3),
    "hiddenMessages": lambda row: row[1].hidden_messages,
}
#: A topic, and what is known of it.
Row: TypeAlias = "tuple[TopicName, Figures]"
#: Which topics a request may see.
Sees: TypeAlias = "Callable[[Request, TopicName], bool]"


def sees_all(request: Request, name: TopicName) -> bool:
    """Every topic."""
    return True


@dataclass(frozen=True, slots=True)
class Overview:
    """The routes that show many topics, and what they did lately."""

    catalogue: Catalogue
    directory: Directory
    rates: Rates
    clock: Clock
    sees: Sees = sees_all

    async def topics(self, request: Request) -> Answer:
        """A page of all topics, in the order of a column. Raises InvalidParameter, InvalidName, StoreError."""
        parameters = request.parameters("q", "namespace", "sort", "order", "limit", "after")
        limit = whole_number(parameters, "limit")
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
        column = cast("Column", one_of(parameters, "sort", list(_KEYS), "name"))
        descending = one_of(parameters, "order", ("asc", "desc"), "asc") == "desc"
        after = _cursor(parameters["after"]) if "after" in parameters else None
        namespace = namespace_name(parameters["namespace"]) if "namespace" in parameters else None
        text = parameters.get("q", "").lower()
        rows = [
            (name, figures)
            for name, figures in (await self.catalogue.figures()).items()
            if (namespace is None or name.namespace == namespace)
            and (not text or text in f"{name}".lower())
            and self.sees(request, name)
        ]
        page = partial(_page, rows, column, after, limit or DEFAULT_LIMIT, descending=descending)
        chosen, following = await off_loop(len(rows) * _ROW_BYTES, JSON, page)
        now_ms = self.clock.now_ms()
        shown = [figures.shown(name, self.catalogue.owner(name), now_ms) for name, figures in chosen]
        return json_answer({"topics": shown, "total": len(rows), "next": following})

    async def history(self, request: Request) -> Answer:
        """Messages published and read in each of the last sixty minutes, as this owner counted them. Raises TopicNotFound."""
        name = request.name
        request.parameters()
        await self.directory.ask(name, Describe())
        now_s = trio.current_time()
        step_ms = round(WINDOW_S * 1000)
        begun_ms = self.clock.now_ms() - round(now_s % WINDOW_S * 1000)
        published, polled = self.rates.publishing.history(name, now_s), self.rates.polling.history(name, now_s)
        return json_answer(
            {
                "stepMs": step_ms,
                "fromMs": begun_ms - (MINUTES - 1) * step_ms,
                "published": [each.messages for each in published],
                "polled": [each.messages for each in polled],
                "bytes": [each.bytes for each in published],
            }
        )


def _page(
    rows: list[Row], column: Column, after: tuple[float, str] | None, limit: int, *, descending: bool
) -> tuple[Sequence[Row], str | None]:
    """The rows behind a place in the order, and the place behind them. Equal values are in the order of their names."""
    key = _KEYS[column]
    by_name = descending and column == "name"
    sign = -1 if descending else 1
    order: list[tuple[float, str, Row]] = [(sign * key(row), str(row[0]), row) for row in rows]
    order.sort(key=lambda each: each[:2])
    if by_name:
        order.reverse()
    if after is not None:
        value, name = sign * after[0], after[1]
        if by_name:
            order = [each for each in order if each[1] < name]
        else:
            order = [each for each in order if (each[0], each[1]) > (value, name)]
    chosen = order[:limit]
    if len(order) <= limit:
        return [row for _, _, row in chosen], None
    last = chosen[-1]
    return [row for _, _, row in chosen], f"{sign * last[0]!r}~{last[1]}"


def _cursor(text: str) -> tuple[float, str]:
    """The value and the name at which a page ended. Raises InvalidParameter."""
    value, mark, name = text.partition("~")
    try:
        if not mark:
            raise ValueError(text)
        return float(value), name
    except ValueError:
        raise InvalidParameter(f"after is {text[:80]!r}", hint="send the next of the page before") from None
