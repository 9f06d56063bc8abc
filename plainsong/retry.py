"""The rules of retries: when to repeat a call, at which URL, and what its failures mean. Only ``Places`` has a clock.

A read is always repeated. A change is repeated if the failed attempt certainly had no effect, or if a second effect
equals the first.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from plainsong.calls import Answer, Call, Failure, Repeat
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, UnexpectedAnswer, problem_error
from plainsong.protocol.errors import MalformedBody, PlainsongError, QuotaExceeded, TransactionsUnavailable, Unavailable
from plainsong.protocol.frames import BrokenFrames
from plainsong.protocol.plurals import counted
from plainsong.settings import upload_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plainsong.calls import Send
    from plainsong.protocol.backoff import Backoff

T = TypeVar("T")

#: The pauses before retries, in seconds.
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
#: OpenSSL's errors, in older and newer releases, for a response without TLS.
_NOT_TLS = ("wrong version number", "record layer failure")
#: The shortest pause, so that the clock advances between attempts.
MIN_PAUSE_S = 0.001


def pause_after(error: PlainsongError, backoff: Backoff) -> float:
    """Return the pause after a failed attempt, in seconds: at least the error's ``retry_after_s``.

    Before the first successful connection it is capped by the rest of ``wait_for_daemon_s``, so that the error is raised
    on time.
    """
    pause_s = max(backoff.failed(), error.retry_after_s or 0)
    if isinstance(error, ConnectFailed) and error.patience_left_s is not None:
        return min(pause_s, max(error.patience_left_s, MIN_PAUSE_S))
    return pause_s


def read_answer(call: Call[T], answer: Answer | Failure, url: str) -> tuple[Any, PlainsongError | None]:
    """Return the decoded response, or the error; UnexpectedAnswer, outcome ``applied``, for a success that cannot be decoded."""
    error = error_of(answer, url)
    if error is not None or isinstance(answer, Failure):
        return None, error
    try:
        return call.read(answer), None
    except (MalformedBody, BrokenFrames, ValueError, KeyError, TypeError) as broken:
        lost = UnexpectedAnswer(
            f"{url}: the answer cannot be read: {broken!r}",
            hint="check that client and daemon have compatible versions",
        )
        lost.__cause__ = broken
        # The status was a success, so the request took effect.
        lost.outcome = "applied"
        return None, lost


def may_repeat(repeat: Repeat, error: PlainsongError, *, waits_for_service: bool = False) -> bool:
    """True if another attempt may follow one that failed with ``error``."""
    if isinstance(error, ConnectFailed) and error.is_first:
        return False
    if isinstance(error, TransactionsUnavailable) and not waits_for_service:
        return False  # an outage of the service should reach the caller, who may have other work to do
    if isinstance(error, (ConnectionLost, DeadlineExceeded, UnexpectedAnswer)):
        passing = not isinstance(error, UnexpectedAnswer) or (repeat == "reading" and error.outcome != "applied")
        return passing and (repeat != "twice" or error.outcome == "not-applied")
    if isinstance(error, (Unavailable, QuotaExceeded)):
        return repeat != "twice" or error.outcome == "not-applied"
    return False


class ReaderStopped(Exception):
    """A reader was stopped."""


#: Logged once by a default read if the daemon does not decide transactions itself, by ``transactions.service``.
UNCOMMITTED = {
    "off": "the daemon has no transaction service: reading everything, including undecided and rolled-back messages",
    "tephra": "the daemon's Tephra does not answer: reading everything, including undecided and rolled-back messages",
}


def has_untried_url(tries: int, places: Places, error: PlainsongError) -> bool:
    """True if an untried URL remains that may succeed."""
    return tries < len(places.urls) and is_elsewhere(error)


def cover_attempts(error: PlainsongError, in_doubt: bool) -> PlainsongError:
    """Return the last attempt's error, with an outcome that covers all attempts."""
    if in_doubt and error.outcome == "not-applied":
        error.outcome = "unknown"
        error.hint = (
            f"an earlier attempt may have succeeded; {error.hint}"
            if error.hint
            else ("an earlier attempt may have succeeded")
        )
    return error


def deadline_passed(error: PlainsongError, tries: int, limit_s: float, in_doubt: bool) -> PlainsongError:
    """Make the error for a deadline that passes before another attempt."""
    times = counted(tries, "attempt")
    passed = DeadlineExceeded(
        f"{times} within {limit_s:g} s; the last: {error.detail}",
        outcome="unknown" if in_doubt else "not-applied",
        hint=error.hint,
    )
    passed.__cause__ = error
    return passed


def exchanged(send: Send, answer: Answer | Failure) -> str:
    """Format a request and its response in one line, for the log."""
    request = send.request
    said = (
        f"{answer.kind}: {answer.detail}"
        if isinstance(answer, Failure)
        else f"{answer.status}, {len(answer.body)} bytes"
    )
    return f"{request.method} {send.url}{request.path}, {len(request.body)} bytes: {said}"


