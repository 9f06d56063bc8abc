"""Trace context (W3C): the two headers of a request that become attributes of its messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.protocol.requests import PublishRequest

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
#: Version, trace id, span id, flags; later versions may append fields. Version ff and ids of zeros are invalid. Source:
#: Trace Context, level 1, section 3.2.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?")
#: Longest tracestate that is passed on; the same document requires this many characters.
_MOST_STATE = 512
#: The flag by which the caller says that it records this trace.
_SAMPLED = 1


def is_sampled(parent: str) -> bool:
    """True if a ``traceparent`` is valid and says that its trace is recorded."""
    found = _PARENT.fullmatch(parent)
    return found is not None and bool(int(found[1], 16) & _SAMPLED)


def trace_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context from a request's headers; empty if it is missing or invalid."""
    parent = headers.get(TRACEPARENT, "")
    if _PARENT.fullmatch(parent) is None:
        return {}
    state = headers.get(TRACESTATE, "")
    if not 0 < len(state) <= _MOST_STATE or not state.isascii() or not state.isprintable():
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: state}


def carry_trace(request: PublishRequest, headers: Mapping[str, str]) -> None:
    """Add the trace context of the headers to each message of a publish or store that has none and has room.

    Invalid headers are ignored, so that a trace never causes a message to be refused.
    """
    found = trace_of(headers)
    if not found or not request.messages:
        return
    if request.attributes is None:
        request.attributes = [found] * len(request.messages)
    else:
        request.attributes = [with_trace(own, found) for own in request.attributes]


def with_trace(own: Mapping[str, str], found: Mapping[str, str]) -> Mapping[str, str]:
    """Return a message's attributes, with the trace context added if they have none and have room."""
    if TRACEPARENT in own:
        return own
    both = {**{name: text for name, text in own.items() if name != TRACESTATE}, **found}
    size = sum(len(name.encode()) + len(text.encode()) for name, text in both.items())
    return both if size <= MAX_ATTRIBUTE_BYTES else own
