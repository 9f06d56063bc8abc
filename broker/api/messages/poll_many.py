"""One poll of many topics: reads all of them, waits for any of them, and shares the page limits between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count as count_up
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from broker.api.answers import in_steps
from broker.api.messages.poll import (
    EVERY_POINTER,
    CommittedReader,
    apply_query,
    bytes_within,
    hold_gathered,
    page_bytes,
)
from broker.api.messages.set_aside import rows_of
from broker.http.messages import Answer, answer_for
from broker.security.guard import forbidden
from plainsong.protocol.codec import DEFAULT_OPTIONS, JSON, PageOptions, gathered
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.json_values import parse_position
from plainsong.protocol.errors import InvalidParameter, NoOwner, PlainsongError, RequestTooLarge
from plainsong.protocol.ids import after, before
from plainsong.protocol.names import TopicName, topic_name
from plainsong.protocol.page import Page
from plainsong.protocol.requests import PollRequest, check_poll
from plainsong.protocol.topic.asks import Look
from plainsong.protocol.transactions.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from actors.directory import Directory
    from actors.pages import Pages
    from broker.api.messages.holding import Holds
    from broker.authority import Transactions
    from broker.config.sections import PollConfig
    from broker.http.messages import Request
    from broker.metrics import Rates
    from plainsong.protocol.page import Held
    from plainsong.protocol.topic.asks import Span

#: Topics of one request, as docs/http.md promises.
MAX_TOPICS = 1_000
#: Room for ``MAX_TOPICS`` names of full length, each with a position.
MAX_BODY_BYTES = 1 << 20


def _object(value: Any, name: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else values.refuse(name, value, "an object")


_INT = values.nullable(values.int32, "int")
_TOPIC = {
    "startFrom": ("start_from", values.nullable(parse_position)),
    "inclusive": ("inclusive", values.boolean),
    "limit": ("limit", _INT),
}
_REQUEST = {
    "topics": ("topics", _object),
    "waitMs": ("wait_ms", _INT),
    "isolation": ("isolation", values.nullable(values.text, "Isolation")),
    "limit": ("limit", _INT),
    "maxBytes": ("max_bytes", _INT),
}
#: Rotates the topic that is read first, so that none is always last.
_turns = count_up()


@dataclass(slots=True, eq=False)
class _Wanted:
    """One topic of the request, and its result so far."""

    name: TopicName
    since: bytes
    room: int | None
    """Messages it may still return; None: limited only by the request."""
    span: Span | None = None
    error: PlainsongError | None = None
    page: Page = field(default_factory=Page)
    asked_from: bytes = field(init=False)
    """Start of the request; ``since`` advances as pages are read."""

    def __post_init__(self) -> None:
        self.asked_from = self.since

    @property
    def unread(self) -> Page:
        """The result if nothing more is read."""
        if self.span is None or self.span.start >= self.span.until:
            return Page(last_id=None if self.span is None else self.span.resume)
        return Page(last_id=before(self.since), end="more")


class _Isolated(NamedTuple):
    """The isolation that all topics of a request are read with."""

    reader: CommittedReader | None
    """None: everything is read."""
    view: View | None

    @property
    def by_itself(self) -> bool:
        """True if each topic decides by its own undecided pointers, because the transaction service is unavailable."""
        return self.reader is not None and self.view is None

    def view_of(self, span: Span) -> View | None:
        return View.without_service(span.undecided) if self.by_itself else self.view

    def admit(self, page: Page) -> Page:
        """See ``CommittedReader.admit``."""
        return page if self.reader is None else self.reader.admit(page)


@dataclass(frozen=True, slots=True)
class PollingMany:
    """The route of a poll of many topics."""

    topics: LocalTopics
    transactions: Transactions
    holds: Holds
    rates: Rates
    bounds: PollConfig
    stopping: trio.Event

    async def poll(self, request: Request, access: TopicsAccess | None = None) -> Answer:
        """Return the messages of each topic, or its error.

        Args:
          access: reads the topics; None: all of them are owned by this instance.
        Raises:
          InvalidParameter, InvalidName, RequestTooLarge, TransactionsUnavailable: a poll changes nothing.
          NoOwner: without ``access``, if this instance no longer owns one of the topics.
        """
        namespace = request.namespace
        given = request.fields(_REQUEST)
        wanted = _wanted(namespace, given.pop("topics", {}))
        body = PollRequest(**given)
        if body.isolation not in (None, "uncommitted", "committed"):
            raise InvalidParameter(
                f"isolation is {str(body.isolation)[:80]!r}", hint="use one of: uncommitted, committed"
            )
        options = apply_query(body, request.query) or DEFAULT_OPTIONS
        if body.as_of_ms is not None:
            raise InvalidParameter("asOfMs is for a poll of one topic", hint="poll each topic as of the same moment")
        check_poll(body)
        _refuse_forbidden(wanted, request)
        await self._read_or_wait(access or self.topics, wanted, body, request)
        _refuse_forbidden(wanted, request)  # again: grants may have changed during the wait
        if access is None:
            _refuse_strangers(wanted)
        size = sum(one.page.payload_bytes for one in wanted)
        content = b"".join(await in_steps(size, gathered(_pieces(wanted, options))))
        return Answer(200, content, JSON.content_type)

    async def _read_or_wait(
        self, access: TopicsAccess, wanted: list[_Wanted], body: PollRequest, request: Request
    ) -> None:
        deadline_s = -1.0
        if body.wait_ms:
            wait_ms = min(body.wait_ms, self.bounds.max_wait_ms) - request.waited_ms
            deadline_s = trio.current_time() + wait_ms / 1000
        reader = CommittedReader(self.transactions) if body.isolation == "committed" else None
        failed: int | None = None
        while True:
            # One view for all topics, taken before their spans: all messages of its transactions lie in the spans.
            mark = self.holds.mark
            view = None if reader is None else await reader.view()
            isolated = _Isolated(reader, view)
            await _look(access, wanted, EVERY_POINTER if isolated.by_itself else 0)
            if any(one.span is not None and one.span.start < one.span.until for one in wanted):
                await self._read_in_turn(access, wanted, body, isolated, request)
            waiting = [one for one in wanted if one.error is None]
            if failed is not None and len(wanted) - len(waiting) > failed:
                return  # for example, a topic that held the reader was deleted
            failed = len(wanted) - len(waiting)
            nothing_yet = not any(one.page.count for one in wanted) and not self.stopping.is_set()
            if not (nothing_yet and waiting) or trio.current_time() >= deadline_s:
                return
            if not await self._wait_for_any(access, waiting, mark, deadline_s) or self.stopping.is_set():
                return

    async def _wait_for_any(self, access: TopicsAccess, waiting: list[_Wanted], mark: int, deadline_s: float) -> bool:
        """Wait until one of the topics may have more; False after the deadline, or when a topic fails.

        A topic that holds its reader has more once the transaction is decided.
        """
        new = False

        async def wait_for_decision_in(one: _Wanted, held: Held) -> None:
            nonlocal new
            try:
                await self.holds.wait(one.name, held, one.page.held_until_ms, mark, deadline_s)
                new = True
            except PlainsongError as error:
                one.error = error
            nursery.cancel_scope.cancel()

        async def wait_for_messages(free: list[_Wanted]) -> None:
            nonlocal new
            found_of = await access.wait([Since(one.name, one.since) for one in free], deadline_s)
            for one, found in zip(free, found_of, strict=True):
                if isinstance(found, PlainsongError):
                    one.error = found
                elif found is not None:
                    new |= found.since < found.until
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for one in waiting:
                if one.page.held is not None:
                    nursery.start_soon(wait_for_decision_in, one, one.page.held)
            free = [one for one in waiting if one.page.held is None]
            if free:
                nursery.start_soon(wait_for_messages, free)
        return new

    async def _read_in_turn(
        self,
        access: TopicsAccess,
        wanted: list[_Wanted],
        body: PollRequest,
        isolated: _Isolated,
        request: Request,
    ) -> None:
        """Read pages round by round; each topic gets an equal share of the remaining limits, until they are used up."""
        bounds = self.bounds
        room = bounds.max_messages if body.limit is None else min(body.limit, bounds.max_messages)
        bytes_room = page_bytes(bounds.max_bytes, body.max_bytes, request.page_bytes)
        bytes_room = await bytes_within(request.room, bytes_room)
        await self._share_out(access, wanted, isolated, room, bytes_room)
        hold_gathered(request.room, sum(one.page.payload_bytes for one in wanted))

    async def _share_out(
        self, access: TopicsAccess, wanted: list[_Wanted], isolated: _Isolated, room: int, bytes_room: int
    ) -> None:
        taken = 0
        turn = next(_turns) % len(wanted)
        active = [one for one in wanted[turn:] + wanted[:turn] if one.error is None]
        while active:
            share, bytes_share = max(1, room // len(active)), max(1, bytes_room // len(active))
            still = []
            for one in active:
                if room <= 0 or bytes_room <= 0:
                    return
                limit = min(share, room) if one.room is None else min(share, room, one.room)
                page = await _read(access, one, limit, min(bytes_share, bytes_room), isolated)
                if taken and page.payload_bytes > bytes_room:
                    continue  # a page has at least one message; this one no longer fits
                self._add(one, page)
                taken += page.count
                room -= page.count
                bytes_room -= page.payload_bytes
                if page.count and page.end == "more" and one.room != 0:
                    still.append(one)
            active = still

    def _add(self, one: _Wanted, page: Page) -> None:
        """Append a page to the topic's result, and advance past it."""
        had = one.page
        one.page = Page(
            parts=[*had.parts, *page.parts],
            attributes={**had.attributes, **{had.count + index: each for index, each in page.attributes.items()}},
            count=had.count + page.count,
            payload_bytes=had.payload_bytes + page.payload_bytes,
            last_id=page.last_id,
            end=page.end,
            held=page.held,
        )
        one.page.held_until_ms = page.held_until_ms
        self.rates.delivered(one.name, page.count, trio.current_time())
        if one.room is not None:
            one.room -= page.count
        if page.last_id is not None and one.span is not None:
            one.since = one.span.since = after(page.last_id)


