"""A WebSocket for threads: its event loop runs in one of its own, and is woken when there is something to send."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import anyio

from plainsong.transport.websocket import opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.settings import Settings
    from plainsong.transport.websocket import Socket, Talk


class SocketThread:
    """Carries a talk; started by ``open``, ends with the connection."""

    def __init__(self, path: str, settings: Settings, talk: Talk) -> None:
        self._path = path
        self._settings = settings
        self._talk = talk
        self._decided = threading.Event()
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: Socket | None = None
        self._thread = threading.Thread(target=self._run, name="plainsong-stream", daemon=True)

    def open(self, url: str, connect_s: float) -> Mapping[str, str]:
        """Connect; what the handshake was answered with. Raises as ``websocket.opened`` does."""
        self._url, self._connect_s = url, connect_s
        self._thread.start()
        self._decided.wait()
        if self._failed is not None:
            raise self._failed
        assert self._socket is not None
        return self._socket.headers

    def wake(self) -> None:
        """Let the talk be asked for more; from any thread."""
        assert self._loop is not None
        assert self._socket is not None
        with contextlib.suppress(RuntimeError):  # the connection has ended, and the talk been told
            self._loop.call_soon_threadsafe(self._socket.wake)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the connection."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        anyio.run(self._carry, backend="asyncio")

    async def _carry(self) -> None:
        try:
            self._socket = await opened(self._url, self._path, self._settings, self._connect_s)
        except Exception as error:  # noqa: BLE001 - whoever opens is told
            self._failed = error
            self._decided.set()
            return
        self._loop = asyncio.get_running_loop()
        self._decided.set()
        await self._socket.carry(self._talk)
