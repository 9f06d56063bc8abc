"""Keep-alive HTTP/1.1 connections for threads: h11 speaks the protocol, this module owns the sockets and their limits.

httpcore, which the asynchronous client uses, loads anyio and trio even for threads: two thirds of the time that importing
the client took. Its requests also cost twice the CPU.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import h11

from plainsong.calls import Answer, Failure
from plainsong.errors import Closed
from plainsong.transport.dialing import MIN_TIMEOUT_S, Dialing, NotResolved, dial
from plainsong.transport.http import KEEP_ALIVE_S, connect_unix, head_of, place_of

if TYPE_CHECKING:
    from plainsong.calls import Send
    from plainsong.credentials import Credentials
    from plainsong.settings import Settings

RECEIVE_BYTES = 1 << 18
#: The most bytes of an answer's head.
MAX_HEAD_BYTES = 100 << 10
#: A body up to here is joined to its head and sent by one system call.
SMALL_BODY_BYTES = 1 << 16


class Endpoint(NamedTuple):
    """A server; of a Unix socket ``host`` is its path, and ``port`` is 0."""

    host: str
    port: int
    tls: bool


class NotConnected(Exception):
    """Nothing was sent."""


class Kept:
    """An open connection between two requests, or during one."""

    __slots__ = ("idle_since_s", "is_closed", "origin", "socket")

    def __init__(self, origin: Endpoint, raw: socket.socket) -> None:
        self.origin = origin
        self.socket = raw
        self.idle_since_s = 0.0
        self.is_closed = False

    def is_usable(self, now_s: float) -> bool:
        """Whether it has not been idle for too long, and the server has not closed it."""
        if now_s - self.idle_since_s > KEEP_ALIVE_S:
            return False
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)  # between requests only the end of the connection can arrive

    def close(self) -> None:
        """Closes at once: a thread that sends or receives gets an error."""
        self.is_closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Lease:
    """A request's right to one connection. It ends with the object at the latest."""

    __slots__ = ("__weakref__", "kept", "ref")

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.ref: ref[Lease] | None = None


#: A request that waits for a connection checks this often whether there is one; usually it is told.
RECHECK_S = 0.05


class Connections:
    """The connections of one process.

    A signal handler may raise an exception anywhere, and a request may be interrupted by another one of the same thread.
    Therefore nothing is counted: a connection is in use while its lease lives. A lease that an exception keeps from being
    given back ends when the exception has been handled; its connection is closed. And the lock is one of C, reentrant,
    and is taken by ``with`` alone.

    Args:
      limit: of requests at once, and of connections.
      credentials: for connections with TLS.
    """

    def __init__(self, limit: int, credentials: Credentials) -> None:
        self._credentials = credentials
        self.pid = os.getpid()
        self._limit = limit
        self._lock = threading.RLock()
        self._leases: set[ref[Lease]] = set()
        #: Leases that ended without being given back: a function of C puts them here.
        self._lost: deque[ref[Lease]] = deque()
        self._waiting: deque[SimpleQueue[None]] = deque()
        #: The most recently used last.
        self._idle: deque[Kept] = deque()
        self._is_closed = False

    def take(self, lease: Lease, origin: Endpoint, connect_timeout_s: float, over_s: float, dialing: Dialing) -> Kept:
        """An idle connection, or a new one, whose opening ``dialing`` can end. Raises NotConnected."""
        lease.ref = ref(lease, self._lost.append)
        if not self._admit(lease.ref):
            self._wait(lease.ref, over_s)
        kept = self._idle_one(origin, lease)
        if kept is None:
            kept = lease.kept = Kept(origin, _connected(origin, connect_timeout_s, self._credentials, dialing))
        if self._is_closed:
            raise NotConnected("the client was closed")
        return kept

    def give_back(self, lease: Lease, *, is_reusable: bool) -> None:
        """After a request, or an attempt to take a connection for it."""
        kept, lease.kept = lease.kept, None
        with self._lock:
            if lease.ref is not None:
                self._leases.discard(lease.ref)
            if kept is not None and is_reusable and not self._is_closed:
                kept.idle_since_s = monotonic()
                self._idle.append(kept)
                kept = None
        if self._waiting:
            with suppress(IndexError):  # another thread told it
                self._waiting.popleft().put(None)
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """Closes all; requests under way fail."""
        self._is_closed = True
        with self._lock:
            busy = [lease.kept for each in tuple(self._leases) if (lease := each()) is not None]
            every = [*self._idle, *busy]
            self._idle.clear()
        for kept in every:
            if kept is not None:
                kept.close()

    def forget(self) -> None:
        """For a forked child: closes its copies of the parent's sockets; the parent's connections stay open."""
        busy = [lease.kept for each in tuple(self._leases) if (lease := each()) is not None]
        for kept in [*self._idle, *busy]:
            if kept is not None:
                kept.socket.close()

    def _admit(self, lease: ref[Lease]) -> bool:
        """Counts the lease as one of the connections, if that is one too many not yet."""
        with self._lock:
            while self._lost:
                self._leases.discard(self._lost.popleft())
            if len(self._leases) >= self._limit:
                return False
            self._leases.add(lease)
            return True

    def _wait(self, lease: ref[Lease], over_s: float) -> None:
        """Raises NotConnected: all connections stay in use."""
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            while True:
                self._waiting.append(bell)
                if self._admit(lease):
                    return
                left_s = over_s - monotonic()
                if left_s <= 0:
                    raise NotConnected(
                        f"all {self._limit} connections of the client are in use; max_connections is their limit"
                    )
                with suppress(Empty):
                    bell.get(timeout=min(left_s, RECHECK_S))
                self._forget(bell)
        finally:
            self._forget(bell)

    def _forget(self, bell: SimpleQueue[None]) -> None:
        with suppress(ValueError):
            self._waiting.remove(bell)

    def _idle_one(self, origin: Endpoint, lease: Lease) -> Kept | None:
        """The one used last; also closes what makes room for a new connection, or has ended."""
        ended: list[Kept] = []
        now_s = monotonic()
        try:
            with self._lock:
                for kept in reversed(tuple(self._idle)):
                    if kept.origin == origin:
                        break
                else:
                    if len(self._idle) + len(self._leases) > self._limit and self._idle:
                        ended.append(self._idle.popleft())
                    return None
                lease.kept = kept
                self._idle.remove(kept)
                if kept.is_usable(now_s):
                    return kept
                lease.kept = None
                # The server restarted, or idle connections have timed out: its others are older still.
                ended.append(kept)
                ended += [each for each in self._idle if each.origin == origin and not each.is_usable(now_s)]
                for each in ended[1:]:
                    self._idle.remove(each)
            return self._idle_one(origin, lease)
        finally:
            for each in ended:
                each.close()


