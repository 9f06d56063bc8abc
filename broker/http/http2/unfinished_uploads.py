"""Patch: hypercorn lets a client whose request was answered early send the rest of it, which is then dropped."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.stream import StreamState

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from h2.connection import H2Connection


class UnfinishedUploads(Patch):
    """Resets the stream after the answer if the client still sends (RFC 9113, section 8.1)."""

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers:
            with suppress(ProtocolError):
                stop_sender(self.connection, stream_id)
            await self._flush()


def stop_sender(connection: H2Connection, stream_id: int) -> None:
    """Reset an answered stream whose request is incomplete. Raises ProtocolError: the connection has ended."""
    stream = connection.streams.get(stream_id)
    if stream is not None and stream.state_machine.state is StreamState.HALF_CLOSED_LOCAL:
        connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)
