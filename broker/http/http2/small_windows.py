"""Patch: with hypercorn's flow-control windows, an upload waits for a round trip after every 64 KiB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2.settings import SettingCodes

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from broker.http.http2.patch import Http2Bounds

#: Bytes that a client may send before the application has read them, on one stream and on a connection. The daemon does
#: not buffer them: while the application does not read, the daemon does not read from the connection.
STREAM_WINDOW_BYTES = 2 << 20
CONNECTION_WINDOW_BYTES = 4 << 20
_FIRST_WINDOW_BYTES = 65_535


class SmallWindows(Patch):
    """Opens larger windows."""

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others, bounds=bounds)
        self._window_bytes = min(CONNECTION_WINDOW_BYTES, max(bounds.window_bytes, _FIRST_WINDOW_BYTES))
        settings = self.connection.local_settings
        settings[SettingCodes.INITIAL_WINDOW_SIZE] = min(STREAM_WINDOW_BYTES, self._window_bytes)
        settings.acknowledge()

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        if self._window_bytes > _FIRST_WINDOW_BYTES:
            self.connection.increment_flow_control_window(self._window_bytes - _FIRST_WINDOW_BYTES)
            await self._flush()
