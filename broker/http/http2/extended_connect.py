"""Patch: hypercorn announces extended CONNECT (RFC 8441), so that browsers open WebSockets over HTTP/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2.settings import SettingCodes

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from broker.http.http2.patch import Http2Bounds


class ExtendedConnect(Patch):
    """Does not announce it: WebSockets are supported only over HTTP/1.1."""

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others, bounds=bounds)
        settings = self.connection.local_settings
        settings[SettingCodes.ENABLE_CONNECT_PROTOCOL] = 0
        settings.acknowledge()
