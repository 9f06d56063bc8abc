"""Makes answers, and reads requests, without blocking the event loop: large ones in steps or in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import trio

from broker.http.messages import Answer, BodyPieces
from broker.http.route import JSON_TYPE
from plainsong.protocol.codec import AVRO
from plainsong.protocol.codec.json_values import between_pieces, compact
from storage.loop import nap
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plainsong.protocol.codec import Codec

T = TypeVar("T")


def json_answer(value: Any, *, status: int = 200, headers: list[tuple[str, str]] | None = None) -> Answer:
    """Return ``value`` as an answer."""
    body = compact(value).encode()
    return Answer(status, body, JSON_TYPE, headers or [])


#: Longer bodies are decoded off the event loop, since they would block all other requests: 10 ns a byte for JSON. Avro
#: version 1 is so fast that only very large bodies are worth a thread.
LOOP_BYTES = 256 * 1024
LOOP_AVRO_BYTES = 4 * 1024 * 1024
#: Work on more bytes than this has its own thread, so that smaller work need not wait for it; large answers likewise.
LARGE_BYTES = 4 * 1024 * 1024
#: Answers up to this size are joined: that is faster than sending their pieces.
JOINED_BYTES = 2 * 1024 * 1024


async def off_loop(size: int, codec: Codec, work: Callable[[], T]) -> T:
    """Run ``work`` here, or in a thread if its size would block the event loop noticeably.

    There are two threads in all, one of them for large work. Work holds the interpreter lock, so more threads would not
    be faster, and each competes with the event loop for the lock. A large JSON body is parsed in pieces; between them
    the thread sleeps long enough for the loop to get the lock.
    """
    if size <= (LOOP_AVRO_BYTES if codec is AVRO else LOOP_BYTES):
        return work()
    return await in_thread(_politely, work, limiter=_limiter(_large if size > LARGE_BYTES else _medium))


def _politely(work: Callable[[], T]) -> T:
    """Run in a thread of ``off_loop``, which has its own context."""
    between_pieces.set(_let_the_loop_run)
    return work()


def _let_the_loop_run() -> None:
    nap(0.0001)


async def in_steps(size: int, pieces: Iterator[bytes], *, at_once_bytes: int = LOOP_BYTES) -> list[bytes]:
    """Return the pieces of an answer of about ``size`` bytes; a small one is made at once.

    A large one is made on the event loop, one piece in each turn, and one answer at a time: however many clients
    request large pages, a turn makes at most two pieces. Answers of up to ``LARGE_BYTES`` do not wait for larger ones.
    A thread would not be faster, since encoding holds the interpreter lock, and the event loop would have to wait for
    that lock after each of its system calls.
    """
    if size <= at_once_bytes:
        return list(pieces)
    made = []
    async with _limiter(_large_answers if size > LARGE_BYTES else _medium_answers):
        for piece in pieces:
            if piece:
                made.append(piece)
            await trio.lowlevel.checkpoint()
    return made


def body_of(made: list[bytes]) -> bytes | BodyPieces:
    """Return pieces as a body; large ones are not joined, which would block the event loop."""
    return b"".join(made) if sum(map(len, made)) <= JOINED_BYTES else BodyPieces(made)


_medium_answers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("medium answers")
_large_answers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("large answers")
_medium: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("medium work off the loop")
_large: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("large work off the loop")


def _limiter(of: trio.lowlevel.RunVar[trio.CapacityLimiter]) -> trio.CapacityLimiter:
    try:
        return of.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        of.set(limiter)
        return limiter
