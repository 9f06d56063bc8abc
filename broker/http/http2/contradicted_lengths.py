"""Patch: h2 ends the connection, with all its streams, for a body that contradicts its Content-Length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2.connection import H2Connection

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from broker.http.http2.patch import Http2Bounds


class ContradictedLengths(Patch):
    """Leaves the lengths of bodies to the gate, which refuses the request."""

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others, bounds=bounds)
        connection = _LengthBlindConnection(self.connection.config)
        connection.local_settings = self.connection.local_settings
        self.connection = connection


class _LengthBlindConnection(H2Connection):
    def _begin_new_stream(self, stream_id: int, allowed_ids: Any) -> Any:
        stream: Any = super()._begin_new_stream(stream_id, allowed_ids)
        stream._initialize_content_length = stream._track_content_length = _ignores
        return stream


def _ignores(*_: object) -> None: ...