class Pool:
    """Keep-alive connections to all daemons of a client, shared by its threads.

    A forked child opens its own connections, and never ends those of its parent.
    """

    def __init__(self, settings: Settings) -> None:
        self._credentials = settings.credentials
        self._max_connections = settings.max_connections
        self._connections: Connections | None = None
        self._lock = threading.RLock()
        self._closed = False

    def carry(self, send: Send) -> Answer | Failure:
        """Sends a request and returns its answer; again, once, with a token that has been replaced. Raises Closed."""
        token = self._credentials.token
        answer = self._carry(send)
        if isinstance(answer, Answer) and answer.status == 401 and self._credentials.read_again(token):
            return self._carry(send)
        return answer

    def _carry(self, send: Send) -> Answer | Failure:
        connections = self._connections
        if connections is None or connections.pid != os.getpid():
            connections = self._opened()
        over_s = monotonic() + send.timeout_s
        dialing, lease, is_reusable = Dialing(), Lease(), False
        if send.stop is not None:
            send.stop.watch(dialing)
        try:
            exchange = Exchange(send, self._credentials.headers(send.url))
            kept = connections.take(lease, _origin(send.url), send.connect_timeout_s, over_s, dialing)
            if send.stop is not None:
                send.stop.watch(kept)
            answer = exchange.run(kept.socket, over_s)
            is_reusable = exchange.is_reusable and not kept.is_closed
        except NotConnected as error:
            return Failure("connect", str(error), error)
        except (h11.ProtocolError, OSError, EOFError) as error:
            used = lease.kept
            if used is None:  # the request is no HTTP
                return Failure("connect", str(error), error)
            if isinstance(error, TimeoutError):
                return Failure("timeout", f"no answer within {send.timeout_s:g} s", error)
            detail = "the connection was closed here" if used.is_closed else str(error) or type(error).__name__
            return Failure("lost", detail, error)
        finally:
            connections.give_back(lease, is_reusable=is_reusable)
            if send.stop is not None:
                send.stop.watch(None)
        return answer

    def close(self) -> None:
        """Closes all connections; requests under way fail. Idempotent."""
        self._closed = True
        connections, self._connections = self._connections, None
        if connections is not None and connections.pid == os.getpid():
            connections.close()

    def _opened(self) -> Connections:
        pid = os.getpid()
        connections = self._connections
        if connections is not None and connections.pid != pid:
            self._lock = threading.RLock()  # a thread of the parent may hold the old one
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            if self._connections is None or self._connections.pid != pid:
                if self._connections is not None:
                    self._connections.forget()
                self._connections = Connections(self._max_connections, self._credentials)
            return self._connections


