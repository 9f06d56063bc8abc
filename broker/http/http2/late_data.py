"""Patch: ignores data for a stream that was already answered; hypercorn ends the connection, with all its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2.events import DataReceived

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from h2.events import Event


class LateData(Patch):
    """Drops such data, and opens the connection's window again."""

    async def _handle_event(self, event: Event) -> None:
        if isinstance(event, DataReceived) and event.stream_id not in self.streams:
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        else:
            await super()._handle_event(event)
