"""A TLS proxy for a server without TLS, like stunnel or Envoy in front of HBase's gateway or ZooKeeper."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.certificates import Authority, Pair


class TlsProxy:
    """Terminates TLS on a free port of 127.0.0.1 and forwards to ``target``, while a ``with`` block runs.

    Each connection has a thread, which forwards one side's bytes before it reads the other side, which is enough for
    requests and answers. The sockets are the system's, so that a client gets the reason for a failed handshake.

    Args:
      pair: its certificate and key.
      clients: the authority of client certificates, which are then required; None for no client certificates.
      gathers_s: the time for which it collects the target's bytes before it forwards them in one TLS record.
    """

    def __init__(
        self, target: tuple[str, int], pair: Pair, clients: Authority | None = None, gathers_s: float = 0.0
    ) -> None:
        self._target = target
        self._gathers_s = gathers_s
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.show(pair)
        if clients is not None:
            self._context.load_verify_locations(clients.file)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: Number of TLS connections that were forwarded.
        self.passed = 0
        #: DNS names in the certificates of clients.
        self.shown: set[str] = set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_ending = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    @property
    def text(self) -> str:
        return "{}:{}".format(*self.address)

    def show(self, pair: Pair) -> None:
        """Use this certificate for new connections."""
        self._context.load_cert_chain(pair.certificate, pair.key)

    def cut(self) -> None:
        """Break all open connections."""
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> TlsProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._is_ending.set()
        self.cut()
        for each in self._threads[1:]:
            each.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(accepted,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, accepted: socket.socket) -> None:
        with accepted, self._known(accepted), suppress(OSError):
            accepted.settimeout(PATIENCE_S)
            client = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
            with client, self._known(client):
                try:
                    client.do_handshake()
                except ssl.SSLError:
                    self._end_politely(client)
                    return
                certificate = client.getpeercert() or {}
                with socket.create_connection(self._target) as server, self._known(server):
                    with self._lock:
                        self.passed += 1
                        self.shown |= {name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"}
                    client.settimeout(None)
                    _pass(client, server, self._gathers_s)

    def _end_politely(self, client: ssl.SSLSocket) -> None:
        """Read the rest, since closing earlier would discard the alert."""
        with socket.socket(fileno=client.detach()) as raw, self._known(raw):
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(PATIENCE_S)
            while raw.recv(1 << 16):
                pass

    def _known(self, each: socket.socket) -> _Known:
        return _Known(self._lock, self._open, each, self._is_ending)


class _Known:
    """Registers a socket for ``cut`` while a block runs; breaks it if the proxy is already ending, after its cut."""

    def __init__(
        self, lock: threading.Lock, known: set[socket.socket], each: socket.socket, is_ending: threading.Event
    ) -> None:
        self._lock, self._known, self._each, self._is_ending = lock, known, each, is_ending

    def __enter__(self) -> None:
        with self._lock:
            self._known.add(self._each)
            if self._is_ending.is_set():
                with suppress(OSError):
                    self._each.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._known.discard(self._each)


def _pass(client: ssl.SSLSocket, server: socket.socket, gathers_s: float) -> None:
    """Forward until either side ends."""
    while True:
        ready = [client] if client.pending() else select.select([client, server], [], [])[0]
        if server in ready:
            time.sleep(gathers_s)
        for source, sink in ((client, server), (server, client)):
            if source in ready:
                data = source.recv(1 << 16)
                if not data:
                    return
                sink.sendall(data)
