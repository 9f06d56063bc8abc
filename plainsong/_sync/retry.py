# Written by scripts/unasync.py from plainsong/_async/retry.py: change that, and run it (make sync).
"""Sends calls and retries them: when, where, after what pause, and the error at the end."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, TypeVar

from plainsong import calls
from plainsong._sync import _backend
from plainsong.calls import Send
from plainsong.messages import MessageId
from plainsong.positions import NEWEST, as_bound, parse_start
from plainsong.protocol import ids
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import InvalidParameter
from plainsong.retry import (
    PAUSES_S,
    Places,
    cover_attempts,
    deadline_passed,
    has_untried_url,
    may_repeat,
    owned_part,
    pause_after,
    read_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong._sync._pool import Pool
    from plainsong.calls import Call
    from plainsong.positions import Start
    from plainsong.protocol.errors import PlainsongError
    from plainsong.settings import Settings

T = TypeVar("T")


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Channel:
    """Sends the calls of one client to its daemons, and repeats them while that is safe.

    Args:
      random: a number from 0 to 1.
      wall_ms: this computer's time of day, in milliseconds since 1970.
      clock: monotonic seconds, which time transactions.
      endless: no call has a deadline.
    """

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        *,
        random: Callable[[], float] = random.random,
        wall_ms: Callable[[], int] = _wall_ms,
        clock: Callable[[], float] = time.monotonic,
        places: Places | None = None,
        endless: bool = False,
    ) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self.pool = pool
        self.places = places or Places(settings.urls, follow=settings.follow_owners, clock=clock)
        self.endless = endless
        self.random = random
        self.wall_ms = wall_ms
        self.clock = clock
        #: The platform's; tests replace them.
        self.now = _backend.now
        self.sleep = _backend.sleep

    def without_end(self) -> Channel:
        """A copy without deadlines: every call is retried until it succeeds or fails for good."""
        endless = Channel(
            self.settings,
            self.pool,
            random=self.random,
            wall_ms=self.wall_ms,
            clock=self.clock,
            places=self.places,
            endless=True,
        )
        endless.now, endless.sleep = self.now, self.sleep
        return endless

    def call(self, call: Call[T], deadline_s: float | None = None, *, on_send: Callable[[], None] | None = None) -> T:
        """The answer to ``call``, after as many attempts as are allowed.

        If any attempt may have succeeded, the outcome of a failure is unknown, whatever the last answer was.

        Args:
          deadline_s: instead of the settings' own.
          on_send: called before each attempt.
        Raises:
          PlainsongError: ``outcome`` covers all attempts.
        """
        settings, places, endless = self.settings, self.places, self.endless
        limit_s = (settings.deadline_s if deadline_s is None else deadline_s) + call.wait_s
        part = owned_part(call.request.path)
        now_s = self.now()
        over_s = float("inf") if endless else now_s + limit_s
        backoff: Backoff | None = None
        tries, in_doubt = 0, False
        while True:
            url = places.where(part)
            timeout_s = min(settings.request_timeout_s + call.wait_s, over_s - now_s)
            if on_send is not None:
                on_send()
            answer = self.pool.carry(
                Send(url, call.request, places.connect_s(url, min(settings.connect_timeout_s, timeout_s)), timeout_s)
            )
            result, error = read_answer(call, answer, url)
            owner_failed = places.note_answer(part, url, answer, error)
            if error is None:
                return result  # type: ignore[no-any-return] # the call says what it is
            now_s = self.now()
            if owner_failed and now_s < over_s:
                continue
            tries += 1
            at_once = has_untried_url(tries, places, error)
            again = may_repeat(call.repeat, error, waits_for_service=call.waits_for_service) and (
                settings.retry or endless or at_once
            )
            if call.repeat == "reading":
                error.outcome = "not-applied"
            in_doubt |= error.outcome == "unknown"
            if not again:
                raise cover_attempts(error, in_doubt)
            if backoff is None:
                backoff = Backoff(PAUSES_S, self.random)
            pause_s = 0.0 if at_once else pause_after(error, backoff)
            if now_s + pause_s >= over_s:
                raise deadline_passed(error, tries, limit_s, in_doubt)
            if pause_s:
                self.sleep(pause_s)
                now_s = self.now()
                if now_s >= over_s:  # a busy machine may oversleep
                    raise deadline_passed(error, tries, limit_s, in_doubt)

    def attempt(self, call: Call[T], left_s: float) -> tuple[T | None, PlainsongError | None]:
        """Makes one attempt within ``left_s``; returns the answer or the error. The next one may use another URL."""
        settings, places = self.settings, self.places
        part = owned_part(call.request.path)
        timeout_s = min(settings.request_timeout_s, left_s)
        url = places.where(part)
        connect_s = places.connect_s(url, min(settings.connect_timeout_s, timeout_s))
        answer = self.pool.carry(Send(url, call.request, connect_s, timeout_s))
        result, error = read_answer(call, answer, url)
        places.note_answer(part, url, answer, error)
        return result, error

    # --- where to start --------------------------------------------------------------------------

    def resolve(self, topic: str, start: Start, deadline_s: float | None = None) -> bytes | int | None:
        """A start as an id, a time or None for the oldest; queries the daemon for ``newest``."""
        if start != NEWEST:
            return parse_start(start, self.wall_ms())
        stats = self.call(calls.topic_stats(self.namespace, topic), deadline_s)
        newest, end = stats.get("newestId"), stats.get("end")
        if newest is None and end is not None and int(end, 16):
            # The newest messages have expired: continue before the topic's end.
            return ids.before(bytes.fromhex(end))
        return None if newest is None else bytes(MessageId(newest))

    def resolve_end(self, topic: str, until: Start, deadline_s: float | None = None) -> bytes | None:
        """An end as a bound, exclusive; ``newest`` ends after the newest message there is now."""
        position = self.resolve(topic, until, deadline_s)
        if position is None:
            return None
        return ids.after(position) if until == NEWEST and isinstance(position, bytes) else as_bound(position)

    def position_of_last(self, topic: str, count: int) -> MessageId | None:
        """The id before the last ``count`` messages; None: the topic has no more than that."""
        if count < 0:
            raise InvalidParameter(f"count is {count}", hint="use 0 or more")
        all_of_it = self.call(calls.topic_offsets(self.namespace, topic, {}))
        before = int(all_of_it["count"]) - count
        if before <= 0:
            return None
        bounds = {"maxMessages": before, "end": all_of_it["end"]}
        upto = self.call(calls.topic_offsets(self.namespace, topic, bounds))
        return MessageId((int.from_bytes(MessageId(upto["end"]), "big") - 1).to_bytes(20, "big"))
