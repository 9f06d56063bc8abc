"""A TCP proxy between a client and a daemon that loses answers as the test directs."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

from tests.patience import PATIENCE_S

#: ``pass``: pass everything on; ``lose``: lose the answer and cut the connection; ``swallow``: lose it and keep the
#: connection; ``cut``: cut it in the middle; ``refuse``: refuse requests unread; ``die``: lose this answer, and refuse
#: every later request.
Mode = Literal["pass", "lose", "swallow", "cut", "refuse", "die"]


class Proxy:
    """A context manager that listens on its own port.

    ``then`` lists the modes of the next pieces of answers, and ``mode`` is that of all later ones. ``after`` maps a
    mark in a request to the mode of everything that arrives on its connection afterwards, once. Requests on other
    connections wait for the first such piece, so a client that asks about a lost answer does so after the daemon has
    given it.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.mode: Mode = "pass"
        self.then: list[Mode] = []
        self.after: dict[bytes, Mode] = {}
        #: Number of pieces of answers that were not passed on completely.
        self.lost = 0
        #: Number of connections that clients have opened so far.
        self.connections = 0
        self._changed = threading.Condition()
        #: Connections to the target with a marked request and no answer yet.
        self._due: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(PATIENCE_S)  # it may be opening a connection
        self._listener.close()
        self.close_all()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._open:
            each.close()

    def close_all(self) -> None:
        """Break every open connection."""
        for each in self._open:
            _end(each)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self.connections += 1
            self._open += [near, far]
            doom: list[Mode] = []
            self._start(self._requests, near, far, doom)
            self._start(self._answers, near, far, doom)

    def _requests(self, near: socket.socket, far: socket.socket, doom: list[Mode]) -> None:
        try:
            while data := near.recv(65536):
                with self._changed:
                    if not doom:
                        self._changed.wait_for(lambda: not self._due, PATIENCE_S)
                    if self.mode == "refuse":
                        break
                    after = self.after
                    if found := [after.pop(mark) for mark in list(after) if mark in data]:
                        if not doom:
                            self._due.add(far)
                        doom += found
                far.sendall(data)
        except OSError:
            pass
        with self._changed:  # a client may give up before the answer to be lost arrives
            self._changed.wait_for(lambda: far not in self._due, PATIENCE_S)
        _end(near), _end(far)

    def _answers(self, near: socket.socket, far: socket.socket, doom: list[Mode]) -> None:
        try:
            while data := far.recv(65536):
                mode = self._mode(doom)
                if mode == "pass":
                    near.sendall(data)
                    continue
                self.lost += 1
                if mode == "die":
                    self.mode = "refuse"
                self._note_arrival(far)
                if mode == "cut":
                    near.sendall(data[: len(data) // 2])
                if mode != "swallow":
                    break
        except OSError:
            pass
        _end(near), _end(far)
        self._note_arrival(far)

    def _mode(self, doom: list[Mode]) -> Mode:
        """Return the mode for the piece of an answer that has just arrived."""
        with self._changed:
            return doom[0] if doom else self.then.pop(0) if self.then else self.mode

    def _note_arrival(self, far: socket.socket) -> None:
        """Record that a connection's due answer, or the connection's end, has arrived."""
        with self._changed:
            self._due.discard(far)
            self._changed.notify_all()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
