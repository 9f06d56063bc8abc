"""Request bodies within bounds: one byte budget over all connections, one bound per body, gzip counted as it grows."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Self

import trio

from broker.http.answers import AnswerBudget
from protocol.errors import BodyTooLarge, MalformedBody, Overloaded, UnsupportedMediaType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

#: What a body must keep up once ``body_timeout_s`` is used up; a slow line is welcome, a slow loris is not.
MIN_BODY_BYTES_PER_S = 16 << 10
#: From here on a worker thread decompresses, so that nobody else waits.
INLINE_BYTES = 64 << 10
_STEP_BYTES = 1 << 20
_GZIP_WINDOW = 31


class BodyBudget:
    """The bytes that the bodies of all requests under way may hold together; and beside them, those of the answers."""

    __slots__ = ("answers", "held_bytes", "max_bytes")

    def __init__(self, max_bytes: int, answers: AnswerBudget | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.answers = answers or AnswerBudget()

    def hold(self) -> Holding:
        """A place for one request's bytes, nothing held yet."""
        return Holding(self)


class Holding:
    """What one request holds of the budget; given back at the end of the ``with`` block."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def grow(self, more_bytes: int) -> None:
        """Takes ``more_bytes`` of the budget.

        Raises:
          Overloaded: the budget has no more; nothing was taken.
        """
        budget = self._budget
        if budget.held_bytes + more_bytes > budget.max_bytes:
            raise Overloaded(
                f"bodies of {budget.held_bytes} bytes are under way, of {budget.max_bytes} that may be",
                hint="retry a little later, or raise http.max_inflight_bytes",
            )
        budget.held_bytes += more_bytes
        self.held_bytes += more_bytes

    def shrink(self, fewer_bytes: int) -> None:
        """Gives ``fewer_bytes`` of what is held back."""
        fewer_bytes = min(fewer_bytes, self.held_bytes)
        self._budget.held_bytes -= fewer_bytes
        self.held_bytes -= fewer_bytes

    def release(self) -> None:
        """Gives everything back; a second call does nothing."""
        self._budget.held_bytes -= self.held_bytes
        self.held_bytes = 0

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
    """When the rest of a body must be there, on the clock of ``started``."""
    return started + body_timeout_s + received_bytes / MIN_BODY_BYTES_PER_S


def needs_decoding(headers: Mapping[str, str]) -> bool:
    """Whether the body is sent in a content coding."""
    return headers.get("content-encoding", "identity") not in ("", "identity")


async def decoded_body(body: bytes, headers: Mapping[str, str], max_body_bytes: int, held: Holding) -> bytes:
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
        return _gunzipped(body, max_body_bytes, held)
    # Only integers are shared with the loop's thread, and it waits for nobody: a late look at the budget is harmless.
    return await trio.to_thread.run_sync(_gunzipped, body, max_body_bytes, held)


def _gunzipped(body: bytes, max_body_bytes: int, held: Holding) -> bytes:
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
                held.grow(len(part))
                unpacked += part
                if not part and not rest and not unpacker.eof:
                    raise MalformedBody(f"the gzip body breaks off after {len(body)} bytes")
            rest = unpacker.unused_data
    except zlib.error as error:
        raise MalformedBody(f"the body is not gzip: {error}") from None
    return bytes(unpacked)
