"""The service at a glance: all topics, sorted and paged; what needs attention; the last hour of one topic; and events.

retry: 2000                  first, and then of each kind that was asked for what there is, and what changes
event: topics                data: the rows of the topics that were named
event: transactions          data: {"open": [...], "total"}
event: attention             data: what GET /v1/attention answers
event: cluster               data: what GET /v1/cluster answers
event: end                   data: {}; the daemon leaves
: ping                       after 15 s without anything else

The id of an event says what of each kind its stream has told. A client that was cut off sends it back as
``Last-Event-ID``, and is told only what is different since.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import trio

from broker.api.cluster import parse_name
from broker.api.events import RETRY_MS, event
from broker.api.route import json_answer
from broker.attention import MAX_ITEMS
from broker.catalogue import in_pieces
from broker.http.handlers import answer_of
from broker.http.messages import PING, PING_S, flag, one_of, whole_number
from broker.metrics import MINUTES, WINDOW_S
from plainsong.protocol.errors import InvalidParameter, PlainsongError, nearest
from plainsong.protocol.names import TopicName, namespace_name
from plainsong.protocol.topic.asks import Describe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence

    from actors.directory import Directory
    from actors.observe import Clock
    from broker.api.events import EventStreams
    from broker.attention import Attention
    from broker.catalogue import Catalogue, Figures
    from broker.finding import Finding
    from broker.http.messages import Answer, Handler, Request
    from broker.metrics import Rates

log = logging.getLogger(__name__)
T = TypeVar("T")
#: What is kept for a second, of each name that asks.
MAX_LATELY = 1_000
#: Of events: how often is looked, and what may be asked for.
STEP_S = 1.0
#: The same for the topics of a stream that names few of them, as a page that follows one does: a look costs microseconds.
FEW_TOPICS_STEP_S = 0.25
FEW_TOPICS = 10
#: What needs attention is found by a look at each open topic: less often, the more there are; and the longest.
STEP_S_EACH = 0.0002
MAX_STEP_S = 10.0
KINDS = ("topics", "transactions", "attention", "cluster")
MAX_NAMED = 200
#: Open transactions that are counted, and shown.
MAX_OPEN = 1_000
MAX_SHOWN = 100
#: What a transaction has that was begun without a client's name.
NO_CLIENT = "unknown"
_OPEN_QUERY = f"state=in_progress&longs=string&limit={MAX_OPEN}"
DEFAULT_LIMIT = 100
MAX_LIMIT = 500
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


#: Whether a request may see what is not of a topic.
SeesService: TypeAlias = "Callable[[Request], bool]"


def sees_service(request: Request) -> bool:
    """Everything."""
    return True


def sees_all(request: Request, name: TopicName) -> bool:
    """Every topic."""
    return True


@dataclass(frozen=True, slots=True)
class Overview:
    """The routes that show many topics, and what they did lately."""

    catalogue: Catalogue
    attention: Attention
    directory: Directory
    rates: Rates
    clock: Clock
    streams: EventStreams
    stopping: trio.Event
    handlers: Mapping[str, Handler]
    """Those of the routes, by name, each answered at its owner."""
    delete_grace_ms: int
    """How long deleted topics can come back."""
    found_lately: dict[str, tuple[float, Any]] = field(default_factory=dict)
    """What streams are told, and when that was found: all of them are told the same."""
    sees: Sees = sees_all
    sees_service: SeesService = sees_service

    async def topics(self, request: Request) -> Answer:
        """A page of all topics, in the order of a column. Raises InvalidParameter, InvalidName, StoreError."""
        parameters = request.parameters("q", "namespace", "sort", "order", "limit", "after", "deleted")
        limit = whole_number(parameters, "limit")
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
        column = cast("Column", one_of(parameters, "sort", list(_KEYS), "name"))
        descending = one_of(parameters, "order", ("asc", "desc"), "asc") == "desc"
        after = _cursor(parameters["after"]) if "after" in parameters else None
        namespace = namespace_name(parameters["namespace"]) if "namespace" in parameters else None
        text = parameters.get("q", "").lower()
        if flag(parameters, "deleted"):
            return await self._deleted(request, namespace, text, limit or DEFAULT_LIMIT)
        page = _Page(column, after, limit or DEFAULT_LIMIT, descending=descending)
        async for piece in in_pieces((await self.catalogue.figures()).items()):
            page.add(
                [
                    row
                    for row in piece
                    if (namespace is None or row[0].namespace == namespace)
                    and (not text or text in f"{row[0]}".lower())
                    and self.sees(request, row[0])
                ]
            )
        chosen, following = page.rows()
        now_ms = self.clock.now_ms()
        shown = [figures.shown(name, self.catalogue.owner(name), now_ms) for name, figures in chosen]
        return json_answer({"topics": shown, "total": page.total, "next": following})

    async def _deleted(self, request: Request, namespace: str | None, text: str, limit: int) -> Answer:
        """Deleted topics, those that were deleted last first."""
        gone = [
            (name, metadata)
            for name, metadata in await self.catalogue.deleted(namespace, self.delete_grace_ms)
            if (not text or text in f"{name}".lower()) and self.sees(request, name)
        ]
        gone.sort(key=lambda each: -(each[1].deleted_ms or 0))
        shown = [
            {"namespace": name.namespace, **await self.catalogue.shown_deleted(name, metadata, self.delete_grace_ms)}
            for name, metadata in gone[:limit]
        ]
        return json_answer({"topics": shown, "total": len(gone), "next": None})

    async def needs(self, request: Request) -> Answer:
        """What needs attention, worst first."""
        request.parameters()
        return json_answer(await self._named(request, self._visible(request, await self.attention.findings())))

    async def _named(self, request: Request, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the clients whose transactions hold readers, as far as the request may see them."""
        held = [each for each in found if each["kind"] == "held-reader"]
        if not held or not self.sees_service(request):
            return found
        try:
            open_ = await self._ask("list_transactions", request, _OPEN_QUERY)
        except PlainsongError:
            return found  # the service is away, or moving
        clients = {str(each[key]): each["clientId"] for each in open_ for key in ("id", "writePointer")}
        for each in held:
            start, pointer, rest = each["text"].split(" ", 2)  # "Transaction 17 is …", see broker.attention
            client = clients.get(pointer)
            if client and client != NO_CLIENT:
                each["text"] = f"{start} {pointer} of {client} {rest}"
        return found

    def _visible(self, request: Request, findings: Iterable[Finding]) -> list[dict[str, Any]]:
        def may_see(finding: Finding) -> bool:
            if not finding.topic:
                return self.sees_service(request)
            return self.sees(request, TopicName(*finding.topic.split(":")))

        return [each.shown() for each in findings if may_see(each)][:MAX_ITEMS]

    async def history(self, request: Request) -> Answer:
        """Messages published and read in each of the last sixty minutes, as this owner counted them. Raises TopicNotFound."""
        name = request.name
        request.parameters()
        # A list of topics is shown with the last hour of each: those that are closed stay closed.
        if self.directory.peek(name) is not None or not await self.catalogue.has(name):
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

    # --- events -------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Answer:
        """What there is, and then what changes, as server-sent events. Raises InvalidParameter, InvalidName, Overloaded."""
        parameters = request.parameters("topics", "kinds")
        kinds = [each for each in parameters.get("kinds", ",".join(KINDS)).split(",") if each]
        for kind in kinds:
            if kind not in KINDS:
                raise InvalidParameter(f"kinds has {kind[:80]!r}", hint=nearest(kind, KINDS))
        named = [each for each in parameters.get("topics", "").split(",") if each]
        if len(named) > MAX_NAMED:
            raise InvalidParameter(f"topics names {len(named)}", hint=f"at most {MAX_NAMED}")
        topics = [parse_name(each) for each in named]
        seen = _seen_before(request.headers.get("last-event-id", ""))
        return self.streams.answer(self._changes(request, kinds, topics, seen), request.room)

    async def _changes(
        self, request: Request, kinds: Sequence[str], topics: Sequence[TopicName], digests: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """What there is and what changes, but for what has the digest that it had on the stream before."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        sent: dict[str, object] = {}
        said_s = trio.current_time()
        is_short = "topics" in kinds and len(topics) <= FEW_TOPICS
        step_s = min(STEP_S, FEW_TOPICS_STEP_S) if is_short else STEP_S
        all_due_s = said_s
        while not self.stopping.is_set():
            begun_s = trio.current_time()
            are_all_due = begun_s >= all_due_s
            if are_all_due:
                all_due_s = begun_s + STEP_S
            for kind in kinds:
                if kind != "topics" and not are_all_due:
                    continue
                found = await self._look(kind, request, topics)
                if found is None or (kind in sent and sent[kind] == found.told):
                    continue
                sent[kind] = found.told
                digest = _digest(found.told)
                if digests.get(kind) != digest:
                    digests[kind] = digest
                    said_s = trio.current_time()
                    yield event(kind, found.data, _event_id(digests))
            if trio.current_time() - said_s >= PING_S:
                said_s = trio.current_time()
                yield PING
            with trio.move_on_at(min(begun_s + step_s, all_due_s)):
                await self.stopping.wait()
        yield event("end", {})

    async def _look(self, kind: str, request: Request, topics: Sequence[TopicName]) -> _Seen | None:
        """What there is of a kind now; None: it cannot be found out."""
        try:
            if kind == "topics":
                figures = await self.catalogue.figures_of(topics)
                seen = [(name, figures[name]) for name in topics if name in figures and self.sees(request, name)]
                now_ms = self.clock.now_ms()
                data = [each.shown(name, self.catalogue.owner(name), now_ms) for name, each in seen]
                return _Seen(data, seen)  # an age grows all the time, which is no change
            if kind == "attention":
                found = self._visible(request, await self._lately("attention", self.attention.findings))
                found = await self._named(request, found)
                return _Seen(found, found)
            if not self.sees_service(request):
                return None
            if kind == "transactions":
                open_ = await self._ask("list_transactions", request, _OPEN_QUERY)
                shown = {"open": open_[:MAX_SHOWN], "total": len(open_)}
                return _Seen(shown, shown)
            cluster = await self._ask("get_cluster", request, "")
            return _Seen(cluster, cluster)
        except PlainsongError as error:
            log.debug("events are not known", extra={"kind": kind}, exc_info=error)
            return None

    async def _lately(self, what: str, find: Callable[[], Awaitable[T]]) -> T:
        """What was found a moment ago for another stream, or what is found now."""
        known = self.found_lately.get(what)
        age_s = STEP_S + STEP_S_EACH * len(self.directory)
        if known is None or trio.current_time() - known[0] >= min(age_s, MAX_STEP_S):
            if len(self.found_lately) >= MAX_LATELY:
                self.found_lately.clear()
            known = self.found_lately[what] = (trio.current_time(), await find())
        found: T = known[1]
        return found

    async def _ask(self, route: str, request: Request, query: str) -> Any:
        return await self._lately(f"{route} {request.who.name}", partial(self._asked, route, request, query))

    async def _asked(self, route: str, request: Request, query: str) -> Any:
        answer = await answer_of(
            self.handlers[route], replace(request, path={}, query=query, body=b"", decoded=None, room=None)
        )
        body = answer.body if isinstance(answer.body, bytes) else b"".join([each async for each in answer.body])
        return json.loads(body)


class _Seen(NamedTuple):
    """What there is of a kind."""

    data: Any
    told: object
    """What it is compared by."""


def _digest(told: object) -> str:
    """The same for the same facts, at any instance and after a restart."""
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _event_id(digests: Mapping[str, str]) -> str:
    return ",".join(f"{kind}={digest}" for kind, digest in digests.items())


def _seen_before(event_id: str) -> dict[str, str]:
    """What an event's id says. Anything that is none says nothing, and everything is told."""
    parts = (part.partition("=") for part in event_id.split(",", len(KINDS)))
    return {kind: digest for kind, _, digest in parts if kind in KINDS}


class _Page:
    """The rows after a place in the order of a column, of rows that arrive in pieces. Equal values are in the order of names.

    A piece costs time by its own size alone, so that many topics stop no other request.
    """

    def __init__(self, column: Column, after: tuple[float, str] | None, limit: int, *, descending: bool) -> None:
        self.total = 0
        self._key = _KEYS[column]
        self._sign = -1 if descending else 1
        self._limit = limit
        by_name = descending and column == "name"
        self._choose = nlargest if by_name else nsmallest
        place = None if after is None else (self._sign * after[0], after[1])
        self._is_after: Callable[[tuple[float, str]], bool] = lambda at: (
            place is None or (at[1] < place[1] if by_name else at > place)
        )
        self._first: list[tuple[tuple[float, str], Row]] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Take in more rows."""
        self.total += len(rows)
        placed = [((self._sign * self._key(row), str(row[0])), row) for row in rows]
        self._first += [each for each in placed if self._is_after(each[0])]
        if len(self._first) > self._limit:
            self._first = self._choose(self._limit + 1, self._first, key=_place)

    def rows(self) -> tuple[Sequence[Row], str | None]:
        """The page, and where the next one begins; None: there is none."""
        order = self._choose(self._limit + 1, self._first, key=_place)
        chosen = [row for _, row in order[: self._limit]]
        if len(order) <= self._limit:
            return chosen, None
        value, name = order[self._limit - 1][0]
        return chosen, f"{self._sign * value!r}~{name}"


def _place(placed: tuple[tuple[float, str], Row]) -> tuple[float, str]:
    return placed[0]


def _cursor(text: str) -> tuple[float, str]:
    """The value and the name at which a page ended. Raises InvalidParameter."""
    value, mark, name = text.partition("~")
    try:
        if not mark:
            raise ValueError(text)
        return float(value), name
    except ValueError:
        raise InvalidParameter(f"after is {text[:80]!r}", hint="send the next of the page before") from None
