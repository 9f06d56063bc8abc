"""What the contract has and this version does not serve yet: refused in so many words, never half done.

Taking such a request and leaving a part of it out would break a promise its sender believes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from protocol.requests import PublishRequest


def refuse_later(request: PublishRequest) -> None:
    """Raises InvalidParameter for staging: segments without a write pointer, stored by a producer and published later."""
    if request.write_pointer is None and (request.segment is not None or request.segments is not None):
        raise InvalidParameter(
            "segments without a write pointer are not served yet", hint="they publish what was stored under one"
        )