def poll_many_wait_ms(request: Request) -> int:
    """Return the wait that a poll of many topics asks for; 0 if it cannot be decoded, which the handler refuses."""
    try:
        body = PollRequest(**{key: value for key, value in request.fields(_REQUEST).items() if key != "topics"})
        apply_query(body, request.query)
    except PlainsongError:
        return 0
    return body.wait_ms or 0


def _wanted(namespace: str, topics: dict[str, Any]) -> list[_Wanted]:
    if not topics:
        raise InvalidParameter("topics is empty", hint='for example {"topics": {"orders": {}}}')
    if len(topics) > MAX_TOPICS:
        raise RequestTooLarge(f"{len(topics)} topics", hint=f"name at most {MAX_TOPICS} at a time")
    found = []
    for topic, given in topics.items():
        where = f"topics.{topic[:80]}"
        one = PollRequest(**values.fields_of(_object(given, where), _TOPIC, where + "."))
        check_poll(one)
        found.append(_Wanted(topic_name(namespace, topic), one.since, one.limit))
    return found


def _refuse_forbidden(wanted: list[_Wanted], request: Request) -> None:
    """Give topics that the client may not poll an error, and no messages."""
    for one in wanted:
        if not request.rights.on_topic("poll", *one.name):
            one.error, one.page = forbidden(request.who, "poll", str(one.name)), Page()


