"""A publisher's buffer: messages by topic, in the order of the calls, until each is delivered or given up.

Each topic with messages has a *lane*, and each lane has at most one *batch* in flight, so neither a retry nor a second
connection can change the order. Lanes do not wait for each other. A message counts against the memory bound from
``put`` until it is delivered or given up, so memory stays bounded whatever the daemon does.

Nothing here waits or reads a clock. Publishers call it under their lock and complete the futures it returns.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

from plainsong import tracing
from plainsong.errors import BufferFull, DeadlineExceeded, MessageDropped
from plainsong.messages import Outgoing, own_ttls
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import BadRequest, Internal, InvalidParameter, PlainsongError, TooLarge
from plainsong.protocol.requests import PublishRequest
from plainsong.request_sizes import RequestSizes
from plainsong.retry import PAUSES_S, may_repeat, pause_after
from plainsong.serializers import BYTES, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.messages import Strings
    from plainsong.serializers import Serializer

log = logging.getLogger("plainsong.publisher")


DEFAULT_BATCH_MESSAGES = 10_000


DEFAULT_BATCH_BYTES = 1 << 20


DEFAULT_PENDING_BYTES = 32 << 20


RELIABLE_TIMEOUT_S = 120.0


BEST_EFFORT_TIMEOUT_S = 10.0


EXIT_TIMEOUT_S = 5.0


S = TypeVar("S")
M = TypeVar("M")


Mode = Literal["reliable", "best_effort"]


Overflow = Literal["wait", "raise", "drop"]


#: ``send`` yields to the event loop every this many messages: a caller's loop that never waits would starve the sender.
MESSAGES_PER_YIELD = 256

#: Memory per message in addition to its payload: an item, a future, their slots in a queue. Measured, rounded up.
ITEM_BYTES = 400


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a batch and of the buffer."""

    linger_s: float
    max_batch_messages: int
    max_batch_bytes: int
    max_pending_bytes: int
    delivery_timeout_s: float
    mode: Mode
    retry_unknown: bool


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
    """Checks the options of a publisher. Raises InvalidParameter."""
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
        raise InvalidParameter(f"linger_ms is {linger_ms}", hint="0 sends at once")
    if mode not in ("reliable", "best_effort"):
        raise InvalidParameter(f"mode is {mode!r}", hint="use reliable or best_effort")
    if overflow not in ("wait", "raise", "drop"):
        raise InvalidParameter(f"overflow is {overflow!r}", hint="use wait, raise or drop")
    if mode == "best_effort" and overflow != "drop":
        raise InvalidParameter("best effort never waits and never raises", hint='omit overflow, or use "drop"')
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


@dataclass(slots=True, eq=False)
class Item(Generic[S]):
    """One message and its future."""

    payload: bytes
    ttl_s: int | None
    attributes: Strings
    sequence_id: int | None
    """The caller's; a producer numbers the others. None without a producer."""
    future: S
    at_s: float = 0.0
    """Time of ``put``."""

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return len(self.payload)


@dataclass(slots=True, eq=False)
class Whole(Generic[S]):
    """Messages that the caller published as one request, which is never split and has one future."""

    request: PublishRequest
    sequence_ids: Sequence[int | None]
    """The caller's, for each message."""
    future: S
    limit_s: float | None = None
    """Its own time limit, instead of ``delivery_timeout_s``."""
    at_s: float = 0.0
    """Time of ``put``."""

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        return sum(map(len, self.request.messages))


Entry: TypeAlias = "Item[S] | Whole[S]"


def item_of(value: Any, serializer: Serializer, future: S, sequence_id: int | None = None) -> Item[S]:
    """Encode a value, or an ``Outgoing``. Raises NotEncodable, InvalidParameter: nothing happened."""
    ttl_s = strings = None
    if type(value) is Outgoing:
        ttl_s, strings = value.ttl_s, value.strings
        sequence_id = value.sequence_id if sequence_id is None else sequence_id
        value = value.value
    payload = value if type(value) is bytes and serializer is BYTES else encoded(serializer, value)
    return Item(payload, ttl_s, tracing.stamped(strings), sequence_id, future)


