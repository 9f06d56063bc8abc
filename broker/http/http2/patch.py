"""The base class for patches to hypercorn's HTTP/2."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2.exceptions import ProtocolError
from hypercorn.protocol.h2 import H2Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from h2.events import Event

    from broker.http.budgets import LongWork


@dataclass(frozen=True, slots=True)
class Http2Bounds:
    """The bounds of one connection."""

    window_bytes: int
    """Bytes of bodies that a client may send ahead."""
    long_work: LongWork
    """Grants slices of time for the frames of one read beyond the first few."""
    refused: Callable[[str], None]
    """Counts refused requests and connections, with the reason."""


class Patch(H2Protocol):
    """Hypercorn's protocol, with each event handled separately: an error of one stream does not affect the others.

    Args:
      others: hypercorn's own arguments.
    """

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others)
        self.bounds = bounds

    async def _handle_events(self, events: Sequence[Event]) -> None:
        for event in events:
            with suppress(ProtocolError):
                await self._handle_event(event)
        await self._flush()

    async def _handle_event(self, event: Event) -> None:
        await super()._handle_events([event])
