"""A small HTTP client for driver and executors, with failover, retries, and one error type with a definite outcome.

It uses only the standard library, so that executors need nothing but our zip.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Says whether the request took effect.
Outcome = Literal["not-applied", "applied", "unknown"]
_OUTCOMES: dict[str, Outcome] = {"not-applied": "not-applied", "applied": "applied", "unknown": "unknown"}


class BrokerError(Exception):
    """The daemon refused a request, or could not be reached. Picklable: Spark sends it between processes."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        hint: str = "",
        outcome: Outcome = "not-applied",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, code, detail, hint, outcome, retry_after_s)
        #: The HTTP status; 0 without a response.
        self.status = status
        #: A code of docs/http.md, or ``unreachable`` without a response.
        self.code = code
        self.detail = detail
        self.hint = hint
        self.outcome: Outcome = outcome
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" + (f" ({self.hint})" if self.hint else "")

    def with_hint(self, further: str) -> BrokerError:
        """Return the error with a further hint."""
        hint = f"{self.hint}; {further}" if self.hint else further
        return BrokerError(self.status, self.code, self.detail, hint, self.outcome, self.retry_after_s)

    def after_all(self, may_have_happened: bool) -> BrokerError:
        """Return the error with an outcome for all attempts: unknown if an earlier one may have taken effect."""
        if not may_have_happened:
            return self
        return BrokerError(self.status, self.code, self.detail, self.hint, "unknown", self.retry_after_s)


