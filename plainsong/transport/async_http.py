"""HTTP on event loops, with httpcore: headers, time limits, and a distinction of failures before anything was sent."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpcore2

from plainsong.calls import Answer, Failure, Send
from plainsong.transport.dialing import look_up, no_thread, numeric_addresses
from plainsong.transport.http import head_of, place_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")
NO_LIMIT_S = 3600.0

#: Added to the time-out of a whole exchange.
GRACE_S = 0.05

#: Raised before any byte of the request was sent.
NOTHING_SENT = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.UnsupportedProtocol,
    httpcore2.LocalProtocolError,
    httpcore2.ProxyError,
)
TIME_OVER = (httpcore2.ReadTimeout, httpcore2.WriteTimeout)
#: Raised when the daemon may have executed the request; includes a truncated answer.
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, OSError)


def runs_in_trio() -> bool:
    """True if the calling task is a trio task."""
    if (trio := sys.modules.get("trio")) is None:
        return False
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def running_loop() -> object:
    """Return the event loop of the calling task."""
    return sys.modules["trio"].lowlevel.current_trio_token() if runs_in_trio() else asyncio.get_running_loop()


#: The maximum number of concurrent name lookups.
MAX_LOOKUPS = 1_000
_lookups: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("plainsong_lookups")


async def first_connected(host: str, port: int, timeout_s: float, connect: Callable[[str, float], Awaitable[T]]) -> T:
    """Connect to the first address of ``host`` that answers, and return the connection.

    The event loop's own resolver is not used: its threads cannot be cancelled, and asyncio waits for them at shutdown.

    Args:
      connect: connects to an address, given its time limit in seconds.
    Raises:
      OSError, including TimeoutError; and whatever ``connect`` raises for the last address.
    """
    until_s = anyio.current_time() + timeout_s
    addresses = numeric_addresses(host, port)
    if addresses is None:
        limiter = _lookups.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(MAX_LOOKUPS)
            _lookups.set(limiter)
        work = partial(look_up, host, port, timeout_s)
        try:
            addresses = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        except RuntimeError as error:  # the system cannot start another thread
            raise no_thread(host, error) from error
    for place, (_, address) in enumerate(addresses):
        left_s = max(0.0, until_s - anyio.current_time())
        scope = f"%{address[3]}" if len(address) == 4 and address[3] and "%" not in address[0] else ""
        limit_s = left_s / (len(addresses) - place)  # an address that does not answer leaves time for the others
        try:
            with anyio.fail_after(limit_s):
                return await connect(address[0] + scope, limit_s)
        except (OSError, *NOTHING_SENT):
            if place == len(addresses) - 1:
                raise
    raise AssertionError("getaddrinfo returns an address, or raises")


class Network(httpcore2.AsyncNetworkBackend):
    """httpcore's connections, with name resolution within their time limit."""

    def __init__(self) -> None:
        self._inner = httpcore2.TrioBackend() if runs_in_trio() else httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect as the inner backend does. Raises ConnectTimeout, ConnectError."""

        async def connect(address: str, limit_s: float) -> httpcore2.AsyncNetworkStream:
            return await self._inner.connect_tcp(address, port, limit_s, local_address, socket_options)

        try:
            return await first_connected(host, port, NO_LIMIT_S if timeout is None else timeout, connect)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore2.AsyncNetworkStream:
        """Connect as the inner backend does."""
        return await self._inner.connect_unix_socket(path, timeout, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Sleep as the inner backend does."""
        await self._inner.sleep(seconds)


def http_request(send: Send, timeout_s: float, more_headers: Sequence[tuple[bytes, bytes]] = ()) -> httpcore2.Request:
    """Return the request for httpcore, which limits each step; the callers limit the whole exchange."""
    scheme, host, port, _, netloc = place_of(send.url)
    target, headers = head_of(send, more_headers)
    request = send.request
    if scheme == b"unix":  # the pool has the path of the socket
        scheme, host = b"http", netloc
    limits = {"connect": send.connect_timeout_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
    return httpcore2.Request(
        request.method.encode("ascii"),
        httpcore2.URL(scheme=scheme, host=host, port=port, target=target),
        headers=headers,
        content=request.body,
        extensions={"timeout": limits},
    )


class SendProgress:
    """Records whether the first byte of a request may have been sent."""

    def __init__(self, request: httpcore2.Request) -> None:
        self.has_begun = False
        self._extensions = request.extensions
        self._extensions["trace"] = self._note

    async def _note(self, event: str, info: object) -> None:
        if event.endswith(".send_request_headers.started"):
            self.has_begun = True
            self._extensions.pop("trace", None)  # later events are not needed, and each costs a call


async def exchange(
    pool: httpcore2.AsyncConnectionPool,
    send: Send,
    limit_s: float,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
    max_answer_bytes: float = inf,
) -> Answer | Failure:
    """Send a request and return its answer.

    Args:
      limit_s: the time-out of the whole exchange; ``send.timeout_s`` limits each of its steps.
      max_answer_bytes: the maximum number of bytes to read from the response's body.
    """
    request = http_request(send, send.timeout_s, more_headers)
    progress = SendProgress(request)
    try:
        # httpcore's limits, which show whether anything was sent, should pass first.
        with anyio.move_on_after(limit_s + GRACE_S):
            response = await pool.handle_async_request(request)
            try:
                return _answer_of(response, await _body_of(response, max_answer_bytes))
            finally:
                await response.aclose()
    except (*NOTHING_SENT, *TIME_OVER, *BROKEN) as error:
        return _failure_of(error, send.timeout_s)
    if not progress.has_begun:  # in a busy program httpcore's limit may have passed too, but this one was noticed first
        return Failure("connect", f"no connection within {limit_s:g} s")
    return Failure("timeout", f"no answer within {limit_s:g} s")


async def _body_of(response: httpcore2.Response, max_bytes: float) -> bytes:
    chunks, size = [], 0
    async for chunk in response.aiter_stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            return b"".join(chunks)[: int(max_bytes)]
    return b"".join(chunks)


def _answer_of(response: httpcore2.Response, body: bytes) -> Answer:
    """Convert a complete answer."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    return Answer(response.status, headers, body)


def _failure_of(error: Exception, timeout_s: float) -> Failure:
    """Classify an exception of the library or the operating system."""
    text = str(error) or type(error).__name__
    if isinstance(error, NOTHING_SENT):
        return Failure("connect", text, error)
    if isinstance(error, TIME_OVER):
        return Failure("timeout", f"no answer within {timeout_s:g} s", error)
    return Failure("lost", text, error)
