"""Bounds of the HTTP server: the memory budgets of all request bodies and of all answers."""

from __future__ import annotations

import io
import zlib
from collections import deque
from contextlib import nullcontext
from math import inf
from typing import TYPE_CHECKING, Self

import trio

from plainsong.protocol.errors import BodyTooLarge, MalformedBody, Overloaded, UnsupportedMediaType
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from broker.config.sections import HttpConfig

# --- bodies ----------------------------------------------------------------------------------------


#: Requests and answers up to this size are never refused for lack of room: a connection costs as much anyway.
FREE_BYTES = 4 << 10
#: Only bodies up to this size may use the last part of the budget; by default a body without messages is no larger.
SMALL_BODY_BYTES = 64 << 10
#: The last part is 1/LAST_PART of a budget.
LAST_PART = 8
#: A body that has been arriving, or a request that has been waiting, for this long may have to give way to others.
YIELD_S = 1.0
#: Reclaim at least this fraction of the budget per search, so that the search does not run for every request.
YIELDED_PART = 16
#: The pause after a search that could not reclaim enough.
SEARCH_PAUSE_S = 0.05
#: Compressed bodies up to TINY_BYTES are decompressed inline, up to TINY_STEP_BYTES of output: that takes 0.2 ms. A
#: worker thread does the rest, in steps of a few milliseconds.
TINY_BYTES = 4 << 10
TINY_STEP_BYTES = 64 << 10
STEP_BYTES = 1 << 20
_STEP_MEMBERS = 500
#: Long work: a gzip body with more than FEW_PARTS members, or one that decompresses to more than LIKELY_RATIO times its
#: size; and a read of a chunked body beyond its first FEW_PARTS chunks.
FEW_PARTS = 64
LIKELY_RATIO = 50
#: A slice of long work is followed by a pause of REST times its length: at least two thirds of the time are for others.
REST = 2.0
#: The largest ratio of decompressed to compressed size. Deflate's own limit is little higher; only bombs get near it.
MAX_RATIO = 1000
#: The least average size of a gzip body's members after the first thousand; an empty member has 20 bytes.
LEAST_MEMBER_BYTES = 64
_FREE_MEMBERS = 1000
#: Size of the thread pool for decompression.
INFLATING_THREADS = 2
_FIRST_WINDOW_BYTES = 1 << 10
#: zlib's window bits for a gzip header and trailer.
GZIP_WINDOW = 31


