"""Bounds of the HTTP server: its settings, and the byte budgets over all request bodies and over all answers."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import trio

from plainsong.protocol.errors import BodyTooLarge, MalformedBody, Overloaded, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from broker.config import Config

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Bounds of both listeners, in bytes and seconds.

    Raises:
      ValueError: ``max_inflight_bytes`` cannot hold one body beside its decompressed form.
    """

    #: Serve the hot routes without hypercorn.
    lane: bool = True
    #: Of one request, as sent and decompressed; beyond it 413 ``body_too_large``.
    max_body_bytes: int = 64 * MIB
    #: Open at a time; beyond it 503 ``overloaded``.
    max_connections: int = 10_000
    #: Bodies of all requests under way; beyond it 503 ``overloaded``.
    max_inflight_bytes: int = 256 * MIB
    #: Answers that wait for their readers, in bytes; beyond it pages are cut, then 503 ``overloaded``.
    max_answer_bytes: int = 256 * MIB
    #: How long a connection may be idle between requests.
    keep_alive_s: float = 75.0
    #: From the first byte of a request to the end of its head.
    header_timeout_s: float = 10.0
    #: From the end of the head to the end of the body, and one second more per 16 KiB received.
    body_timeout_s: float = 30.0
    #: How long a reader may take nothing of its answer.
    send_timeout_s: float = 30.0
    #: Answers shorter than this are never compressed.
    gzip_min_bytes: int = 1 * KIB

    def __post_init__(self) -> None:
        if self.max_inflight_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"http.max_inflight_bytes ({self.max_inflight_bytes}) must be at least twice "
                f"http.max_body_bytes ({self.max_body_bytes})"
            )


def http_settings(config: Config) -> HttpSettings:
    """The HTTP server's part of the settings."""
    http = config.http
    return HttpSettings(
        lane=http.lane,
        max_body_bytes=http.max_body_bytes,
        max_connections=http.max_connections,
        max_inflight_bytes=http.max_inflight_bytes,
        max_answer_bytes=http.max_answer_bytes,
        keep_alive_s=http.keep_alive_s,
        header_timeout_s=http.header_timeout_s,
        body_timeout_s=http.body_timeout_s,
        send_timeout_s=http.send_timeout_s,
        gzip_min_bytes=http.gzip_min_bytes,
    )


# --- bodies ----------------------------------------------------------------------------------------


#: The least rate of a body once ``body_timeout_s`` is used up; a slow line is welcome, a slow loris is not.
MIN_BODY_BYTES_PER_S = 16 << 10
#: Larger bodies are decompressed by a worker thread, so that the event loop does not wait.
INLINE_BYTES = 64 << 10
_STEP_BYTES = 1 << 20
_GZIP_WINDOW = 31


class BodyBudget:
    """The memory of all request bodies under way; and beside it the budget of the answers."""

    __slots__ = ("answers", "max_bytes", "reserved_bytes")

    def __init__(self, max_bytes: int, answers: AnswerBudget | None = None) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.answers = answers or AnswerBudget()

    def reserve(self) -> Reservation:
        """A share for one request's bytes, empty at first."""
        return Reservation(self)


