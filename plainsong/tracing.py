"""Traces by OpenTelemetry: spans around publishes and polls, and the context of a publish in its messages.

There is nothing to switch on. A program that has set up OpenTelemetry (``plainsong-client[otel]``) has imported its API
by then; in any other this module never imports it, and a publish costs one dictionary look-up more.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plainsong.protocol.trace import TRACEPARENT, TRACESTATE, carry_trace, with_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self, TypeVar

    from opentelemetry.trace import Link, Span, Tracer

    from plainsong.calls import Call
    from plainsong.messages import Message, Page, Receipt
    from plainsong.protocol.requests import PublishRequest

    T = TypeVar("T")

_API = "opentelemetry.trace"
#: A span has links to this many producers; pages have up to a hundred thousand messages. The SDK keeps as many.
MAX_LINKS = 128
#: Messages of a page that are searched for them.
_LOOKED_AT = 1024


def is_on() -> bool:
    """True if the program may have set up OpenTelemetry."""
    return _API in sys.modules


# --- processing -----------------------------------------------------------------------------------


@contextmanager
def processing(message: Message[Any], *, namespace: str = "default") -> Iterator[None]:
    """A span ``process NAMESPACE:TOPIC`` around the work for one message, linked to the publish that it came from.

    The verb ``on`` has one around each attempt. Without OpenTelemetry it does nothing.

    Args:
      namespace: the message's, which it does not know itself.
    """
    if not is_on():
        yield
        return
    from opentelemetry.trace import SpanKind

    name = f"{namespace}:{message.topic}"
    said = {**_said(name, "process"), "messaging.message.id": str(message.id)}
    links = _links([message.attributes])
    with _tracer().start_as_current_span(f"process {name}", kind=SpanKind.CONSUMER, attributes=said, links=links):
        yield


# --- sending --------------------------------------------------------------------------------------


class _Untraced:
    """A no-op span of a publish, without OpenTelemetry."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def carried(self, call: Call[T]) -> Call[T]:
        return call

    def sent(self, receipt: Receipt | None) -> None:
        return None


class _Sending:
    """A span around one publish, which the messages carry."""

    def __init__(self, name: str, count: int, links: Sequence[Link]) -> None:
        self._name, self._count, self._links = name, count, links

    def __enter__(self) -> Self:
        from opentelemetry.trace import SpanKind

        said: dict[str, Any] = _said(self._name, "send")
        if self._count != 1:
            said["messaging.batch.message_count"] = self._count
        self._current = _tracer().start_as_current_span(
            f"send {self._name}", kind=SpanKind.PRODUCER, attributes=said, links=self._links
        )
        self._span: Span = self._current.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)

    def carried(self, call: Call[T]) -> Call[T]:
        """Return the same call with this span in its headers, for its messages."""
        headers = tuple(_context().items())
        return (
            call._replace(request=call.request._replace(headers=(*call.request.headers, *headers))) if headers else call
        )

    def sent(self, receipt: Receipt | None) -> None:
        if receipt is not None and receipt.last_id is not None and receipt.count == 1:
            self._span.set_attribute("messaging.message.id", str(receipt.last_id))


_UNTRACED = _Untraced()


def sending(
    namespace: str, topic: str, count: int, attributes: Iterable[Mapping[str, str]] | None = None
) -> _Sending | _Untraced:
    """A span ``send NAMESPACE:TOPIC`` around a publish.

    Args:
      attributes: of messages that were gathered; the span is linked to where they come from.
    """
    if not is_on():
        return _UNTRACED
    return _Sending(f"{namespace}:{topic}", count, _links(attributes or ()))


def stamp(request: PublishRequest) -> None:
    """Gives messages that are sent later the current context, unless they have their own."""
    if is_on():
        carry_trace(request, _context())


def stamped(attributes: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Like ``stamp``, for one message's attributes."""
    if not is_on() or (attributes is not None and TRACEPARENT in attributes):
        return attributes
    context = _context()
    return with_trace(attributes or {}, context) if context else attributes


# --- receiving ------------------------------------------------------------------------------------


def begun_ns() -> int:
    """When a poll began; 0: it is not traced."""
    return time.time_ns() if is_on() else 0


def received(namespace: str, topic: str, page: Page[Any], begun: int) -> None:
    """A span ``receive NAMESPACE:TOPIC`` of a poll that returned messages, linked to their publishes."""
    if not begun or not page.messages:
        return
    from opentelemetry.trace import SpanKind

    name, messages = f"{namespace}:{topic}", page.messages
    said: dict[str, Any] = _said(name, "receive")
    if len(messages) == 1:
        said["messaging.message.id"] = str(messages[0].id)
    else:
        said["messaging.batch.message_count"] = len(messages)
    links = _links(message.attributes for message in messages[:_LOOKED_AT])
    _tracer().start_span(f"receive {name}", kind=SpanKind.CLIENT, attributes=said, links=links, start_time=begun).end()


# --- the library ----------------------------------------------------------------------------------


def _tracer() -> Tracer:
    from opentelemetry.trace import get_tracer

    from plainsong.protocol.version import VERSION

    return get_tracer("plainsong", VERSION)


def _said(name: str, operation: str) -> dict[str, Any]:
    """The attributes of every span. Source: OpenTelemetry's semantic conventions for messaging."""
    return {
        "messaging.system": "plainsong",
        "messaging.destination.name": name,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _propagator() -> Any:
    # Not the program's own choice of propagators: traceparent and tracestate are what messages carry.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _context() -> dict[str, str]:
    """The current context as headers, or attributes; empty if there is none."""
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return {name: text for name, text in carrier.items() if name in (TRACEPARENT, TRACESTATE)}


def _links(attributes: Iterable[Mapping[str, str]]) -> list[Link]:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, get_current_span

    found: dict[str, Link] = {}
    extract: Callable[..., Any] = _propagator().extract
    for each in attributes:
        parent = each.get(TRACEPARENT)
        if parent is None or parent in found:
            continue
        context = get_current_span(extract(each, context=Context())).get_span_context()
        if context.is_valid:
            found[parent] = Link(context)
        if len(found) == MAX_LINKS:
            break
    return list(found.values())
