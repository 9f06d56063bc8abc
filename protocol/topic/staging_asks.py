"""What a topic's actor can be asked about staging: keep a producer's messages by segments, publish the winning ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.requests import Receipt
from protocol.topic.asks import Ask

if TYPE_CHECKING:
    from protocol.requests import PublishRequest


@dataclass(slots=True)
class StoreStaged(Ask[None]):
    """Keep the messages of the request's producer under its segment, seen by nobody until a publish lists that."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class PublishStaged(Ask[Receipt]):
    """Publish what the request's producer staged under the segments it lists: one row, and once per sequence id."""

    request: PublishRequest
    size: int
