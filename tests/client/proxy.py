"""A TCP proxy that loses things: it stands between a client and a daemon and can be told what to do to answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

from tests.patience import PATIENCE_S

#: ``pass`` everything; ``lose`` the answer and cut; ``swallow`` it and keep the connection; ``cut`` it in the middle;
#: ``refuse`` requests unread; ``die``: lose this answer, and refuse everything from then on.
Mode = Literal["pass", "lose", "swallow", "cut", "refuse", "die"]


class Proxy:
    """Listens on a port of its own; ``with`` it.

    ``then`` are the modes of the next pieces that answers come in, ``mode`` of those after. ``after`` are marks of
    requests, each with the mode of everything that comes back on its connection, once.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.mode: Mode = "pass"
        self.then: list[Mode] = []
        self.after: dict[bytes, Mode] = {}
        #: Answers that were not passed on whole.
        self.lost = 0
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
        self._listener.close()
        self.close_all()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._open:
            each.close()

    def close_all(self) -> None:
        """Break every connection there is."""
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
            self._open += [near, far]
            doom: list[Mode] = []
            self._start(self._requests, near, far, doom)
            self._start(self._answers, near, far, doom)

    def _requests(self, near: socket.socket, far: socket.socket, doom: list[Mode]) -> None:
        try:
            while data := near.recv(65536):
                if self.mode == "refuse":
                    break
                doom += [self.after.pop(mark) for mark in list(self.after) if mark in data]
                far.sendall(data)
        except OSError:
            pass
        _end(near), _end(far)

    def _answers(self, near: socket.socket, far: socket.socket, doom: list[Mode]) -> None:
        try:
            while data := far.recv(65536):
                mode = doom[0] if doom else self.then.pop(0) if self.then else self.mode
                if mode == "pass":
                    near.sendall(data)
                    continue
                self.lost += 1
                if mode == "die":
                    self.mode = "refuse"
                if mode == "cut":
                    near.sendall(data[: len(data) // 2])
                if mode != "swallow":
                    break
        except OSError:
            pass
        _end(near), _end(far)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