# --- errors of answers ---------------------------------------------------------------------------


_MAX_RETRY_AFTER_S = 3600
CERTIFICATE_HINT = "give the file of its certificate authority: --ca-file, or ca_file= of the client"
MAX_CAUSES = 16


def error_of(answer: Answer | Failure, url: str) -> PlainsongError | None:
    """Return the error of a response, or None. Its ``outcome`` covers this attempt only."""
    if isinstance(answer, Failure):
        return _failed(answer, url)
    if 200 <= answer.status < 300:
        return None
    error = _problem_of(answer)
    if error is None:
        text = answer.body[:80].decode("utf-8", "replace")
        error = UnexpectedAnswer(
            f"{url} answered {answer.status}: {text!r}", hint="check that the URL is one of a Plainsong daemon"
        )
        if 400 <= answer.status < 500:
            error.outcome = "not-applied"
    retry_after = answer.headers.get("retry-after", "")
    if retry_after.isascii() and retry_after.isdigit():
        error.retry_after_s = min(int(retry_after[:9]), _MAX_RETRY_AFTER_S)
    return error


def _failed(failure: Failure, url: str) -> PlainsongError:
    detail = f"{url}: {failure.detail}"
    error: PlainsongError
    if failure.kind == "connect":
        hint = "start one with plainsong serve, or give another URL"
        if any(sign in failure.detail.lower() for sign in _NOT_TLS):
            hint = "that port does not speak TLS: use http://"
        said = f"no daemon answers at {detail}"
        if (why := _distrust(failure.cause)) is not None:
            said, hint = f"{url}: its certificate is not trusted: {why}", CERTIFICATE_HINT
        error = ConnectFailed(said, hint=hint)
        error.retry_after_s = 0  # no daemon answered, so none asked for a pause
    elif failure.kind == "timeout":
        error = DeadlineExceeded(detail, outcome="unknown", hint="request_timeout_s is its limit")
    else:
        error = ConnectionLost(detail)
    error.__cause__ = failure.cause
    return error


def _distrust(cause: BaseException | None) -> str | None:
    """Return why this client refused the server's certificate; None if it did not."""
    ssl = sys.modules.get("ssl")  # loaded by the first connection with TLS
    seen = 0
    while ssl is not None and cause is not None and seen < MAX_CAUSES:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return str(cause.verify_message)
        cause, seen = cause.__cause__ or cause.__context__, seen + 1
    return None


def _problem_of(answer: Answer) -> PlainsongError | None:
    """Return the error in a problem+json body; None if the body is something else."""
    if not answer.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        problem: Mapping[str, Any] = json.loads(answer.body)
        return problem_error(problem, answer.status)
    except (ValueError, AttributeError):
        return None


# --- URLs and owners -----------------------------------------------------------------------------


#: The most owners to cache. One more clears the cache, which later responses fill again.
MAX_OWNERS = 4096


#: An owner is close, or unreachable behind a load balancer; an unreachable one must cost little.
OWNER_CONNECT_S = 1.0


#: How long to avoid an owner that did not respond: the first pause and the longest; it doubles.
FIRST_AVOID_S = 30.0


MAX_AVOID_S = 960.0


#: How long to cache that a daemon has no transaction service.
SERVICE_OFF_S = 60.0


_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")