@dataclass(slots=True, eq=False)
class Batch(Generic[S]):
    """The messages of one request."""

    lane: Lane[S]
    items: list[Entry[S]]
    """Items, or one whole request."""
    in_doubt: bool = False
    """True if the daemon may have executed an attempt."""

    @property
    def futures(self) -> list[S]:
        """One for each message, or one for a whole request."""
        return [item.future for item in self.items]

    @property
    def messages(self) -> int:
        """The number of messages."""
        first = self.items[0]
        return len(first.request.messages) if isinstance(first, Whole) else len(self.items)

    def request(self) -> PublishRequest:
        """Make the publish request of all its messages."""
        first = self.items[0]
        if isinstance(first, Whole):
            return first.request
        items = cast("list[Item[S]]", self.items)
        attributes = [dict(item.attributes or {}) for item in items]
        return PublishRequest(
            [item.payload for item in items],
            message_ttls_s=own_ttls([item.ttl_s for item in items]),
            attributes=attributes if any(attributes) else None,
            sequence_ids=None if first.sequence_id is None else cast("list[int]", [item.sequence_id for item in items]),
        )


@dataclass(slots=True, eq=False)
class Lane(Generic[S]):
    """One topic's messages: batches to retry first, then the waiting messages, oldest first."""

    topic: str
    backoff: Backoff
    again: deque[Batch[S]] = field(default_factory=deque)
    waiting: deque[Entry[S]] = field(default_factory=deque)
    waiting_bytes: int = 0
    under_way: Batch[S] | None = None
    not_before_s: float = 0.0
    """The earliest time of the next attempt; set after a failed one."""
    error: PlainsongError | None = None
    """The error of the last attempt, if it failed: the reason why the messages wait."""


class Lost(NamedTuple, Generic[S]):
    """Messages that were given up, and the error."""

    topic: str
    items: list[Entry[S]]
    error: PlainsongError

    @property
    def futures(self) -> list[S]:
        """The futures of the messages."""
        return [item.future for item in self.items]


