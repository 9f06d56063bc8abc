"""Segments: the parts in which what is kept under a pointer was stored, and of which a publish lists the winners."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from collections.abc import Collection

DIGEST_BYTES = 8


@dataclass(slots=True)
class Segment:
    """What was stored under one segment's name."""

    index: int
    messages: int = 0
    size: int = 0
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Its name and these numbers, as the row has them; empty: to be packed."""

    def grow(self, messages: int, size: int) -> None:
        """More was stored under it."""
        self.messages += messages
        self.size += size
        self.packed = b""

    def pack(self, name: str) -> bytes:
        """Name and numbers: of thousands of segments one store changes one."""
        if not self.packed:
            self.packed = msgpack.packb(name) + msgpack.packb([self.index, self.messages, self.size])
        return self.packed


def digest_of(segments: Collection[str] | None) -> bytes | None:
    """Whether two publishes listed the same segments, in any order, can be told by these 8 bytes; None: they listed none."""
    if segments is None:
        return None
    names = (name.encode() for name in sorted(set(segments)))
    return blake2b(b"".join(b"%d:%b" % (len(name), name) for name in names), digest_size=DIGEST_BYTES).digest()