class Reservation:
    """One request's share of the budget; released at the end of the ``with`` block."""

    __slots__ = ("_budget", "reserved_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.reserved_bytes = 0

    def grow(self, more_bytes: int) -> None:
        """Takes ``more_bytes`` of the budget.

        Raises:
          Overloaded: the budget is used up; nothing was taken.
        """
        budget = self._budget
        if budget.reserved_bytes + more_bytes > budget.max_bytes:
            raise Overloaded(
                f"bodies of {budget.reserved_bytes} bytes are under way, of {budget.max_bytes} that may be",
                hint="retry a little later, or raise http.max_inflight_bytes",
            )
        budget.reserved_bytes += more_bytes
        self.reserved_bytes += more_bytes

    def shrink(self, fewer_bytes: int) -> None:
        """Gives back ``fewer_bytes``."""
        fewer_bytes = min(fewer_bytes, self.reserved_bytes)
        self._budget.reserved_bytes -= fewer_bytes
        self.reserved_bytes -= fewer_bytes

    def release(self) -> None:
        """Gives everything back. Idempotent."""
        self._budget.reserved_bytes -= self.reserved_bytes
        self.reserved_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def too_large(max_body_bytes: int) -> BodyTooLarge:
    """The refusal of a body over the bound."""
    return BodyTooLarge(
        f"a body may have {max_body_bytes} bytes", hint="send several requests, or raise http.max_body_bytes"
    )


def too_slow(received_bytes: int) -> MalformedBody:
    """The refusal of a body that did not arrive in time."""
    return MalformedBody(f"the body did not arrive in time: {received_bytes} bytes did", hint="send it faster")


def broke_off(received_bytes: int) -> MalformedBody:
    """The refusal of a body whose sender stopped in the middle."""
    return MalformedBody(f"the body breaks off after {received_bytes} bytes")


def body_deadline(started: float, received_bytes: int, body_timeout_s: float) -> float:
    """When the whole body must have arrived, on the clock of ``started``."""
    return started + body_timeout_s + received_bytes / MIN_BODY_BYTES_PER_S


def needs_decoding(headers: Mapping[str, str]) -> bool:
    """Whether the body is sent in a content coding."""
    return headers.get("content-encoding", "identity") not in ("", "identity")


async def decoded_body(body: bytes, headers: Mapping[str, str], max_body_bytes: int, reservation: Reservation) -> bytes:
    """``body`` without its content coding.

    Raises:
      UnsupportedMediaType: the coding is neither gzip nor identity.
      MalformedBody: it is not gzip, or breaks off.
      BodyTooLarge: it decompresses to more than ``max_body_bytes``.
      Overloaded: it decompresses to more than the budget has left.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip"):
        raise UnsupportedMediaType(f"the content encoding {coding!r} is not read here", hint="send gzip or identity")
    if len(body) <= INLINE_BYTES:
        return _gunzipped(body, max_body_bytes, reservation)
    # The thread shares only integers with the event loop, and a late reading of the budget is harmless.
    return await trio.to_thread.run_sync(_gunzipped, body, max_body_bytes, reservation)


def _gunzipped(body: bytes, max_body_bytes: int, reservation: Reservation) -> bytes:
    unpacked = bytearray()
    rest = body
    try:
        while rest:  # a gzip body may be several members, one after the other
            unpacker = zlib.decompressobj(_GZIP_WINDOW)
            while not unpacker.eof:
                part = unpacker.decompress(rest, _STEP_BYTES)
                rest = unpacker.unconsumed_tail
                if len(unpacked) + len(part) > max_body_bytes:
                    raise too_large(max_body_bytes)
                reservation.grow(len(part))
                unpacked += part
                if not part and not rest and not unpacker.eof:
                    raise MalformedBody(f"the gzip body breaks off after {len(body)} bytes")
            rest = unpacker.unused_data
    except zlib.error as error:
        raise MalformedBody(f"the body is not gzip: {error}") from None
    return bytes(unpacked)


# --- answers ---------------------------------------------------------------------------------------


#: Bodies up to this size are not counted: the kernel takes them at once, and a connection costs as much anyway.
FREE_BYTES = 4 << 10
#: Answers up to this size may use the last part of the budget, which larger ones may not.
SMALL_BYTES = 512 << 10
#: The last part, as a fraction of the budget.
LAST_PART = 8
#: A page takes at most this fraction of what is left, so that there is something for the next ones.
SHARE = 4
#: How long a request waits for room before it is refused.
PATIENCE_S = 2.0


class AnswerBudget:
    """The memory of all answers until their readers have taken them."""

    __slots__ = ("_large", "_small", "max_bytes", "patience_s", "refused", "reserved_bytes")

    def __init__(self, max_bytes: int = 1 << 62, patience_s: float = PATIENCE_S) -> None:
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self.reserved_bytes = 0
        #: Requests that were refused for lack of room.
        self.refused = 0
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()

    def room(self) -> AnswerRoom:
        """A share for the bytes of one answer at a time, empty at first."""
        return AnswerRoom(self)

    def share_of(self, least: int, most: int) -> int:
        """What a page may take now, from ``least`` to ``most`` bytes; 0: not even ``least`` is left."""
        if not self.reserved_bytes:
            return max(least, min(most, self.max_bytes))  # one answer is always possible, whatever its size
        left = self.max_bytes - self.reserved_bytes
        beyond_last_part = left - self.max_bytes // LAST_PART
        if least <= beyond_last_part:
            return min(most, max(least, beyond_last_part // SHARE))
        return least if least <= min(left, SMALL_BYTES) else 0

    def take_now(self, least: int, most: int) -> int:
        """Takes and returns what ``share_of`` allows; nothing while larger requests wait before it."""
        taken = 0 if self._large and least > SMALL_BYTES else self.share_of(least, most)
        self.reserved_bytes += taken
        return taken

    async def take(self, least: int, most: int) -> int:
        """Takes ``least`` to ``most`` bytes as soon as there is room. Raises Overloaded: there was none in time."""
        if taken := self.take_now(least, most):
            return taken
        waiting = _Waiting(least, most)
        queue = self._small if least <= SMALL_BYTES else self._large
        queue.append(waiting)
        try:
            with trio.move_on_after(self.patience_s):
                await waiting.granted.wait()
        except BaseException:
            if waiting.taken:
                self.give_back(waiting.taken)
            raise
        finally:
            if not waiting.taken:
                queue.remove(waiting)
                self.give_back(0)  # there may be room for those behind it
        if not waiting.taken:
            raise self.refusal()
        return waiting.taken

    def refusal(self) -> Overloaded:
        """The refusal of a request for which there is no room; counted."""
        self.refused += 1
        return Overloaded(
            f"answers of {self.reserved_bytes} bytes wait for their readers, of {self.max_bytes} that may",
            hint="retry a little later, or raise http.max_answer_bytes",
        )

    def give_back(self, fewer_bytes: int) -> None:
        """Gives back what was taken, and grants it to the requests that wait, in their order."""
        self.reserved_bytes -= fewer_bytes
        for queue in (self._small, self._large):
            while queue and (taken := self.share_of(queue[0].least, queue[0].most)):
                self.reserved_bytes += taken
                waiting = queue.popleft()
                waiting.taken = taken
                waiting.granted.set()


class _Waiting:
    """A request that waits for room, and has it when ``granted`` is set."""

    __slots__ = ("granted", "least", "most", "taken")

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.taken = 0
        self.granted = trio.Event()


class AnswerRoom:
    """One answer's share of the budget; released when the answer has left."""

    __slots__ = ("_budget", "reserved_bytes")

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self.reserved_bytes = 0

    def has(self, size: int) -> bool:
        """Changes the share to ``size`` bytes, more or fewer than before. False: there is no room, nothing changed."""
        more = size - self.reserved_bytes
        budget = self._budget
        if more <= 0:
            self.reserved_bytes = size
            if more:
                budget.give_back(-more)
            return True
        others = budget.reserved_bytes - self.reserved_bytes
        bound = budget.max_bytes if size <= SMALL_BYTES else budget.max_bytes - budget.max_bytes // LAST_PART
        if others and others + size > bound:
            return False
        budget.reserved_bytes += more
        self.reserved_bytes = size
        return True

    def must_have(self, size: int) -> None:
        """Changes the share to ``size`` bytes without a check, for an answer that cannot be refused any more."""
        self._budget.give_back(self.reserved_bytes - size)
        self.reserved_bytes = size

    def takes_now(self, most: int) -> bool:
        """Changes the share to ``most`` bytes if half of the budget stays free. False: nothing changed."""
        budget = self._budget
        return 2 * (budget.reserved_bytes + most) <= budget.max_bytes and self.has(most)

    async def take(self, least: int, most: int) -> int:
        """Changes the share to between ``least`` and ``most`` bytes, as soon as there is room; returns how many.

        Raises:
          Overloaded: there was no room in time; the share is empty.
        """
        self.release()
        self.reserved_bytes = await self._budget.take(least, most)
        return self.reserved_bytes

    def refusal(self) -> Overloaded:
        return self._budget.refusal()

    def release(self) -> None:
        """Gives everything back. Idempotent."""
        if self.reserved_bytes:
            reserved, self.reserved_bytes = self.reserved_bytes, 0
            self._budget.give_back(reserved)