class PublisherQueue(Generic[S]):
    """All lanes of one publisher. ``S`` is the type of the futures."""

    #: The detail of the error for messages given up on close.
    closed_detail = "the publisher was closed"

    def __init__(self, bounds: Bounds, random: Callable[[], float]) -> None:
        self.bounds = bounds
        self.pending = 0
        """Messages neither delivered nor given up, including those in flight."""
        self.pending_bytes = 0
        self.flushing = False
        """True while lanes are sent without lingering."""
        self._random = random
        self._lanes: dict[str, Lane[S]] = {}
        self._sizes = RequestSizes(bounds.max_batch_messages, bounds.max_batch_bytes)
        self._wholes = 0
        """Whole requests neither delivered nor given up; a publisher has none."""

    # --- in ------------------------------------------------------------------------------------

    def put(self, topic: str, entry: Entry[S], now_s: float) -> bool | None:
        """Takes a message; None when the buffer has no room, True if a worker must be woken."""
        assert not isinstance(entry, Whole)  # only producers send these
        size = len(entry.payload) + ITEM_BYTES
        if self.pending_bytes + size > self.bounds.max_pending_bytes:
            return None
        return self._add(topic, entry, now_s, 1, size)

    def _add(self, topic: str, entry: Entry[S], now_s: float, messages: int, size: int) -> bool:
        entry.at_s = now_s
        lane = self._lanes.get(topic)
        if lane is None:
            lane = self._lanes[topic] = Lane(topic, Backoff(PAUSES_S, self._random))
        lane.waiting.append(entry)
        lane.waiting_bytes += size
        self.pending += messages
        self.pending_bytes += size
        return self.wants_sender(lane)

    def check_usable(self) -> None:
        """Do nothing: a publisher is usable until it is closed."""

    def wants_sender(self, lane: Lane[S]) -> bool:
        """True if a worker must be woken after ``put``: the lane is new, or a batch has become full."""
        if lane.under_way is not None:
            return False
        waiting = len(lane.waiting)
        return waiting == 1 or waiting == self.bounds.max_batch_messages or self._is_full(lane)

    def fits(self, entry: Entry[S]) -> bool:
        """True if an empty buffer has room."""
        return entry.size + ITEM_BYTES <= self.bounds.max_pending_bytes

    def full(self, size: int) -> BufferFull:
        """Make the error for a message of this size that has no room."""
        detail = (
            f"{self.pending_bytes} of {self.bounds.max_pending_bytes} bytes are waiting, and this message has {size}"
        )
        return BufferFull(detail, hint="wait for messages to be delivered, or use a larger max_pending_bytes")

    # --- out -----------------------------------------------------------------------------------

    def take(self, now_s: float) -> Batch[S] | None:
        """Return the next batch to send. Its lane pauses until ``settled``, ``failed`` or ``abandoned``."""
        for topic, lane in self._lanes.items():
            if lane.under_way is None and self._ready_s(lane) <= now_s:
                # Round robin: move the lane to the end.
                self._lanes[topic] = self._lanes.pop(topic)
                lane.under_way = self._again(lane) if lane.again else self._gathered(lane)
                return lane.under_way
        return None

    def work(self, now_s: float) -> tuple[Batch[S] | None, list[Lost[S]]]:
        """Return the next batch to send, and the messages given up."""
        lost = self.overdue(now_s)
        return self.take(now_s), lost

    def wants_another(self, now_s: float) -> bool:
        """True if ``take`` would return another batch."""
        return any(lane.under_way is None and self._ready_s(lane) <= now_s for lane in self._lanes.values())

    def next_s(self) -> float | None:
        """Return the next time ``take`` or ``overdue`` has a result without another call; None: never."""
        next_s = inf
        for lane in self._lanes.values():
            if lane.under_way is None:
                next_s = min(next_s, self._ready_s(lane))
            next_s = min(next_s, self._overdue_s(lane))
        return None if next_s == inf else next_s

    def overdue(self, now_s: float) -> list[Lost[S]]:
        """Gives up overdue messages, except those in flight: their request has its own time limit."""
        found: list[Lost[S]] = []
        for lane in list(self._lanes.values()):
            if self._overdue_s(lane) <= now_s:
                found += self._given_up(lane, self._taken_out(lane, now_s))
                self._forget_if_empty(lane)
        for lost in found:
            self._release(lost.items)
        return found

    def until_s(self, entry: Entry[S]) -> float:
        """Return the entry's deadline."""
        return entry.at_s + self._limit_s(entry)

    def left_s(self, batch: Batch[S], now_s: float) -> float:
        """Return the seconds that an attempt with this batch may take."""
        return max(0.001, self.until_s(batch.items[0]) - now_s)

    # --- the end of a batch --------------------------------------------------------------------

    def settled(self, batch: Batch[S]) -> list[Lost[S]]:
        """Complete a durable batch. Returns the messages given up: none, except in a producer."""
        lane = batch.lane
        lane.under_way = lane.error = None
        lane.backoff.reset()
        self._sizes.passed(lane.topic)
        self._release(batch.items)
        self._forget_if_empty(lane)
        return []

    def failed(self, batch: Batch[S], error: PlainsongError, now_s: float) -> list[Lost[S]]:
        """Handle a failed attempt. Returns the messages given up; none if the batch, or its halves, will be retried."""
        lane = batch.lane
        lane.under_way = None
        lane.error = error
        batch.in_doubt |= error.outcome == "unknown"
        if isinstance(error, TooSlow) or (isinstance(error, DeadlineExceeded) and error.outcome == "unknown"):
            self._sizes.timed_out(lane.topic, *self._measured(batch.items))
        if self._may_repeat(batch, error):
            self._pause(lane, error, now_s)
            lane.again.appendleft(batch)
            return []
        if len(batch.items) > 1 and is_refused_itself(error):
            # Only one message may be at fault: retrying the halves isolates it.
            middle = len(batch.items) // 2
            lane.again.appendleft(Batch(lane, batch.items[middle:], batch.in_doubt))
            lane.again.appendleft(Batch(lane, batch.items[:middle], batch.in_doubt))
            return []
        if error.outcome == "unknown":
            # The cause may persist: pause before the next batch, or its outcome may become unknown too.
            self._pause(lane, error, now_s)
        self._release(batch.items)
        self._forget_if_empty(lane)
        if batch.in_doubt and error.outcome == "not-applied":
            error.outcome = "unknown"
        return [Lost(lane.topic, batch.items, error)]

    def _may_repeat(self, batch: Batch[S], error: PlainsongError) -> bool:
        repeat: Literal["harmless", "twice"] = "harmless" if self.bounds.retry_unknown else "twice"
        return may_repeat(repeat, error) and not (batch.in_doubt and repeat == "twice")

    def _pause(self, lane: Lane[S], error: PlainsongError, now_s: float) -> None:
        lane.not_before_s = now_s + pause_after(error, lane.backoff)

    def abandoned(self, batch: Batch[S], error: PlainsongError) -> list[Lost[S]]:
        """Give up a batch after its attempt was cancelled."""
        batch.lane.under_way = None
        self._release(batch.items)
        self._forget_if_empty(batch.lane)
        return [Lost(batch.lane.topic, batch.items, error)]

    def clear(self) -> list[Lost[S]]:
        """Gives up all messages that are not in flight."""
        return self._clear(lambda lane, in_doubt: because(lane.error, _dropped(self.closed_detail, in_doubt)))

    def _clear(self, error_of: Callable[[Lane[S], bool], PlainsongError]) -> list[Lost[S]]:
        found: list[Lost[S]] = []
        for lane in list(self._lanes.values()):
            found += [Lost(lane.topic, batch.items, error_of(lane, batch.in_doubt)) for batch in lane.again]
            if lane.waiting:
                found.append(Lost(lane.topic, list(lane.waiting), error_of(lane, False)))
            lane.again.clear()
            lane.waiting.clear()
            lane.waiting_bytes = 0
            self._forget_if_empty(lane)
        for lost in found:
            self._release(lost.items)
        return found

    def futures(self) -> Iterator[S]:
        """Yield the futures of all messages neither delivered nor given up."""
        for lane in self._lanes.values():
            for batch in ([lane.under_way] if lane.under_way else []) + list(lane.again):
                yield from batch.futures
            yield from (item.future for item in lane.waiting)

    # --- within --------------------------------------------------------------------------------

    def _is_full(self, lane: Lane[S]) -> bool:
        full_bytes = self.bounds.max_batch_bytes + ITEM_BYTES * len(lane.waiting)
        return len(lane.waiting) >= self.bounds.max_batch_messages or lane.waiting_bytes >= full_bytes

    def _ready_s(self, lane: Lane[S]) -> float:
        """Return the time from which the lane may send, after its pause and lingering; inf without messages."""
        if lane.again:
            return lane.not_before_s
        if not lane.waiting:
            return inf
        if self.flushing or self._wholes or self._is_full(lane):
            return lane.not_before_s
        return max(lane.not_before_s, lane.waiting[0].at_s + self.bounds.linger_s)

    def _overdue_s(self, lane: Lane[S]) -> float:
        """Return a lower bound for the time at which ``overdue`` next gives something up."""
        if lane.again:
            return self.until_s(lane.again[0].items[0])
        return self.until_s(lane.waiting[0]) if lane.waiting else inf

    def _limit_s(self, entry: Entry[S]) -> float:
        own_s = entry.limit_s if isinstance(entry, Whole) else None
        return self.bounds.delivery_timeout_s if own_s is None else own_s

    @property
    def keeps_gaps_out(self) -> bool:
        """True if no message may be stored after an earlier one of its lane was given up."""
        return False

    def _taken_out(self, lane: Lane[S], now_s: float) -> list[tuple[Entry[S], bool]]:
        """Removes the overdue entries from a lane, and those that may not follow them; True for entries in doubt."""
        found: list[tuple[Entry[S], bool]] = []

        def ends(entry: Entry[S]) -> bool:
            return self.until_s(entry) <= now_s or (bool(found) and self.keeps_gaps_out)

        for batch in lane.again:
            stay = []
            for entry in batch.items:
                if ends(entry):
                    found.append((entry, batch.in_doubt))
                else:
                    stay.append(entry)
            batch.items = stay
        lane.again = deque(batch for batch in lane.again if batch.items)
        passed: list[Entry[S]] = []
        out: list[Entry[S]] = []
        waiting = lane.waiting
        while waiting:
            if ends(waiting[0]):
                out.append(waiting[0])
                found.append((waiting.popleft(), False))
            elif self._wholes:
                passed.append(waiting.popleft())
            else:
                break  # all have the same limit, so those after it have more time
        waiting.extendleft(reversed(passed))
        lane.waiting_bytes -= self._bytes(out)
        return found

    def _given_up(self, lane: Lane[S], found: list[tuple[Entry[S], bool]]) -> list[Lost[S]]:
        lost = []
        for (limit_s, in_doubt), group in groupby(found, lambda each: (self._limit_s(each[0]), each[1])):
            entries = [entry for entry, _ in group]
            lost.append(Lost(lane.topic, entries, self._late(lane, limit_s, entries[0], in_doubt)))
        return lost

    def _again(self, lane: Lane[S]) -> Batch[S]:
        """Remove the first batch to retry, or a part of it that fits the present request size."""
        batch, (most, _) = lane.again.popleft(), self._sizes.of(lane.topic)
        if len(batch.items) > most:
            lane.again.appendleft(Batch(lane, batch.items[most:], batch.in_doubt))
            return Batch(lane, batch.items[:most], batch.in_doubt)
        return batch

    def _gathered(self, lane: Lane[S]) -> Batch[S]:
        """Batch the first messages of a lane, as many as fit one request."""
        waiting = lane.waiting
        items: list[Entry[S]] = []
        most, room = self._sizes.of(lane.topic)
        last = -1
        for _ in range(min(len(waiting), most)):
            head = waiting[0]
            if isinstance(head, Whole):
                if not items:
                    items.append(waiting.popleft())
                break
            room -= len(head.payload)
            number = head.sequence_id
            if items and (room < 0 or (number is not None and number <= last)):
                break
            if number is not None:
                last = number
            items.append(waiting.popleft())
        lane.waiting_bytes -= self._bytes(items)
        return Batch(lane, items)

    def _measured(self, entries: Sequence[Entry[S]]) -> tuple[int, int]:
        """Return the number of messages, and the bytes of their payloads."""
        if not self._wholes:
            return len(entries), sum([len(item.payload) for item in cast("Sequence[Item[S]]", entries)])
        messages = size = 0
        for each in entries:
            payloads = each.request.messages if isinstance(each, Whole) else (each.payload,)
            messages += len(payloads)
            size += sum(map(len, payloads))
        return messages, size

    def _bytes(self, entries: Sequence[Entry[S]]) -> int:
        messages, size = self._measured(entries)
        return size + ITEM_BYTES * messages

    def _release(self, entries: Sequence[Entry[S]]) -> None:
        messages, size = self._measured(entries)
        self.pending -= messages
        self.pending_bytes -= size + ITEM_BYTES * messages
        if self._wholes:
            self._wholes -= sum(isinstance(each, Whole) for each in entries)

    def _forget_if_empty(self, lane: Lane[S]) -> None:
        if not (lane.under_way or lane.again or lane.waiting):
            self._lanes.pop(lane.topic, None)

    def _late(self, lane: Lane[S], limit_s: float, entry: Entry[S], in_doubt: bool) -> PlainsongError:
        detail = f"not delivered within {limit_s:g} s"
        if self.bounds.mode == "best_effort":
            return because(lane.error, _dropped(detail, in_doubt))
        own = isinstance(entry, Whole) and entry.limit_s is not None
        late = DeadlineExceeded(
            detail,
            outcome="unknown" if in_doubt else "not-applied",
            hint=f"{'deadline_s' if own else 'delivery_timeout_s'} is the limit",
        )
        return because(lane.error, late)

    def waiting_for(self) -> list[PlainsongError]:
        """Return the errors of lanes that wait after a failed attempt."""
        return [lane.error for lane in self._lanes.values() if lane.error is not None]


