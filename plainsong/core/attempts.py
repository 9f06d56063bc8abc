"""One call as a series of attempts: when to try again, where, after what pause, and what to say at the end.

Tried again is only what may be: reading, always; a change, when the failed attempt has certainly not taken,
or when making it twice is the same as once. What the caller is told in the end covers all attempts: if one of
them may have taken, the outcome is unknown, whatever the last one was answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from plainsong.core.answers import error_of
from plainsong.core.effects import Failure, Now, Pause, Request, Send
from plainsong.core.places import Places, is_elsewhere
from plainsong.errors import ConnectionLost, DeadlineExceeded, UnexpectedAnswer
from plainsong.protocol.errors import MalformedBody, PlainsongError, QuotaExceeded, TransactionsUnavailable, Unavailable
from plainsong.protocol.frames import BrokenFrames

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.core.effects import Answer, Steps
    from plainsong.settings import Settings

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0

#: What repeating a call does: nothing happens by reading; the same state results; it may happen twice.
Repeat = Literal["reading", "harmless", "twice"]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, how its answer is read, and what happens when it is sent again."""

    request: Request
    read: Callable[[Answer], T]
    repeat: Repeat = "reading"
    wait_s: float = 0.0
    """How long the daemon was asked to hold its answer."""
    outlasts: bool = False
    """Whether a transaction service that is away is waited for: it was there a moment ago."""


def outlasting(call: Call[T]) -> Call[T]:
    """The same call, inside a transaction that the service has begun."""
    return replace(call, outlasts=True)


@dataclass(slots=True)
class Backoff:
    """Pauses that double, each shortened by up to half so that many clients do not come back at once."""

    random: Callable[[], float]
    """A number from 0 to 1."""
    count: int = 0

    def next_s(self, error: PlainsongError) -> float:
        """The pause after ``error``: at least what it asked for."""
        pause: float = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.count, 16)) * (1 - self.random() / 2)
        self.count += 1
        return max(pause, error.retry_after_s or 0)


def attempts(
    call: Call[T],
    settings: Settings,
    places: Places,
    random: Callable[[], float],
    *,
    deadline_s: float | None = None,
    endless: bool = False,
) -> Steps[T]:
    """The answer to ``call``, after as many attempts as are allowed.

    Args:
      deadline_s: instead of the settings' own.
      endless: no deadline: try until it works or fails for good.
    Raises:
      PlainsongError: ``outcome`` covers all attempts.
    """
    limit_s = (settings.deadline_s if deadline_s is None else deadline_s) + call.wait_s
    started_s: float = yield Now()
    backoff = Backoff(random)
    tries, in_doubt = 0, False
    now_s = started_s
    while True:
        left_s = float("inf") if endless else started_s + limit_s - now_s
        url = places.where(call.request.path)
        timeout_s = min(settings.request_timeout_s + call.wait_s, left_s)
        connect_s = places.connect_s(url, min(settings.connect_timeout_s, timeout_s))
        answer = yield Send(url, call.request, connect_s, timeout_s)
        result, error = read_answer(call, answer, url)
        goes_back = places.heard(call.request.path, url, answer, error)
        if error is None:
            return cast("T", result)
        if goes_back:
            now_s = yield Now()
            if endless or now_s < started_s + limit_s:
                continue
        tries += 1
        again = may_repeat(call.repeat, error, outlasts=call.outlasts)
        again = again and (settings.retry or endless or _first_round(tries, places, error))
        if call.repeat == "reading":
            error.outcome = "not-applied"
        in_doubt |= error.outcome == "unknown"
        if not again:
            raise _covering(error, in_doubt)
        pause_s = 0.0 if _first_round(tries, places, error) else backoff.next_s(error)
        now_s = yield Now()
        if not endless and now_s + pause_s >= started_s + limit_s:
            raise _late(error, tries, limit_s, in_doubt)
        if pause_s:
            yield Pause(pause_s)
            now_s = yield Now()
            if not endless and now_s >= started_s + limit_s:  # a busy machine wakes whoever sleeps later
                raise _late(error, tries, limit_s, in_doubt)


def read_answer(call: Call[T], answer: Answer | Failure, url: str) -> tuple[Any, PlainsongError | None]:
    """What an answer says, or what went wrong. A body that does not decode is an error like a broken connection."""
    error = error_of(answer, url)
    if error is not None or isinstance(answer, Failure):
        return None, error
    try:
        return call.read(answer), None
    except (MalformedBody, BrokenFrames, ValueError, KeyError, TypeError) as broken:
        lost = UnexpectedAnswer(
            f"{url}: the answer cannot be read: {broken!r}", hint="is the daemon of another version?"
        )
        lost.__cause__ = broken
        # What was asked for did happen: the status said so.
        lost.outcome = "applied"
        return None, lost


def may_repeat(repeat: Repeat, error: PlainsongError, *, outlasts: bool = False) -> bool:
    """Whether an attempt that failed so may be followed by another."""
    if isinstance(error, TransactionsUnavailable) and not outlasts:
        return False  # plain work goes on; this one needs somebody's attention
    if isinstance(error, (ConnectionLost, DeadlineExceeded, UnexpectedAnswer)):
        passing = not isinstance(error, UnexpectedAnswer) or (repeat == "reading" and error.outcome != "applied")
        return passing and (repeat != "twice" or error.outcome == "not-applied")
    if isinstance(error, (Unavailable, QuotaExceeded)):
        return repeat != "twice" or error.outcome == "not-applied"
    return False


def _first_round(tries: int, places: Places, error: PlainsongError) -> bool:
    """Whether there is a place that has not been tried, and may do better."""
    return tries < len(places.urls) and is_elsewhere(error)


def _covering(error: PlainsongError, in_doubt: bool) -> PlainsongError:
    if in_doubt and error.outcome == "not-applied":
        error.outcome = "unknown"
        error.hint = (
            f"an earlier attempt may have taken; {error.hint}" if error.hint else "an earlier attempt may have taken"
        )
    return error


def _late(error: PlainsongError, tries: int, limit_s: float, in_doubt: bool) -> PlainsongError:
    times = "1 attempt" if tries == 1 else f"{tries} attempts"
    late = DeadlineExceeded(
        f"{times} within {limit_s:g} s; the last: {error.detail}",
        outcome="unknown" if in_doubt else "not-applied",
        hint=error.hint,
    )
    late.__cause__ = error
    return late