class Places:
    """The URLs and known owners of one client, shared by its threads.

    Args:
      follow: send requests to the owners that responses name.
      may_go_to: returns True if requests may be sent to a URL; other owners are not followed.
      clock: monotonic seconds.
    """

    __slots__ = (
        "_at",
        "_avoided",
        "_clock",
        "_first_refused_s",
        "_follow",
        "_may_go_to",
        "_off_until_s",
        "_owners",
        "_refused",
        "_was_reached",
        "said_uncommitted",
        "urls",
    )

    def __init__(
        self,
        urls: tuple[str, ...],
        *,
        follow: bool = True,
        may_go_to: Callable[[str], bool] = lambda url: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.urls = urls
        self._at = 0
        self._follow = follow
        self._may_go_to = may_go_to
        self._clock = clock
        self._was_reached = False
        self._refused = 0
        self._first_refused_s = 0.0
        self._off_until_s = -math.inf
        #: True once the client has logged that it reads everything instead.
        self.said_uncommitted = False
        #: ``owned_part`` of a path → URL of its owner.
        self._owners: dict[str, str] = {}
        #: Owners that did not respond → the end of the pause, and its length.
        self._avoided: dict[str, tuple[float, float]] = {}

    @property
    def current(self) -> str:
        """The given URL that last succeeded, or the next one to try."""
        return self.urls[self._at % len(self.urls)]

    @property
    def is_service_off(self) -> bool:
        """True if the daemon is known to have no transaction service, so that committed reads cannot work."""
        return self._clock() < self._off_until_s

    def note_service_off(self) -> None:
        """Record that the daemon has no transaction service; for a time only, since a restart may add one unnoticed."""
        self._off_until_s = self._clock() + SERVICE_OFF_S

    def leave(self, url: str) -> None:
        """Switches to the next given URL, unless another thread already has."""
        self._off_until_s = -math.inf  # the next one may have a transaction service
        if self.current == url:
            self._at = (self._at + 1) % len(self.urls)

    def where(self, part: str) -> str:
        """Return the URL for requests with this ``owned_part``."""
        owner = self._owners.get(part)
        if owner is None or self._avoided.get(owner, (0.0, 0.0))[0] > self._clock():
            return self.current
        return owner

    def upload_s(self, url: str, size: int) -> float:
        """Return the time beyond ``request_timeout_s`` that a request with a body of ``size`` bytes may take at ``url``.

        It equals the daemon's own allowance for a slow body: with less, a client on a slow line would resend the same
        body forever. With several URLs it is 0, so that a silent daemon is given up quickly.
        """
        return 0.0 if self.urls != (url,) else upload_s(size)

    def connect_s(self, url: str, timeout_s: float) -> float:
        """Return the connect timeout for ``url``: ``timeout_s``, capped for an owner."""
        return timeout_s if url in self.urls else min(timeout_s, OWNER_CONNECT_S)

    def note_answer(self, part: str, url: str, answer: Answer | Failure, error: PlainsongError | None) -> bool:
        """Updates the current URL and the cached owners from the result of a request.

        Returns:
          True if the request should be resent at once: it did not happen, because a cached owner did not respond or no
          longer owns the topic.
        """
        if isinstance(answer, Failure):
            self._off_until_s = -math.inf  # the daemon that responds next may have been restarted with a service
        if error is not None and is_elsewhere(error, followed=self._owners.get(part) == url):
            was_owner = self._owners.pop(part, None) == url
            if was_owner and not isinstance(answer, Failure) and error.code == "no_owner":
                return error.outcome == "not-applied"
            if was_owner:
                self._avoid(url)
                return error.outcome == "not-applied"
            self.leave(url)
        elif not isinstance(answer, Failure):
            self._was_reached = True
            self.remember_owner(part, url, answer.headers)
        return False

    def note_first(self, error: PlainsongError, now_s: float, patience_s: float) -> None:
        """Marks an error as not worth a retry: no URL has ever worked, for ``patience_s``.

        A refused first connection usually means a wrong URL, or a daemon that was never started.
        """
        if self._was_reached:
            return
        if not isinstance(error, ConnectFailed):
            self._was_reached = True
            return
        if not self._refused:
            self._first_refused_s = now_s
        self._refused += 1
        left_s = self._first_refused_s + patience_s - now_s
        error.is_first = self._refused >= len(self.urls) and left_s <= 0
        error.patience_left_s = left_s

    def remember_owner(self, part: str, url: str, headers: Mapping[str, str]) -> None:
        """Caches the owner that a response's headers name, if any."""
        address = headers.get("plainsong-owner")
        if address is None or not (self._follow and part and _ADDRESS.match(address)):
            return
        scheme, _, prefix, *_ = urlsplit(url)
        owner = f"{scheme}://{address}"
        if scheme not in ("http", "https") or prefix not in ("", "/"):
            return  # a URL with a path is a proxy's: do not bypass it
        if not self._may_go_to(owner):
            return
        if len(self._owners) >= MAX_OWNERS:
            self._owners, self._avoided = {}, {}
        self._owners[part] = owner

    def _avoid(self, owner: str) -> None:
        _, before_s = self._avoided.get(owner, (0.0, 0.0))
        pause_s = min(2 * before_s or FIRST_AVOID_S, MAX_AVOID_S)
        self._avoided[owner] = self._clock() + pause_s, pause_s


@lru_cache(maxsize=4096)
def owned_part(path: str) -> str:
    """Return the part of a path that has an owner: a topic, or ``transactions``; otherwise empty."""
    parts = path.partition("?")[0].split("/")
    if len(parts) > 5 and parts[4] == "topics":
        return "/".join(parts[3:6])
    return "transactions" if len(parts) > 2 and parts[2] == "transactions" else ""


def is_elsewhere(error: PlainsongError, *, followed: bool = False) -> bool:
    """True if another daemon may succeed. For a ``followed`` owner, also if the response is not a daemon's."""
    if isinstance(error, (ConnectFailed, ConnectionLost, DeadlineExceeded)):
        return True
    return error.code in ("shutting_down", "no_owner", "standby", "replication_unavailable") or (
        followed and isinstance(error, UnexpectedAnswer)
    )