class BodyBudget:
    """The memory budget of all request bodies in progress; ``answers`` is the budget of the answers.

    A byte counts once it has arrived. So that no client can block the others, requests of up to ``FREE_BYTES`` are
    always accepted, and a part of the budget is reserved for those of up to ``SMALL_BODY_BYTES``. When a body does
    not fit, the slowest of the requests that are still arriving, or waiting, give way.
    """

    __slots__ = (
        "_search_s",
        "_yielding",
        "answers",
        "inflating",
        "long_work",
        "max_bytes",
        "reserved_bytes",
    )

    def __init__(self, max_bytes: int, answers: AnswerBudget | None = None) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.answers = answers or AnswerBudget()
        self.long_work = LongWork()
        #: Limits decompression to its own threads, so that other threaded work does not queue for them.
        self.inflating = trio.CapacityLimiter(INFLATING_THREADS)
        #: Shares that can give way → since when.
        self._yielding: dict[Reservation, float] = {}
        #: Time of the earliest next search.
        self._search_s = -inf

    def reserve(self) -> Reservation:
        """Return an empty share of the budget, for one request."""
        return Reservation(self)

    def can_yield(self, share: Reservation) -> None:
        """Allow the share to be reclaimed from now on."""
        self._yielding.setdefault(share, trio.current_time())

    def cannot_yield(self, share: Reservation) -> None:
        """Stop the share from being reclaimed. Idempotent."""
        self._yielding.pop(share, None)

    def make_room(self, asking: Reservation, size: int) -> None:
        """Ensure that ``asking`` may grow to ``size`` bytes. Raises Overloaded: there is no room."""
        others = self.reserved_bytes - asking.reserved_bytes
        bound = self.max_bytes
        if size > SMALL_BODY_BYTES and others:  # a body alone may use the whole budget, with its decompressed form
            bound -= self.max_bytes // LAST_PART
        missing_bytes = others + size - bound
        if missing_bytes > 0 and not self._take(asking, missing_bytes):
            raise Overloaded(
                f"request bodies use {self.reserved_bytes} of {self.max_bytes} bytes",
                hint="retry later, or raise http.max_inflight_bytes",
            )

    def _take(self, asking: Reservation, missing_bytes: int) -> bool:
        """Reclaim the slowest shares, at most all slower than ``asking``.

        Return False, with nothing reclaimed, if that is not enough.
        """
        now_s = trio.current_time()
        if now_s < self._search_s:
            return False
        slow = sorted(
            (share.reserved_bytes / (now_s - since_s), at, share)
            for at, (share, since_s) in enumerate(self._yielding.items())
            if since_s <= now_s - YIELD_S and share.reserved_bytes
        )
        giving: list[Reservation] = []
        given_bytes, wanted_bytes = 0, max(missing_bytes, self.max_bytes // YIELDED_PART)
        for _, _, share in slow:
            if share is asking or given_bytes >= wanted_bytes:
                break
            giving.append(share)
            given_bytes += share.reserved_bytes
        if given_bytes < missing_bytes:
            self._search_s = now_s + SEARCH_PAUSE_S
            return False
        for share in giving:
            share.give_way()
        return True


class Reservation:
    """The share of one request in the budget; released at the end of the ``with`` block."""

    __slots__ = ("_budget", "_gives_way", "gave_way", "inflating", "long_work", "reserved_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.inflating = budget.inflating
        self.long_work = budget.long_work
        self._gives_way: Callable[[], object] | None = None
        self.reserved_bytes = 0
        #: True if it had to give way: the request must be refused.
        self.gave_way = False

    def grow(self, more_bytes: int) -> None:
        """Reserve ``more_bytes``.

        Raises:
          Overloaded: there is no room, or the request had to give way; nothing was reserved.
        """
        budget = self._budget
        if self.gave_way:
            raise self.refusal()
        size = self.reserved_bytes + more_bytes
        if size > FREE_BYTES and more_bytes > 0 and budget.reserved_bytes + more_bytes > budget.max_bytes // 2:
            budget.make_room(self, size)
        budget.reserved_bytes += more_bytes
        self.reserved_bytes = size

    def may_give_way(self, gives_way: Callable[[], object]) -> None:
        """Allow this share to be reclaimed for other requests: ``gives_way`` is called then, and must not wait."""
        self._gives_way = gives_way
        self._budget.can_yield(self)

    def keeps(self) -> None:
        """Stop this share from being reclaimed. Idempotent."""
        if self._gives_way is not None:
            self._gives_way = None
            self._budget.cannot_yield(self)

    def give_way(self) -> None:
        """Release the share, and have the request refused."""
        gives_way = self._gives_way
        self.release()
        self.gave_way = True
        if gives_way is not None:
            gives_way()

    @staticmethod
    def refusal() -> Overloaded:
        """Return the error for a request that had to give way."""
        return Overloaded(
            "the request was too slow, or waited too long, and other requests needed its memory",
            hint="retry later, send bodies faster, or raise http.max_inflight_bytes",
        )

    def shrink(self, fewer_bytes: int) -> None:
        """Release ``fewer_bytes``."""
        fewer_bytes = min(fewer_bytes, self.reserved_bytes)
        self._budget.reserved_bytes -= fewer_bytes
        self.reserved_bytes -= fewer_bytes

    def release(self) -> None:
        """Release everything; the share can be used again. Idempotent."""
        self._budget.reserved_bytes -= self.reserved_bytes
        self.reserved_bytes = 0
        self.gave_way = False
        if self._gives_way is not None:
            self.keeps()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class LongWork:
    """Throttles bodies that cost far more time per byte than others: one slice at a time for the whole server.

    ``async with`` it for a slice of about a millisecond. A pause follows each slice, so that a few connections that
    send only such bodies cannot monopolize the processor. Slices are granted in the order of request.
    """

    __slots__ = ("_begun_s", "_free_s", "_lock")

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._begun_s = 0.0
        #: When the pause after the last slice ends.
        self._free_s = -inf

    async def charge(self, seconds: float) -> None:
        """Account for ``seconds`` of work done outside a slice, and sleep for its pause."""
        self._free_s = max(self._free_s, trio.current_time()) + (1 + REST) * seconds
        await trio.sleep_until(self._free_s)

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            if trio.current_time() < self._free_s:
                await trio.sleep_until(self._free_s)
        except BaseException:
            self._lock.release()
            raise
        self._begun_s = trio.current_time()

    async def __aexit__(self, kind: object, error: object, tb: object) -> None:
        now_s = trio.current_time()
        self._free_s = now_s + REST * (now_s - self._begun_s)
        self._lock.release()


def too_large(max_body_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"a body is limited to {max_body_bytes} bytes", hint="send several requests, or raise http.max_body_bytes"
    )


def too_slow(received_bytes: int) -> MalformedBody:
    return MalformedBody(f"the body did not arrive in time: only {received_bytes} bytes arrived", hint="send it faster")


def broke_off(received_bytes: int) -> MalformedBody:
    """Return the error for a body whose sender stopped early."""
    return MalformedBody(f"the body is incomplete: it ended after {received_bytes} bytes")


def body_deadline(started: float, received_bytes: int, settings: HttpConfig) -> float:
    """Return the time by which the whole body must have arrived, on the clock of ``started``."""
    within_s = settings.body_timeout_s + received_bytes / settings.body_min_bytes_per_s
    return started + min(within_s, settings.body_max_s)


def needs_decoding(headers: Mapping[str, str]) -> bool:
    """True if the body has a content coding."""
    return headers.get("content-encoding", "identity") not in ("", "identity")


async def decoded_body(
    body: bytes, headers: Mapping[str, str], max_body_bytes: int, reservation: Reservation, timeout_s: float
) -> bytes:
    """Return ``body`` without its content coding.

    All but tiny bodies are decompressed by a worker thread, in steps: the thread serves other requests in between, and
    a cancelled request takes no further step.

    Raises:
      UnsupportedMediaType: the coding is neither gzip nor identity.
      MalformedBody: it is not gzip, is truncated, has too many members, or takes too long.
      BodyTooLarge: it decompresses to more than ``max_body_bytes``, or to more than ``MAX_RATIO`` times its size.
      Overloaded: it decompresses to more than there is room for.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity") or not body:
        return body
    if coding not in ("gzip", "x-gzip"):
        raise UnsupportedMediaType(f"the content encoding {coding!r} is not supported", hint="send gzip or identity")
    unpacking = _Gunzip(body, max_body_bytes)
    if len(body) <= TINY_BYTES:
        unpacking.step(TINY_STEP_BYTES)
        reservation.grow(unpacking.size)
    late_s = trio.current_time() + timeout_s
    while not unpacking.ended:
        if trio.current_time() > late_s:
            raise MalformedBody(f"the gzip body was not decompressed within {timeout_s:g} s")
        counted_bytes = unpacking.size
        async with reservation.long_work if unpacking.is_unlikely else nullcontext():
            await in_thread(unpacking.step, STEP_BYTES, limiter=reservation.inflating)
        reservation.grow(unpacking.size - counted_bytes)
        await trio.lowlevel.checkpoint()
    return unpacking.body()


class _Gunzip:
    """Decompresses a gzip body of one or more members, in steps; ``size`` is the output so far."""

    def __init__(self, packed: bytes, max_bytes: int) -> None:
        #: ``getvalue`` returns its buffer without a copy, which would block the event loop for a large body.
        self._body = io.BytesIO()
        self.size = 0
        self._members = 0
        self.ended = False
        self._packed = memoryview(packed)
        self._max_bytes = max_bytes
        self._unpacker = zlib.decompressobj(GZIP_WINDOW)
        #: Input offset, the input that the decompressor has not consumed, and the size of the next input window.
        self._at = 0
        self._left = b""
        self._window_bytes = _FIRST_WINDOW_BYTES

    def step(self, most_bytes: int) -> None:
        """Decompress about ``most_bytes``, or up to ``_STEP_MEMBERS`` members. Raises the same as ``decoded_body``."""
        end, members = self.size + most_bytes, self._members + _STEP_MEMBERS
        try:
            while not self.ended and self.size < end and self._members < members:
                self._unpack(end - self.size)
        except zlib.error as error:
            raise MalformedBody(f"the body is not gzip: {error}") from None

    @property
    def is_unlikely(self) -> bool:
        """True if the body looks like a decompression bomb."""
        return self._members > FEW_PARTS or self.size > LIKELY_RATIO * len(self._packed)

    def body(self) -> bytes:
        """Return the whole body; call it after ``ended``."""
        return self._body.getvalue()

    def _unpack(self, most_bytes: int) -> None:
        data: bytes | memoryview = self._left
        if not data:
            # Windows, since zlib copies whatever follows the end of a member: for many small members that is quadratic.
            data = self._packed[self._at : self._at + self._window_bytes]
            self._at += len(data)
            self._window_bytes = min(4 * self._window_bytes, STEP_BYTES)
        unpacker = self._unpacker
        part = unpacker.decompress(data, most_bytes)
        self._left = unpacker.unconsumed_tail
        self._body.write(part)
        self.size += len(part)
        if self.size > self._max_bytes:
            raise too_large(self._max_bytes)
        if self.size > MAX_RATIO * len(self._packed):
            raise BodyTooLarge(
                f"the body decompresses to more than {MAX_RATIO} times its size", hint="send it uncompressed"
            )
        if unpacker.eof:
            self._next_member(len(unpacker.unused_data))
        elif not part and not data:
            raise MalformedBody(f"the gzip body is incomplete: it ended after {len(self._packed)} bytes")

    def _next_member(self, unused_bytes: int) -> None:
        self._at -= unused_bytes
        self._members += 1
        if self._at == len(self._packed):
            self.ended = True
            return
        if self._members > _FREE_MEMBERS and self._members * LEAST_MEMBER_BYTES > self._at:
            raise MalformedBody(
                f"the gzip body has {self._members} members in its first {self._at} bytes",
                hint="compress it as one member",
            )
        self._unpacker = zlib.decompressobj(GZIP_WINDOW)
        self._left = b""
        self._window_bytes = _FIRST_WINDOW_BYTES


# --- answers ---------------------------------------------------------------------------------------


#: Only answers up to this size may use the last part of the budget.
SMALL_BYTES = 512 << 10
#: A page gets at most 1/SHARE of the free bytes, so that some are left for the next ones.
SHARE = 4
#: Time that a request waits for room before it is refused.
PATIENCE_S = 2.0


class MinimumRate:
    """The minimum rate at which a reader must accept an answer.

    A reader may accept nothing for ``send_timeout_s`` at a time. The waits for one answer may add up to that time, plus
    one second per ``body_min_bytes_per_s`` accepted.
    """

    __slots__ = ("_min_bytes_per_s", "_taken_bytes", "_timeout_s", "_waited_s")

    def __init__(self, settings: HttpConfig) -> None:
        self._timeout_s = settings.send_timeout_s
        self._min_bytes_per_s = settings.body_min_bytes_per_s
        self.restart()

    def restart(self) -> None:
        """Start counting for the next answer."""
        self._waited_s = 0.0
        self._taken_bytes = 0

    def left_s(self) -> float:
        """Return how long to wait for the reader now."""
        return min(self._timeout_s, self._timeout_s + self._taken_bytes / self._min_bytes_per_s - self._waited_s)

    def waited(self, seconds: float, taken_bytes: int) -> None:
        """Record a wait of ``seconds``, after which the reader accepted ``taken_bytes``."""
        self._waited_s += seconds
        self._taken_bytes += taken_bytes


class AnswerBudget:
    """The memory budget of all answers until they are sent.

    The last part of the budget is reserved for small answers, of up to ``SMALL_BYTES``, which may use the rest too.
    While a large one waits that would otherwise fit, they use only the last part. When an answer does not fit, readers
    that have accepted nothing for ``YIELD_S`` are cut off, the longest stalled first.
    """

    __slots__ = (
        "_blocked",
        "_large",
        "_large_bytes",
        "_most_large_bytes",
        "_small",
        "cut",
        "max_bytes",
        "patience_s",
        "refused",
        "reserved_bytes",
    )

    def __init__(self, max_bytes: int = 1 << 62, patience_s: float = PATIENCE_S) -> None:
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self.reserved_bytes = 0
        #: The reserved bytes of large answers, and their bound.
        self._large_bytes = 0
        self._most_large_bytes = max_bytes - max_bytes // LAST_PART
        #: Number of requests refused for lack of room, and of readers cut off to make room.
        self.refused = 0
        self.cut = 0
        #: Stalled answers → since when, and the callback that cuts the reader off; the longest stalled first.
        self._blocked: dict[AnswerReservation, tuple[float, Callable[[], object]]] = {}
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()

    def room(self) -> AnswerReservation:
        """Return an empty share, for the answers of one connection, one at a time."""
        return AnswerReservation(self)

    def fits(self, size: int, before: int = 0) -> bool:
        """True if an answer that takes ``before`` bytes may take ``size`` now, which is more."""
        others = self.reserved_bytes - before
        if not others:
            return True  # one answer always fits, whatever its size
        if size > SMALL_BYTES:
            large = self._large_bytes - before if before > SMALL_BYTES else self._large_bytes
            size = self._at_most_all_large(size)
            return large + size <= self._most_large_bytes and others + size <= self.max_bytes
        if self._large and self._large_bytes + self._at_most_all_large(self._large[0].least) <= self._most_large_bytes:
            small = others - self._large_bytes
            return not small or small + size <= self.max_bytes - self._most_large_bytes
        return others + size <= self.max_bytes

    def _at_most_all_large(self, size: int) -> int:
        """Return what has to be free for a large answer of ``size`` bytes: one always fits, next to small ones."""
        return min(size, self._most_large_bytes)

    def share_of(self, least: int, most: int) -> int:
        """Return how many bytes a page may have now, from ``least`` to ``most``; 0 if not even ``least`` fit."""
        if not self.fits(least):
            return 0
        if not self.reserved_bytes:
            return max(least, min(most, self.max_bytes))
        if self._large and least <= SMALL_BYTES:
            return least  # granted before large answers that wait, so it stays small
        return min(most, max(least, (self._most_large_bytes - self.reserved_bytes) // SHARE))

    def take_now(self, least: int, most: int) -> int:
        """Reserve what ``share_of`` allows, and return it; 0 for a large answer while other large ones are queued."""
        taken = self.share_of(least, most) if self.has_room(least, 0) else 0
        self.resize(0, taken)
        return taken

    def has_room(self, size: int, before: int) -> bool:
        """True if an answer may take ``size`` bytes now; a new large one may not while others are queued."""
        return not (self._large and size > SMALL_BYTES and not before) and self.fits(size, before)

    def resize(self, before: int, after: int) -> None:
        """Record that an answer takes ``after`` bytes instead of ``before``."""
        self.reserved_bytes += after - before
        if before > SMALL_BYTES:
            self._large_bytes -= before
        if after > SMALL_BYTES:
            self._large_bytes += after
        if after < before:
            self._grant()

    async def take(self, least: int, most: int) -> int:
        """Reserve ``least`` to ``most`` bytes as soon as there is room. Raises Overloaded: there was none in time."""
        if taken := self.take_now(least, most):
            return taken
        self._cut_blocked(least)
        if taken := self.take_now(least, most):
            return taken
        waiting = _Waiting(least, most)
        queue = self._small if least <= SMALL_BYTES else self._large
        queue.append(waiting)
        begun_s, patience_s = trio.current_time(), self.patience_s
        try:
            with trio.move_on_at(begun_s + patience_s / 2):
                await waiting.granted.wait()
            if not waiting.taken:
                self._cut_blocked(least)  # more readers may have stalled by now
                with trio.move_on_at(begun_s + patience_s):
                    await waiting.granted.wait()
        except BaseException:
            if waiting.taken:
                self.resize(waiting.taken, 0)
            raise
        finally:
            if not waiting.taken:
                queue.remove(waiting)
                self._grant()  # answers queued after this one may fit
        if not waiting.taken:
            raise self.refusal()
        return waiting.taken

    def _cut_blocked(self, least: int) -> None:
        """Cut off stalled readers until ``least`` bytes fit, or none is left."""
        late_s = trio.current_time() - YIELD_S
        for room, (since_s, cut_off) in list(self._blocked.items()):
            if since_s > late_s or self.share_of(least, least):
                return
            if room.reserved_bytes:
                self.cut += 1
                cut_off()
                room.release()

    def blocks(self, room: AnswerReservation, cut_off: Callable[[], object]) -> None:
        """Record that the reader of ``room`` accepts nothing at present."""
        self._blocked[room] = (trio.current_time(), cut_off)

    def moves(self, room: AnswerReservation) -> None:
        """Record that the reader of ``room`` has accepted something. Idempotent."""
        self._blocked.pop(room, None)

    def refusal(self) -> Overloaded:
        """Count a refusal for lack of room, and return its error."""
        self.refused += 1
        return Overloaded(
            f"answers waiting for their clients use {self.reserved_bytes} of {self.max_bytes} bytes",
            hint="retry later, or raise http.max_answer_bytes",
        )

    def _grant(self) -> None:
        """Grant the free bytes to queued requests in order, small ones first."""
        for queue in (self._small, self._large):
            while queue and (taken := self.share_of(queue[0].least, queue[0].most)):
                waiting = queue.popleft()
                self.resize(0, taken)
                waiting.taken = taken
                waiting.granted.set()


class _Waiting:
    """A queued request; ``granted`` is set once it has room."""

    __slots__ = ("granted", "least", "most", "taken")

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.taken = 0
        self.granted = trio.Event()


class AnswerReservation:
    """The share of one answer in the budget; released once the answer is sent."""

    __slots__ = ("_budget", "reserved_bytes")

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self.reserved_bytes = 0

    def has(self, size: int) -> bool:
        """Resize the share to ``size`` bytes. Return False, and change nothing, if there is no room."""
        budget, before = self._budget, self.reserved_bytes
        if size > before and not budget.has_room(size, before):
            return False
        budget.resize(before, size)
        self.reserved_bytes = size
        return True

    def must_have(self, size: int) -> None:
        """Resize the share to ``size`` bytes without a check, for an answer that can no longer be refused."""
        self._budget.resize(self.reserved_bytes, size)
        self.reserved_bytes = size

    def takes_now(self, most: int) -> bool:
        """Resize the share to ``most`` bytes if half of the budget stays free. Return False if not; nothing changed."""
        budget = self._budget
        return 2 * (budget.reserved_bytes + most) <= budget.max_bytes and self.has(most)

    def blocks(self, cut_off: Callable[[], object]) -> None:
        """Record that the reader is stalled: ``cut_off``, which must not wait, is called if others need the room."""
        if self.reserved_bytes:
            self._budget.blocks(self, cut_off)

    def moves(self) -> None:
        """Record that the reader has accepted something. Idempotent."""
        self._budget.moves(self)

    async def take(self, least: int, most: int) -> int:
        """Resize the share to between ``least`` and ``most`` bytes as soon as there is room; return its size.

        Raises:
          Overloaded: there was no room in time; the share is empty.
        """
        self.release()
        self.reserved_bytes = await self._budget.take(least, most)
        return self.reserved_bytes

    def refusal(self) -> Overloaded:
        return self._budget.refusal()

    def release(self) -> None:
        """Release everything. Idempotent."""
        if self.reserved_bytes:
            reserved, self.reserved_bytes = self.reserved_bytes, 0
            self._budget.resize(reserved, 0)
