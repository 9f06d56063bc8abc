# Written by scripts/unasync.py from plainsong/_async/retry.py: change that, and run it (make sync).
"""Sends calls and retries them: when, where, after what pause, and the error at the end."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong import calls
from plainsong._sync import _backend
from plainsong.calls import Send, service_of, transaction_service, waiting_for_service
from plainsong.messages import MessageId
from plainsong.positions import NEWEST, as_bound, now_ms, parse_start
from plainsong.protocol import ids
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import InvalidParameter, TransactionsUnavailable
from plainsong.retry import (
    PAUSES_S,
    UNCOMMITTED,
    Places,
    ReaderStopped,
    cover_attempts,
    deadline_passed,
    exchanged,
    has_untried_url,
    may_repeat,
    owned_part,
    pause_after,
    read_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong._sync._pool import Pool
    from plainsong.calls import Answer, Call, Failure
    from plainsong.positions import Start
    from plainsong.protocol.answers.topics import Offsets
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.requests import Isolation
    from plainsong.settings import Settings

T = TypeVar("T")

log = logging.getLogger("plainsong.client")

#: Time limit for asking which service decides transactions.
SERVICE_S = 5.0


class Channel:
    """Sends the calls of one client to its daemons, and repeats them while that is safe.

    Args:
      random: a number from 0 to 1.
      wall_ms: this computer's time of day, in milliseconds since 1970.
      clock: monotonic seconds, which time transactions.
      endless: no call has a deadline.
      stop: ends the calls of one reader.
    """

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        *,
        random: Callable[[], float] = random.random,
        wall_ms: Callable[[], int] = now_ms,
        clock: Callable[[], float] = time.monotonic,
        places: Places | None = None,
        endless: bool = False,
        stop: _backend.ReaderStop | None = None,
    ) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self.pool = pool
        self.places = places or Places(
            settings.urls, follow=settings.follow_owners, may_go_to=settings.credentials.may_go_to, clock=clock
        )
        self.endless = endless
        self.stop = stop
        #: When every call ends.
        self.until_s = float("inf")
        #: The error of the last call that ended by its deadline.
        self.passed: PlainsongError | None = None
        self.random = random
        self.wall_ms = wall_ms
        self.clock = clock
        #: The platform's; tests replace them.
        self.now = _backend.now
        self.sleep: Callable[[float], None] = _backend.sleep

    def for_reader(self, stop: _backend.ReaderStop, *, endless: bool) -> Channel:
        """A copy whose calls ``stop`` ends. If ``endless``, every call is retried until it succeeds or fails for good."""
        copy = Channel(
            self.settings,
            self.pool,
            random=self.random,
            wall_ms=self.wall_ms,
            clock=self.clock,
            places=self.places,
            endless=endless,
            stop=stop,
        )
        copy.now, copy.sleep = self.now, self.sleep
        if self.sleep is _backend.sleep:
            copy.sleep = stop.sleep
        return copy

    def call(self, call: Call[T], deadline_s: float | None = None, *, on_send: Callable[[], None] | None = None) -> T:
        """The answer to ``call``, after as many attempts as are allowed.

        If any attempt may have succeeded, the outcome of a failure is unknown, whatever the last answer was.

        Args:
          deadline_s: instead of the settings' own.
          on_send: called before each attempt.
        Raises:
          PlainsongError: ``outcome`` covers all attempts. ReaderStopped: by ``stop``.
        """
        settings, places, endless = self.settings, self.places, self.endless
        limit_s = (settings.deadline_s if deadline_s is None else deadline_s) + call.wait_s
        part = owned_part(call.request.path)
        now_s = self.now()
        over_s = self.until_s if endless else min(self.until_s, now_s + limit_s)
        backoff: Backoff | None = None
        tries, in_doubt = 0, False
        while True:
            url = places.where(part)
            body_s = places.upload_s(url, len(call.request.body))
            timeout_s = min(settings.request_timeout_s + body_s + call.wait_s, over_s - now_s)
            if on_send is not None:
                on_send()
            connect_s = places.connect_s(url, min(settings.connect_timeout_s, timeout_s))
            longest_s = over_s - now_s if call.in_pieces else None
            answer = self._carry(Send(url, call.request, connect_s, timeout_s, self.stop, longest_s))
            result, error = read_answer(call, answer, url)
            owner_failed = places.note_answer(part, url, answer, error)
            if error is None:
                return result  # type: ignore[no-any-return] # the call says what it is
            if self.stop is not None and self.stop.is_set:
                raise ReaderStopped
            if call.again is not None and (other := call.again(error)) is not None:
                call = call._replace(request=other.request, in_pieces=other.in_pieces)
            now_s = self.now()
            places.note_first(error, now_s, settings.wait_for_daemon_s)
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
                self.passed = deadline_passed(error, tries, limit_s, in_doubt)
                raise self.passed
            if pause_s:
                log.debug("retrying in %.2f s: %s", pause_s, error.detail)
                self.sleep(pause_s)
                if self.stop is not None and self.stop.is_set:
                    raise ReaderStopped
                now_s = self.now()
                if now_s >= over_s:  # a busy machine may oversleep
                    self.passed = deadline_passed(error, tries, limit_s, in_doubt)
                    raise self.passed

    def attempt(self, call: Call[T], left_s: float) -> tuple[T | None, PlainsongError | None]:
        """Makes one attempt within ``left_s``; returns the answer or the error. The next one may use another URL."""
        settings, places = self.settings, self.places
        part = owned_part(call.request.path)
        url = places.where(part)
        timeout_s = min(settings.request_timeout_s + places.upload_s(url, len(call.request.body)), left_s)
        connect_s = places.connect_s(url, min(settings.connect_timeout_s, timeout_s))
        answer = self._carry(Send(url, call.request, connect_s, timeout_s))
        result, error = read_answer(call, answer, url)
        places.note_answer(part, url, answer, error)
        if error is not None:
            places.note_first(error, self.now(), settings.wait_for_daemon_s)
        return result, error

    def _carry(self, send: Send) -> Answer | Failure:
        began_s = self.now()
        answer = self.pool.carry(send) if self.stop is None else self.stop.during(self.pool.carry, send)
        if answer is None:
            raise ReaderStopped
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s in %.1f ms", exchanged(send, answer), (self.now() - began_s) * 1000)
        return answer

    # --- isolation -------------------------------------------------------------------------------

    def read(
        self, make: Callable[[Isolation], Call[T]], isolation: Isolation | None, deadline_s: float | None = None
    ) -> T:
        """The answer to a read with this isolation. None: committed if the daemon can tell, otherwise uncommitted.

        Raises:
          as ``call``; TransactionsUnavailable: an explicit ``committed`` cannot be served, or the service is
            unavailable.
        """
        if isolation is not None:
            return self.call(make(isolation), deadline_s)
        places = self.places
        if not places.is_service_off:
            try:
                return self.call(make("committed"), deadline_s)
            except TransactionsUnavailable:
                service = self._transaction_service()
                if service not in ("off", "tephra"):
                    if self.endless or not self.settings.retry:
                        raise  # a reader that follows has its own patience
                    return self.call(waiting_for_service(make("committed")), deadline_s)
                if not places.said_uncommitted:
                    places.said_uncommitted = True
                    log.warning(UNCOMMITTED[service])
                # A Tephra service may return; a service that is off stays off while the daemon runs.
                if service == "off":
                    places.note_service_off()
        return self.call(make("uncommitted"), deadline_s)

    def _transaction_service(self) -> str:
        """Queries which service decides transactions; empty if the daemon does not answer."""
        url, settings = self.places.current, self.settings
        timeout_s = min(settings.request_timeout_s, SERVICE_S)
        connect_s = min(settings.connect_timeout_s, timeout_s)
        return service_of(self._carry(Send(url, transaction_service(), connect_s, timeout_s, self.stop)))

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

    def position_of_last(
        self, topic: str, count: int, isolation: Isolation | None = None, as_of_ms: int | None = None
    ) -> MessageId | None:
        """The id before the last ``count`` messages of that isolation; None: the topic has no more than that."""
        if count < 0:
            raise InvalidParameter(f"count is {count}", hint="use 0 or more")

        def offsets(bounds: dict[str, Any]) -> Callable[[Isolation], Call[Offsets]]:
            bounds |= {} if as_of_ms is None else {"asOfMs": as_of_ms}
            return lambda isolation: calls.topic_offsets(self.namespace, topic, {**bounds, "isolation": isolation})

        all_of_it = self.read(offsets({}), isolation)
        before = int(all_of_it["count"]) - count
        if before <= 0:
            return None
        upto = self.read(offsets({"maxMessages": before, "end": all_of_it["end"]}), isolation)
        return MessageId((int.from_bytes(MessageId(upto["end"]), "big") - 1).to_bytes(20, "big"))
