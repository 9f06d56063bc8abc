"""What a link may have under way, and how long its other side may be silent."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from protocol.peering.frames import MAX_FRAME_BYTES

KIB = 1 << 10
MIB = 1 << 20

#: Bodies up to this size travel in the frame of their call or answer; larger ones in pieces of ``PIECE_BYTES``.
INLINE_BYTES = 64 * KIB
PIECE_BYTES = 128 * KIB
#: What a piece counts for besides its bytes, so that empty ones are bounded too.
PIECE_COSTS = 64
#: Bytes that may wait to be written before those who have more to say wait.
GATHERED_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """Bounds of one link. Both sides hold their own; bytes are bytes, times are seconds."""

    requests: int = 4096
    """Calls and conversations under way; beyond it ``Overloaded``."""
    bytes: int = 256 * MIB
    """Bodies of calls under way; a larger one goes alone. Beyond it ``Overloaded``."""
    frame_bytes: int = MAX_FRAME_BYTES
    """Of one frame; a larger one ends the link."""
    window_bytes: int = 512 * KIB
    """What one stream or conversation may have sent that has not been used yet."""
    message_bytes: int = 65 * MIB
    """Of one message of a conversation."""
    silence_s: float = 10.0
    """How long the other side may answer no ping before it counts as gone."""
    parting_s: float = 3.0
    """The same once it is known to be leaving, or to be gone."""
    dial_s: float = 3.0
    """How long a connection, and the other side's first word, may take."""


BETWEEN_INSTANCES = LinkBounds()
#: Between processes of one daemon: the end of one is seen at once, and a busy one is not taken for dead.
WITHIN_DAEMON = LinkBounds(requests=20_000, silence_s=inf, dial_s=inf)