class Exchange:
    """One request and its answer.

    Raises:
      h11.LocalProtocolError: the request is no HTTP; nothing was sent.
    """

    __slots__ = ("_head", "_http", "_longest_until_s", "_send", "is_reusable")

    def __init__(self, send: Send, more_headers: list[tuple[bytes, bytes]]) -> None:
        target, headers = head_of(send, more_headers)
        self._send = send
        self._longest_until_s = None if send.longest_s is None else monotonic() + send.longest_s
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = self._http.send(h11.Request(method=send.request.method, target=target, headers=headers))
        assert head is not None  # only the end of a connection has no bytes
        self._head = head
        #: Whether the connection may carry another request.
        self.is_reusable = False

    def run(self, raw: socket.socket, over_s: float) -> Answer:
        """Raises NotConnected; TimeoutError, OSError, EOFError, h11.ProtocolError: the server may have executed it."""
        if over_s <= monotonic():
            raise NotConnected("the time was over when there was a connection")
        try:
            self._send_all(raw, over_s)
        except TimeoutError:
            raise
        except OSError:
            # A server may answer and close before it has read the whole body, with the reason in its answer.
            with suppress(h11.ProtocolError, OSError, EOFError):
                answer = self._receive(raw, over_s)
                self.is_reusable = False
                return answer
            raise
        return self._receive(raw, over_s)

    def _send_all(self, raw: socket.socket, over_s: float) -> None:
        http, body = self._http, self._send.request.body
        if body:
            http.send_with_data_passthrough(h11.Data(data=body))
        http.send(h11.EndOfMessage())
        _limit(raw, over_s)
        if len(body) <= SMALL_BODY_BYTES:
            raw.sendall(self._head + body)
        else:
            raw.sendall(self._head)
            _limit(raw, over_s)
            raw.sendall(body)

    def _receive(self, raw: socket.socket, over_s: float) -> Answer:
        http = self._http
        response: h11.Response | None = None
        chunks: list[bytes] = []
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                _limit(raw, over_s)
                data = raw.recv(RECEIVE_BYTES)
                if self._longest_until_s is not None:
                    over_s = min(monotonic() + self._send.timeout_s, self._longest_until_s)
                if not data and response is None:
                    raise EOFError("the server closed the connection without an answer")
                http.receive_data(data)
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("the server closed the connection without an answer")
        assert response is not None  # h11 ends no message that it has not begun
        self.is_reusable = http.their_state is h11.DONE and http.our_state is h11.DONE and not http.trailing_data[0]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return Answer(response.status_code, headers, chunks[0] if len(chunks) == 1 else b"".join(chunks))


@lru_cache(maxsize=64)
def _origin(url: str) -> Endpoint:
    scheme, host, port, _, _ = place_of(url)
    if scheme == b"unix":
        return Endpoint(host.decode(), 0, tls=False)
    tls = scheme == b"https"
    return Endpoint(host.decode("ascii"), port or (443 if tls else 80), tls)


def _limit(raw: socket.socket, over_s: float) -> None:
    """The next call of ``raw`` ends by ``over_s``. Raises TimeoutError if that has passed."""
    left_s = over_s - monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    raw.settimeout(max(left_s, MIN_TIMEOUT_S))


def _connected(origin: Endpoint, timeout_s: float, credentials: Credentials, dialing: Dialing) -> socket.socket:
    """A new connection. Raises NotConnected."""
    try:
        if not origin.port:
            return connect_unix(origin.host, timeout_s)
        raw = dial(origin.host, origin.port, timeout_s, dialing)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.tls:
                context = credentials.tls_context()
                raw = context.wrap_socket(raw, server_hostname=origin.host, do_handshake_on_connect=False)
                dialing.socket = raw
                raw.do_handshake()
            return raw
        except BaseException:
            raw.close()
            raise
    except NotResolved as error:
        raise NotConnected(str(error)) from error
    except TimeoutError as error:
        raise NotConnected(f"no connection within {timeout_s:g} s") from error
    except (OSError, UnicodeError) as error:  # a host name that is too long for DNS is a UnicodeError
        raise NotConnected(str(error)) from error