def refused(url: str, status: int, headers: Mapping[str, str], body: bytes) -> BrokerError:
    """Make the error of an unsuccessful response, from a daemon or from another server at the URL."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "code" not in problem:
        shown = body[:200].decode("utf-8", "replace").strip()
        detail = f"{url} answered {status}, but not as a Plainsong daemon does: {shown!r}"
        return BrokerError(status, "unexpected_answer", detail, "check the option url", "unknown")
    return BrokerError(
        status,
        str(problem["code"]),
        str(problem.get("detail", "")),
        str(problem.get("hint") or ""),
        _OUTCOMES.get(str(problem.get("outcome")), "unknown"),
        _seconds(headers.get("retry-after")),
    )


def unreachable(url: str, why: str, *, attempts: int, seconds: float, outcome: Outcome) -> BrokerError:
    """Make the error of a missing or truncated response."""
    detail = f"no answer from {url}: {why}; attempts: {attempts}, in {seconds:.1f} s"
    return BrokerError(0, "unreachable", detail, "check that the daemon runs, and the option url", outcome)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None


# --- client ----------------------------------------------------------------------------------------

__all__ = ["Answer", "BrokerError", "Wire"]
JSON = "application/json"
#: A connection that was idle for longer is not reused; the daemon keeps idle connections for longer than this.
MAX_IDLE_S = 30.0
MAX_PAUSE_S = 10.0
#: Refusals that last longer than retries do: the caller decides whether to wait.
FINAL_CODES = frozenset({"transactions_unavailable", "topic_full", "low_space", "too_many_producers"})


class Answer(NamedTuple):
    """A successful response."""

    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)


@dataclass
class Wire:
    """A client of the daemon at ``urls``, for one thread at a time.

    It can be pickled. The connection is neither pickled nor used after a fork.
    """

    urls: tuple[str, ...]
    """On a connection error or a temporary refusal, the next one is tried."""
    deadline_s: float = 60.0
    """Time-out of each send and receive within an attempt; the request's own wait is added."""
    retries: int = 5
    """Further rounds through all URLs."""
    retry_interval_s: float = 0.2
    """The pause before the second round; it doubles before each further one, up to 10 s."""
    token_file: str | None = None
    """A file with a bearer token. Each new connection reads it; a 401 reads it again, once per request."""
    ca_file: str | None = None
    """The trusted authorities for https, PEM; None: the system's."""
    _connection: HTTPConnection | None = field(default=None, init=False, repr=False, compare=False)
    _owner: int = field(default=0, init=False, repr=False, compare=False)
    _used_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _at: int = field(default=0, init=False, repr=False, compare=False)
    _headers: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None, "_headers": {}}

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = JSON,
        accept: str | None = None,
        wait_s: float = 0.0,
        repeatable: bool = True,
        whole: Callable[[bytes], bool] | None = None,
        statuses: tuple[int, ...] = (200,),
    ) -> Answer:
        """Send a request, and retry it until there is a definite response or no retry is left.

        Args:
          wait_s: how long the request asks the daemon to wait before it responds.
          repeatable: the request is idempotent; if False, it is sent again only if it certainly did not happen.
          whole: returns True if a body is complete; an incomplete one counts as no response.
          statuses: statuses that count as success.
        Raises:
          BrokerError: the daemon refused or did not answer; ``outcome`` says whether the request happened.
        """
        headers = {"Content-Type": content_type, **({"Accept": accept} if accept else {})}
        begun_s = time.monotonic()
        happened = read_again = False
        last = unreachable(self.urls[0], "never asked", attempts=0, seconds=0.0, outcome="not-applied")
        for attempt in range((self.retries + 1) * len(self.urls)):
            if attempt:
                self._pause(attempt, last)
            sent = False
            try:
                connection = self._connected()
                connection.timeout = self.deadline_s + wait_s
                if connection.sock is None:
                    connection.connect()
                connection.sock.settimeout(connection.timeout)
                sent = True
                answer = self._exchange(connection, method, path, body, headers, statuses)
                if whole is None or whole(answer.body):
                    return answer
                raise HTTPException(f"the answer ended early, after {len(answer.body)} bytes")
            except BrokerError as error:
                last = error
                if error.status == 401 and not read_again and self._token_changed():
                    read_again = True
                    self.close()
                    continue
                if not _worth_a_retry(error, repeatable=repeatable):
                    raise error.after_all(happened) from None
                happened |= error.outcome == "unknown"
            except (OSError, HTTPException) as error:
                happened |= sent
                last = unreachable(
                    self.url,
                    _why(error),
                    attempts=attempt + 1,
                    seconds=time.monotonic() - begun_s,
                    outcome="unknown" if happened else "not-applied",
                )
                self.close()
                if sent and not repeatable:
                    break
            if len(self.urls) > 1:
                self._at += 1
                self.close()
        raise last.after_all(happened)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None and self._owner == os.getpid():
            connection.close()

    # --- one attempt ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL of the daemon that requests go to, until it does not answer."""
        return self.urls[self._at % len(self.urls)]

    def _connected(self) -> HTTPConnection:
        """Return the connection if this process opened it and used it recently; otherwise a new one."""
        if self._connection is not None:
            if self._owner == os.getpid() and time.monotonic() - self._used_s < MAX_IDLE_S:
                return self._connection
            self.close()
        parts = urlsplit(self.url)
        self._headers = {}
        if self.token_file is not None:
            self._headers["Authorization"] = f"Bearer {_token(self.token_file)}"
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            trusting = _trusting(self.ca_file)
            self._connection = HTTPSConnection(host, port, timeout=self.deadline_s, context=trusting)
        else:
            self._connection = HTTPConnection(host, port, timeout=self.deadline_s)
        self._owner = os.getpid()
        return self._connection

    def _token_changed(self) -> bool:
        """True if the token in the token file is not the one that was sent."""
        return self.token_file is not None and self._headers.get("Authorization") != f"Bearer {_token(self.token_file)}"

    def _exchange(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        statuses: tuple[int, ...],
    ) -> Answer:
        base = urlsplit(self.url).path.rstrip("/")
        connection.request(method, base + path, body, {**headers, **self._headers})
        answer: HTTPResponse = connection.getresponse()
        content = answer.read()
        self._used_s = time.monotonic()
        if answer.will_close:
            self.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if answer.status not in statuses:
            raise refused(self.url, answer.status, found, content)
        return Answer(found, content)

    def _pause(self, attempt: int, last: BrokerError) -> None:
        """Pause between rounds; within a round the next URL is tried at once."""
        round_, within = divmod(attempt, len(self.urls))
        if within == 0:
            pause_s = self.retry_interval_s * 2.0 ** (round_ - 1)
            time.sleep(min(MAX_PAUSE_S, max(pause_s, last.retry_after_s or 0.0)))


def _token(file: str) -> str:
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(
            0,
            "no_token",
            f"tokenFile cannot be read: {error}",
            "it must be on every host that runs Spark's Python",
        ) from error


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise BrokerError(
            0, "no_ca", f"caFile cannot be read: {error}", "it must be on every host that runs Spark's Python"
        ) from error


def _worth_a_retry(error: BrokerError, *, repeatable: bool) -> bool:
    if error.code in FINAL_CODES or error.status not in (502, 503, 504):
        return False
    return repeatable or error.outcome == "not-applied"


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
