"""The service at a glance: all topics, sorted and paged; what needs attention; the last hour of one topic; and events.

retry: 2000                  first, then each requested kind: its state now, and again whenever it changes
event: topics                data: the rows of the topics named in the request
event: transactions          data: {"open": [...], "total"}
event: attention             data: as GET /v1/attention
event: cluster               data: as GET /v1/cluster
event: end                   data: {}; the daemon is shutting down
: ping                       after 15 s without an event

The id of an event holds a digest of each kind that its stream has sent. A client that reconnects sends it back as
``Last-Event-ID``, and gets only the kinds that have changed since.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import trio

from broker.api.answers import json_answer
from broker.api.messages.events import RETRY_MS, event
from broker.api.operations.cluster import parse_name
from broker.attention import MAX_ITEMS
from broker.catalogue import in_pieces
from broker.http.handlers import answer_of
from broker.http.messages import PING, PING_S, flag, one_of, whole_number
from broker.metrics import MINUTES, WINDOW_S
from plainsong.protocol.answers.service import EVENT_KINDS
from plainsong.protocol.answers.topics import DeletedTopics, TopicPage
from plainsong.protocol.errors import InvalidParameter, PlainsongError, nearest
from plainsong.protocol.names import TopicName, namespace_name
from plainsong.protocol.topic.asks import Describe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence

    from actors.directory import Directory
    from actors.observe import Clock
    from broker.api.messages.events import EventStreams
    from broker.attention import Attention
    from broker.catalogue import Catalogue, Figures
    from broker.finding import Finding
    from broker.http.messages import Answer, Handler, Request
    from broker.metrics import Rates
    from plainsong.protocol.answers.service import FindingRow
    from plainsong.protocol.answers.topics import DeletedTopic, History, TopicColumn

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Entries of ``found_lately``: an answer for each name that asks, kept for about a second.
MAX_LATELY = 1_000
#: Interval at which streams check for changes.
STEP_S = 1.0
#: A stream of few topics, such as a page that follows one, checks them more often: a check costs microseconds.
FEW_TOPICS_STEP_S = 0.25
FEW_TOPICS = 10
#: Finding what needs attention reads each open topic: its interval grows with their number, up to ``MAX_STEP_S``.
STEP_S_EACH = 0.0002
MAX_STEP_S = 10.0
MAX_NAMED = 200
#: Maximum number of open transactions to count, and to list.
MAX_OPEN = 1_000
MAX_SHOWN = 100
#: The client id of a transaction that was begun without one.
NO_CLIENT = "unknown"
_OPEN_QUERY = f"state=in_progress&longs=string&limit={MAX_OPEN}"
DEFAULT_LIMIT = 100
MAX_LIMIT = 500
_KEYS: dict[TopicColumn, Callable[[Row], float]] = {
    "name": lambda row: 0,
    "messages": lambda row: row[1].messages,
    "bytes": lambda row: row[1].bytes,
    # By publish time, not age, so that a cursor stays valid as time passes. An empty topic counts as the youngest.
    "oldestAgeMs": lambda row: -row[1].oldest_ms if row[1].oldest_ms else float("-inf"),
    "publishPerSecond": lambda row: round(row[1].publish_per_s, 3),
    "pollPerSecond": lambda row: round(row[1].poll_per_s, 3),
    "hiddenMessages": lambda row: row[1].hidden_messages,
}
#: A topic and its figures.
Row: TypeAlias = "tuple[TopicName, Figures]"
#: True if a request may see a topic.
Sees: TypeAlias = "Callable[[Request, TopicName], bool]"


#: True if a request may see the service as a whole.
SeesService: TypeAlias = "Callable[[Request], bool]"


def sees_service(request: Request) -> bool:
    """Allow everything."""
    return True


def sees_all(request: Request, name: TopicName) -> bool:
    """Allow every topic."""
    return True


@dataclass(frozen=True, slots=True)
class Overview:
    """The routes that show many topics, and their recent activity."""

    catalogue: Catalogue
    attention: Attention
    directory: Directory
    rates: Rates
    clock: Clock
    streams: EventStreams
    stopping: trio.Event
    handlers: Mapping[str, Handler]
    """The handlers of routes by name; each request is answered at its owner."""
    delete_grace_ms: int
    """Time within which a deleted topic can be restored."""
    found_lately: dict[str, tuple[float, Any]] = field(default_factory=dict)
    """Recent results and their times, shared by all streams."""
    sees: Sees = sees_all
    sees_service: SeesService = sees_service

    async def topics(self, request: Request) -> Answer:
        """Return a page of all topics, sorted by a column. Raises InvalidParameter, InvalidName, StoreError."""
        parameters = request.parameters("q", "namespace", "sort", "order", "limit", "after", "deleted")
        limit = whole_number(parameters, "limit")
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
        column = cast("TopicColumn", one_of(parameters, "sort", list(_KEYS), "name"))
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
        return json_answer(TopicPage(topics=shown, total=page.total, next=following))

    async def _deleted(self, request: Request, namespace: str | None, text: str, limit: int) -> Answer:
        """Return deleted topics, latest deletion first."""
        gone = [
            (name, metadata)
            for name, metadata in await self.catalogue.deleted(namespace, self.delete_grace_ms)
            if (not text or text in f"{name}".lower()) and self.sees(request, name)
        ]
        gone.sort(key=lambda each: -(each[1].deleted_ms or 0))
        shown: list[DeletedTopic] = [
            {"namespace": name.namespace, **await self.catalogue.shown_deleted(name, metadata, self.delete_grace_ms)}
            for name, metadata in gone[:limit]
        ]
        return json_answer(DeletedTopics(topics=shown, total=len(gone), next=None))

    async def needs(self, request: Request) -> Answer:
        """Return what needs attention, worst first."""
        request.parameters()
        return json_answer(await self._named(request, self._visible(request, await self.attention.findings())))

    async def _named(self, request: Request, found: list[FindingRow]) -> list[FindingRow]:
        """Add the client ids of transactions that hold readers, if the request may see them."""
        held = [each for each in found if each["kind"] == "held-reader"]
        if not held or not self.sees_service(request):
            return found
        try:
            open_ = await self._ask("list_transactions", request, _OPEN_QUERY)
        except PlainsongError:
            return found  # the service is unavailable, or moving
        clients = {str(each[key]): each["clientId"] for each in open_ for key in ("id", "writePointer")}
        for each in held:
            start, pointer, rest = each["text"].split(" ", 2)  # "Transaction 17 is …", see broker.attention
            client = clients.get(pointer)
            if client and client != NO_CLIENT:
                each["text"] = f"{start} {pointer} of {client} {rest}"
        return found

    def _visible(self, request: Request, findings: Iterable[Finding]) -> list[FindingRow]:
        def may_see(finding: Finding) -> bool:
            if not finding.topic:
                return self.sees_service(request)
            return self.sees(request, TopicName(*finding.topic.split(":")))

        return [each.shown() for each in findings if may_see(each)][:MAX_ITEMS]

    async def history(self, request: Request) -> Answer:
        """Return the messages of each minute of the last hour, as counted here. Raises TopicNotFound."""
        name = request.name
        request.parameters()
        # A list of topics shows the last hour of each: this must not open closed topics.
        if self.directory.peek(name) is not None or not await self.catalogue.has(name):
            await self.directory.ask(name, Describe())
        now_s = trio.current_time()
        step_ms = round(WINDOW_S * 1000)
        begun_ms = self.clock.now_ms() - round(now_s % WINDOW_S * 1000)
        published, polled = self.rates.publishing.history(name, now_s), self.rates.polling.history(name, now_s)
        found: History = {
            "stepMs": step_ms,
            "fromMs": begun_ms - (MINUTES - 1) * step_ms,
            "published": [each.messages for each in published],
            "polled": [each.messages for each in polled],
            "bytes": [each.bytes for each in published],
        }
        return json_answer(found)

    # --- events -------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Answer:
        """Stream the state and its changes as server-sent events. Raises InvalidParameter, InvalidName, Overloaded."""
        parameters = request.parameters("topics", "kinds")
        kinds = [each for each in parameters.get("kinds", ",".join(EVENT_KINDS)).split(",") if each]
        for kind in kinds:
            if kind not in EVENT_KINDS:
                raise InvalidParameter(f"unknown kind {kind[:80]!r}", hint=nearest(kind, EVENT_KINDS))
        named = [each for each in parameters.get("topics", "").split(",") if each]
        if len(named) > MAX_NAMED:
            raise InvalidParameter(f"topics has {len(named)} names", hint=f"at most {MAX_NAMED}")
        topics = [parse_name(each) for each in named]
        seen = _seen_before(request.headers.get("last-event-id", ""))
        return self.streams.answer(self._changes(request, kinds, topics, seen), request.room)

    async def _changes(
        self, request: Request, kinds: Sequence[str], topics: Sequence[TopicName], digests: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the current state and then changes, except kinds whose digest is that of the client's last event."""
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
        """Return the current state of a kind; None if it is unavailable."""
        try:
            if kind == "topics":
                figures = await self.catalogue.figures_of(topics)
                seen = [(name, figures[name]) for name in topics if name in figures and self.sees(request, name)]
                now_ms = self.clock.now_ms()
                data = [each.shown(name, self.catalogue.owner(name), now_ms) for name, each in seen]
                return _Seen(data, seen)  # compare the figures: ages in the data grow all the time
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
        """Return a recent result of another stream, or call ``find``."""
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
    """The current state of a kind."""

    data: Any
    told: object
    """Compared to detect changes."""