def _dropped(detail: str, in_doubt: bool) -> MessageDropped:
    return MessageDropped(detail, outcome="unknown" if in_doubt else "not-applied")


class TooSlow(DeadlineExceeded):
    """A request got no answer in time, and none of it is stored: smaller ones may succeed. Never raised to callers."""


def is_refused_itself(error: PlainsongError) -> bool:
    """True if one message of the request may be at fault, so that the others may succeed without it."""
    return error.outcome == "not-applied" and isinstance(error, (BadRequest, TooLarge))


# --- failures ------------------------------------------------------------------------------------


def because(cause: PlainsongError | None, error: PlainsongError) -> PlainsongError:
    """Adds the cause, if any, to an error's text and as its ``__cause__``."""
    if cause is not None:
        error.detail = f"{error.detail}: {cause.detail}"
        error.hint = cause.hint or error.hint
        error.args = (error.detail,)
        error.__cause__ = cause
    return error


def client_bug(bug: Exception) -> PlainsongError:
    """Make the error for an exception that can only be a bug of the client."""
    error = Internal(f"{type(bug).__name__}: {bug}", hint="this is a bug of the client: please report it")
    error.__cause__ = bug
    return error


def made(make: Callable[[], M]) -> M:
    """Calls ``make``, which encodes a request. Raises InvalidParameter if that fails: nothing was sent.

    Every message is checked before it is queued, so this is a bug of the client. As InvalidParameter it fails only the
    message at fault: the queue sends the others without it.
    """
    try:
        return make()
    except PlainsongError:
        raise
    except Exception as bug:
        log.exception("a request could not be built")
        detail = f"the message cannot be serialized: {type(bug).__name__}: {bug}"
        raise InvalidParameter(detail, hint="this is a bug of the client: please report it") from bug