def _refuse_strangers(wanted: list[_Wanted]) -> None:
    """Raises NoOwner for a topic of another instance: the instance that forwarded the request finds the owner."""
    for one in wanted:
        if isinstance(one.error, NoOwner):
            raise one.error


async def _look(access: TopicsAccess, wanted: list[_Wanted], undecided: int) -> None:
    asked = [one for one in wanted if one.error is None]
    since = [Since(one.name, one.since, undecided) for one in asked]
    for one, found in zip(asked, await access.look(since), strict=True):
        if isinstance(found, PlainsongError):
            one.error = found
        else:
            one.span = found
            one.page = one.unread


async def _read(access: TopicsAccess, one: _Wanted, limit: int, max_bytes: int, isolated: _Isolated) -> Page:
    """Read the topic's next messages; an empty page if that fails."""
    assert one.span is not None  # topics without one have an error, and are not active
    try:
        return isolated.admit(await access.page(one.name, one.span, limit, max_bytes, isolated.view_of(one.span)))
    except PlainsongError as error:
        if not one.page.count:
            one.error = error
        # Messages before the failure are answered; the next poll returns the error.
        return one.unread


def _pieces(wanted: list[_Wanted], options: PageOptions) -> Iterator[bytes]:
    """Yield the answer in pieces."""
    before = b'{"topics":{'
    for one in wanted:
        yield b'%b"%b":' % (before, one.name.topic.encode())
        yield from _pieces_of(one, options)
        before = b","
    yield b"}}"


