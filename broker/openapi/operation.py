"""What the description says of one method of one path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.openapi.schemas import Schema

JSON = "application/json"
AVRO = "avro/binary"
FRAMES = "application/vnd.plainsong.frames"
#: A write pointer for examples.
POINTER = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, for those who call it."""

    name: str
    method: str
    path: str
    tag: str
    summary: str
    codes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Names of query parameters; ``build`` describes each."""
    body: Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    example: object = None
    """Of the body."""
    answer: Schema | None = None
    """Of status 200; None: an empty body."""
    answer_types: tuple[str, ...] = (JSON,)
    headers: tuple[str, ...] = field(default=())
    """Headers of the answer that are its own."""
