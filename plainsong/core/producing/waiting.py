"""What a producer holds: its messages in the order of the calls, until each has come to its end.

One request is under way at a time, since an id that comes late counts as a duplicate. Messages that were given one by
one are gathered into it; those that were given together make a request of their own. Nothing here waits or knows the
time; the shells call it under their lock and settle what it hands back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from plainsong.core.calls import own_ttls
from plainsong.core.gathering import ITEM_BYTES
from plainsong.core.producing.delivery import FINAL, is_own_fault, refusal
from plainsong.errors import BufferFull, DeadlineExceeded, MessageDropped, ProducerStopped
from plainsong.protocol.errors import DeduplicationDisabled, PlainsongError
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plainsong.core.gathering import Bounds

S = TypeVar("S")


class Single(NamedTuple, Generic[S]):
    """One message, and whoever waits to hear of it."""

    payload: bytes
    ttl_s: int | None
    attributes: Mapping[str, str] | None
    sequence_id: int
    sent: S
    at_s: float


@dataclass(slots=True, eq=False)
class Parcel(Generic[S]):
    """One request and whoever waits for it: one for each message, or one for all of them."""

    request: PublishRequest
    sents: Sequence[S]
    at_s: float
    bytes: int
    whole: bool
    """It was given as it is: never cut in two, and one waits for all of it."""
    singles: Sequence[Single[S]] = ()
    limit_s: float | None = None
    """Seconds it has, instead of those that all have."""


class Ended(NamedTuple, Generic[S]):
    """Messages that were given up, and why."""

    sents: Sequence[S]
    error: PlainsongError


@dataclass(slots=True)
class Waiting(Generic[S]):
    """All that waits. ``S`` is what stands for the fate of a message or a parcel: a future."""

    bounds: Bounds
    pending: int = 0
    """Messages not settled yet, those under way among them."""
    pending_bytes: int = 0
    flushing: bool = False
    under_way: Parcel[S] | None = None
    stopped: PlainsongError | None = None
    """Why nothing is taken any more."""
    _queue: deque[Single[S] | Parcel[S]] = field(default_factory=deque)
    _again: deque[Parcel[S]] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _parcels: int = 0
    """Of the queue, how many somebody waits for: then nothing lingers."""
    _late_s: float = inf
    """Before this nothing of the queue has waited too long; perhaps not then either."""

    # --- in ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what the producer stopped for, as an error of which nothing happened."""
        if self.stopped is not None:
            raise following(self.stopped)

    def has_room(self, size: int, messages: int = 1) -> bool:
        """Whether so many bytes can be taken now; a request larger than all of it is taken when nothing else is there."""
        size += ITEM_BYTES * messages
        return not self.pending or self.pending_bytes + size <= self.bounds.max_pending_bytes

    def full(self, size: int) -> BufferFull:
        """What to say when there is no room."""
        detail = f"{self.pending_bytes} of {self.bounds.max_pending_bytes} bytes wait already, this has {size}"
        return BufferFull(detail, hint="wait for messages to be delivered, or give a larger max_pending_bytes")

    def put(self, single: Single[S]) -> None:
        """Take a message."""
        size = len(single.payload) + ITEM_BYTES
        self._add(single)
        self.pending += 1
        self.pending_bytes += size

    def put_whole(self, request: PublishRequest, sent: S, at_s: float, limit_s: float | None = None) -> None:
        """Take messages that go in one request."""
        size = sum(map(len, request.messages)) + ITEM_BYTES * len(request.messages)
        parcel = Parcel(request, [sent], at_s, size, whole=True, limit_s=limit_s)
        self._add(parcel)
        self.pending += len(request.messages)
        self.pending_bytes += size

    def _add(self, each: Single[S] | Parcel[S]) -> None:
        self._queue.append(each)
        self._waiting_bytes += each.bytes if isinstance(each, Parcel) else len(each.payload) + ITEM_BYTES
        self._parcels += isinstance(each, Parcel)
        self._late_s = min(self._late_s, self.until_s(each))

    # --- out -----------------------------------------------------------------------------------

    def take(self, now_s: float) -> Parcel[S] | None:
        """The next request to deliver; nothing more until ``delivered`` or ``failed``."""
        ready_s = self._ready_s()
        if ready_s is None or ready_s > now_s:
            return None
        if self._again:
            self.under_way = self._again.popleft()
        elif isinstance(self._queue[0], Parcel):
            self.under_way = self._queue.popleft()  # type: ignore[assignment] # just looked
            self._parcels -= 1
            self._waiting_bytes -= self.under_way.bytes  # type: ignore[union-attr]
        else:
            self.under_way = self._gathered()
            self._waiting_bytes -= self.under_way.bytes
        if not self._queue:
            self._late_s = inf
        return self.under_way

    def next_s(self) -> float | None:
        """When ``take`` or ``overdue`` will have something; None: not before another ``put``, or the end of a request."""
        ready_s = self._ready_s()
        until_s = self._late_s if ready_s is None else min(ready_s, self._late_s)
        return None if until_s == inf else until_s

    def _ready_s(self) -> float | None:
        """When there is something to deliver."""
        if self.under_way is not None or not (self._again or self._queue):
            return None
        if self._again or self.flushing or self._parcels:
            return 0.0
        full = len(self._queue) >= self.bounds.max_batch_messages or self._waiting_bytes >= self.bounds.max_batch_bytes
        return 0.0 if full else self._queue[0].at_s + self.bounds.linger_s

    def until_s(self, each: Single[S] | Parcel[S]) -> float:
        """When its time is over."""
        own_s = each.limit_s if isinstance(each, Parcel) else None
        return each.at_s + (self.bounds.delivery_timeout_s if own_s is None else own_s)

    def _gathered(self) -> Parcel[S]:
        """Messages from the first on, whose ids increase, as many as one request carries."""
        queue = self._queue
        singles: list[Single[S]] = []
        room, last = self.bounds.max_batch_bytes, -1
        while queue and len(singles) < self.bounds.max_batch_messages:
            head = queue[0]
            if isinstance(head, Parcel) or head.sequence_id <= last:
                break
            room -= len(head.payload)
            if room < 0 and singles:
                break
            singles.append(head)
            last = head.sequence_id
            queue.popleft()
        return gathered(singles)

    # --- what became of it ---------------------------------------------------------------------

    def delivered(self, parcel: Parcel[S]) -> None:
        """It is durable."""
        self.under_way = None
        self._release(parcel)

    def failed(self, parcel: Parcel[S], error: PlainsongError, *, explicit: bool) -> list[Ended[S]]:
        """It was given up. What ends with it: itself, and all behind it when the producer stops.

        A message that is refused for what it is fails alone, unless its producer names the ids: then nothing behind it
        may be stored, because whoever starts again after the last id would never come back to it. After a parcel that
        somebody waits for, he decides; otherwise the producer stops.
        """
        self.under_way = None
        if is_own_fault(error) and len(parcel.singles) > 1:
            middle = len(parcel.singles) // 2
            self._again.extendleft([gathered(parcel.singles[middle:]), gathered(parcel.singles[:middle])])
            return []
        self._release(parcel)
        ended = [Ended(parcel.sents, error)]
        if isinstance(error, FINAL) or (explicit and not parcel.whole):
            ended += self.stop(error)
        elif explicit:
            ended += self._clear(following(error))
        return ended

    def stop(self, error: PlainsongError) -> list[Ended[S]]:
        """Nothing is taken any more; what waits is given up."""
        self.stopped = self.stopped or error
        return self._clear(following(error))

    def clear(self) -> list[Ended[S]]:
        """Give up everything that is not under way, since the producer is closed."""
        return self._clear(MessageDropped("the producer was closed before this was sent"))

    def overdue(self, now_s: float, *, explicit: bool) -> list[Ended[S]]:
        """What has waited too long behind others, and what ends with it; a request under way has a limit of its own.

        What was given before it and has more time goes on.
        """
        ended: list[Ended[S]] = []
        if now_s < self._late_s:
            return ended
        stopped: PlainsongError | None = None
        queued = list(self._queue)
        self._forget_queue()
        for each in queued:
            if stopped is None and self.until_s(each) > now_s:
                self._add(each)
                continue
            parcel = each if isinstance(each, Parcel) else gathered([each])
            self._release(parcel)
            error: PlainsongError = self._late(parcel) if stopped is None else following(stopped)
            ended.append(Ended(parcel.sents, error))
            if explicit and stopped is None:
                stopped = error
                self.stopped = self.stopped or (None if parcel.whole else error)
        return ended

    def _late(self, parcel: Parcel[S]) -> DeadlineExceeded:
        own, limit_s = parcel.limit_s is not None, self.until_s(parcel) - parcel.at_s
        return DeadlineExceeded(
            f"not delivered within {limit_s:g} s", hint=f"{'deadline_s' if own else 'delivery_timeout_s'} is the limit"
        )

    def sents(self) -> Iterator[S]:
        """Of everything that is not settled."""
        if self.under_way is not None:
            yield from self.under_way.sents
        for parcel in self._again:
            yield from parcel.sents
        for each in self._queue:
            yield from each.sents if isinstance(each, Parcel) else [each.sent]

    def _clear(self, error: PlainsongError) -> list[Ended[S]]:
        left = [*self._again, *(each if isinstance(each, Parcel) else gathered([each]) for each in self._queue)]
        self._again.clear()
        self._forget_queue()
        for parcel in left:
            self._release(parcel)
        return [Ended([sent for parcel in left for sent in parcel.sents], error)] if left else []

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._waiting_bytes = self._parcels = 0
        self._late_s = inf

    def _release(self, parcel: Parcel[S]) -> None:
        self.pending -= len(parcel.request.messages)
        self.pending_bytes -= parcel.bytes


def gathered(singles: Sequence[Single[S]]) -> Parcel[S]:
    """One request of messages that were given one by one."""
    attributes = [dict(single.attributes or {}) for single in singles]
    request = PublishRequest(
        [single.payload for single in singles],
        sequence_ids=[single.sequence_id for single in singles],
        message_ttls_s=own_ttls([single.ttl_s for single in singles]),
        attributes=attributes if any(attributes) else None,
    )
    size = sum(map(len, request.messages)) + ITEM_BYTES * len(singles)
    return Parcel(request, [single.sent for single in singles], singles[0].at_s, size, whole=False, singles=singles)


def following(stopped: PlainsongError) -> PlainsongError:
    """What a message is told that comes after the one the producer stopped for: nothing happened to it."""
    if isinstance(stopped, (*FINAL, DeduplicationDisabled)):
        return refusal(stopped)
    error = ProducerStopped(
        f"an earlier message was not delivered: {stopped.detail}",
        hint="open the producer again and go on after its last_sequence_id",
    )
    error.__cause__ = stopped
    return error