def _pieces_of(one: _Wanted, options: PageOptions) -> Iterator[bytes]:
    if one.error is not None:
        problem = answer_for(one.error).body
        assert isinstance(problem, bytes)  # problems always are
        yield b'{"error":%b}' % problem
        return
    page = one.page
    last_id = b"null" if page.last_id is None else b'"%b"' % page.last_id.hex().encode()
    held = b"" if page.held is None else _held(page.held, options)
    rows = 0 if one.span is None else rows_of(one.span.passed_set_aside(page.last_id, one.asked_from))
    passed = b',"setAside":%d' % rows if rows else b""
    yield b'{"messages":'
    yield from JSON.page_pieces(page, options)
    yield b',"lastId":%b,"end":"%b"%b%b}' % (last_id, page.end.encode(), held, passed)


def _held(held: Held, options: PageOptions) -> bytes:
    """Return the fields that a single poll has as headers."""
    pointer = f'"{held.write_pointer}"' if options.longs_as_strings else held.write_pointer
    fields = f',"heldBy":{pointer},"heldSince":{held.since_ms},"hiddenMessages":"{held.hidden_text}"'
    return fields.encode()


# --- access to topics ------------------------------------------------------------------------------
#
# A poll of many topics reads them here if this instance owns all of them, otherwise each at its owner.
#
# A wait is one task for each topic, in one nursery: the first topic with messages cancels the others, and a client that
# disconnects cancels all.


class Since(NamedTuple):
    """A topic, and the first id wanted."""

    name: TopicName
    since: bytes
    undecided: int = 0
    """See ``Look.undecided``."""


class TopicsAccess(Protocol):
    """Reads spans and pages of topics. An error of one topic is returned in its place."""

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """Return the current span of each."""
        ...

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """Wait until one topic may have more, or the deadline on trio's clock; None for topics without a result."""
        ...

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """Read the next messages of a span. Raises StoreError."""
        ...


class LocalTopics:
    """Topics owned by this instance; for any other the directory returns NoOwner."""

    def __init__(self, directory: Directory, pages: Pages) -> None:
        self._directory = directory
        self._pages = pages

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """See ``TopicsAccess.look``."""
        found: dict[int, Span | PlainsongError] = {}

        async def look(index: int, one: Since) -> None:
            found[index] = await self._ask(one.name, Look(one.since, undecided=one.undecided))

        async with trio.open_nursery() as nursery:
            for index, one in enumerate(wanted):
                nursery.start_soon(look, index, one)
        return [found[index] for index in range(len(wanted))]

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """See ``TopicsAccess.wait``."""
        found: list[Span | PlainsongError | None] = [None] * len(wanted)

        async def wait(index: int, one: Since) -> None:
            found[index] = await self._ask(one.name, Look(one.since, deadline_s=deadline_s))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index, one in enumerate(wanted):
                nursery.start_soon(wait, index, one)
        return found

    async def _ask(self, name: TopicName, look: Look) -> Span | PlainsongError:
        try:
            return await self._directory.ask(name, look)
        except PlainsongError as error:
            return error

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``TopicsAccess.page``."""
        return await self._pages.read(name, span, limit=limit, max_bytes=max_bytes, view=view)