def _digest(told: object) -> str:
    """Return a digest that depends on the values alone: the same at any instance, and after a restart."""
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _event_id(digests: Mapping[str, str]) -> str:
    return ",".join(f"{kind}={digest}" for kind, digest in digests.items())


def _seen_before(event_id: str) -> dict[str, str]:
    """Parse an event id into digests by kind. Returns nothing for an invalid one, so that everything is sent."""
    parts = (part.partition("=") for part in event_id.split(",", len(EVENT_KINDS)))
    return {kind: digest for kind, _, digest in parts if kind in EVENT_KINDS}


class _Page:
    """The rows after a cursor, sorted by a column, from rows that arrive in pieces. Ties are sorted by name.

    Adding a piece takes time for its own size only, so that many topics do not block other requests.
    """

    def __init__(self, column: TopicColumn, after: tuple[float, str] | None, limit: int, *, descending: bool) -> None:
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
        """Add rows."""
        self.total += len(rows)
        placed = [((self._sign * self._key(row), str(row[0])), row) for row in rows]
        self._first += [each for each in placed if self._is_after(each[0])]
        if len(self._first) > self._limit:
            self._first = self._choose(self._limit + 1, self._first, key=_place)

    def rows(self) -> tuple[Sequence[Row], str | None]:
        """Return the page, and the cursor of the next one; None if there is none."""
        order = self._choose(self._limit + 1, self._first, key=_place)
        chosen = [row for _, row in order[: self._limit]]
        if len(order) <= self._limit:
            return chosen, None
        value, name = order[self._limit - 1][0]
        return chosen, f"{self._sign * value!r}~{name}"


def _place(placed: tuple[tuple[float, str], Row]) -> tuple[float, str]:
    return placed[0]


def _cursor(text: str) -> tuple[float, str]:
    """Parse a cursor into the value and the name of a page's last row. Raises InvalidParameter."""
    value, mark, name = text.partition("~")
    try:
        if not mark:
            raise ValueError(text)
        return float(value), name
    except ValueError:
        raise InvalidParameter(f"after is {text[:80]!r}", hint="send the `next` of the previous page") from None
