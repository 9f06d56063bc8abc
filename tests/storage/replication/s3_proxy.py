"""A proxy in front of an S3 server, which makes one daemon's requests fail in the ways that networks and servers fail.

    with S3Proxy(server) as proxy:
        proxy.fault = lambda method, path: Fault.LOST if method == "PUT" else None

A signature covers the Host header, which is passed on as it is.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from enum import Enum
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Headers of one connection, which are not passed on.
_HOP = {"connection", "transfer-encoding", "keep-alive"}


class Fault(Enum):
    """A fault of one request."""

    CUT = "the connection ends before the request is passed on"
    HANG = "nothing is forwarded or answered until the test says so"
    LOST = "the request takes effect, and the connection ends without an answer"
    HALF = "the request takes effect, and the connection ends in the middle of the answer"
    LATE = "the connection ends at once, and the request takes effect a second later"
    SLOW = "the request takes effect, and is answered, two seconds later"
    ERROR = "500, and the request has no effect"
    BUSY = "503, and the request has no effect"
    ERROR_AFTER = "the request takes effect, and the answer is 500"
    REFUSED_AFTER = "the request takes effect, and the answer is 412, as to a server's own repetition"
    CONFLICT = "409, as while another write of the object is under way; the request has no effect"
    FULL = "507, and the request has no effect"
    FORBIDDEN = "403, and the request has no effect"


_STATUS = {
    Fault.ERROR: (500, "InternalError"),
    Fault.BUSY: (503, "SlowDown"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.FULL: (507, "InsufficientStorage"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.ERROR_AFTER: (500, "InternalError"),
    Fault.REFUSED_AFTER: (412, "PreconditionFailed"),
}
_AFTER = {Fault.ERROR_AFTER, Fault.REFUSED_AFTER}


class S3Proxy:
    """Listens on a free port while a ``with`` block runs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``environment`` leads to the server: see ``s3_server``."""
        target = urlsplit(environment["AWS_ENDPOINT"])
        assert target.hostname is not None
        self.target = (target.hostname, target.port or 80)
        self._environment = environment
        #: Chooses what happens to a request: given its method and path. Called in several threads.
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        #: Set while requests that hang are let through.
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.requests = 0
        proxy = self

        class Handler(_Handler):
            """The handler of this proxy's requests."""

            def proxied(self) -> S3Proxy:
                return proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that leads through the proxy."""
        return {**self._environment, "AWS_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}"}

    def cut_off(self) -> None:
        """Let no request through from now on: each hangs, as in a network that drops packets."""
        self.goes_on.clear()
        self.fault = lambda method, path: Fault.HANG

    def restore(self) -> None:
        """Let requests through again, those that hang included."""
        self.fault = lambda method, path: None
        self.goes_on.set()

    def __enter__(self) -> S3Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing: clients end connections at any moment."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version: ClassVar[str] = "HTTP/1.1"  # type: ignore[misc]  # a plain attribute there

    def proxied(self) -> S3Proxy:
        raise NotImplementedError

    def log_message(self, *args: object) -> None:
        """Write nothing."""

    def _pass(self) -> None:
        proxy = self.proxied()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy.requests += 1
        fault = proxy.fault(self.command, self.path)
        with suppress(OSError, HTTPException):
            if fault is Fault.HANG:
                proxy.goes_on.wait(PATIENCE_S)
            elif fault is Fault.SLOW:
                time.sleep(2.0)
            elif fault is Fault.LATE:
                threading.Timer(1.0, self._late, [body]).start()
            if fault in (Fault.CUT, Fault.LATE):
                self.close_connection = True
            elif fault in _STATUS and fault not in _AFTER:
                self._refuse(*_STATUS[fault])
            else:
                self._answer(fault, *self._forwarded(body))

    def _late(self, body: bytes) -> None:
        with suppress(OSError, HTTPException):
            self._forwarded(body)

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(*self.proxied().target, timeout=PATIENCE_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, fault: Fault | None, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        if fault in _AFTER and status < 300:
            self._refuse(*_STATUS[fault])
            return
        if fault is Fault.LOST:
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is Fault.HALF:
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815  # the names that the library calls
