"""The daemon's traces: a span for each publish, store, rollback and poll whose caller records a trace.

OpenTelemetry is loaded only if ``otel.endpoint`` names a collector. Spans wait in a bounded queue for a thread that
sends them. Spans that do not fit are dropped, and an unavailable collector affects only its traces.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import time
from math import inf
from typing import TYPE_CHECKING, Any

import trio

from broker.http.handlers import RequestCancelled
from broker.http.route import Endpoint, status_to
from plainsong.protocol.trace import TRACEPARENT, is_sampled
from plainsong.protocol.version import VERSION
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace.export import SpanExporter

    from broker.config import Config
    from broker.http.messages import Answer, Answered, Request

log = logging.getLogger(__name__)

#: Spans that may wait to be sent.
QUEUED = 4096
#: Spans in one request to the collector.
EXPORTED_AT_ONCE = 512
EXPORT_EVERY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
#: Time that the shutdown waits for the remaining spans.
CLOSE_S = 2.0


class TracesUnavailable(Exception):
    """``otel.endpoint`` is set, and OpenTelemetry is not installed."""

    hint = "pip install 'plainsong-server[otel]', or leave otel.endpoint empty"


class Traces:
    """Creates spans of answered requests, and sends them to a collector.

    Args:
      instance: identifies the daemon among several.
      exporter: for tests; by default OTLP over HTTP to ``endpoint``.
    """

    def __init__(self, endpoint: str, version: str, instance: str, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The library logs every failed attempt; we log only changes.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "plainsong"}
        resource = Resource.create({**named, "service.version": version, "service.instance.id": instance})
        # The caller begins a trace: by itself the daemon would record thousands a second.
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(
            _told(exporter or _otlp(endpoint), endpoint),
            max_queue_size=QUEUED,
            schedule_delay_millis=EXPORT_EVERY_S * 1000,
            max_export_batch_size=EXPORTED_AT_ONCE,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("plainsong.daemon", version)
        self._extract: Callable[..., Context] = TraceContextTextMapPropagator().extract
        self._nothing, self._server, self._error = Context(), SpanKind.SERVER, StatusCode.ERROR

    def record(self, endpoint: Endpoint, request: Request, status: int, begun_ns: int, ended_ns: int) -> None:
        """Record an answered request of a recorded trace."""
        route = endpoint.route
        name = f"{request.path.get('namespace', '')}:{request.path.get('topic', '')}"
        said: dict[str, Any] = {
            "http.request.method": route.method,
            "http.route": route.path,
            "http.response.status_code": status,
            "messaging.system": "plainsong",
            "messaging.destination.name": name,
            "messaging.operation.name": route.name,
            "plainsong.request_id": request.request_id,
        }
        if request.messages:
            said["messaging.batch.message_count"] = request.messages
        context = self._extract(request.headers, context=self._nothing)
        span = self._tracer.start_span(f"{route.name} {name}", context, self._server, said, start_time=begun_ns)
        if status >= 500:
            span.set_status(self._error)
        span.end(ended_ns)

    async def aclose(self) -> None:
        """Send waiting spans, for at most ``CLOSE_S``, and shut down."""
        with trio.move_on_after(CLOSE_S, shield=True):
            await in_thread(self._provider.shutdown, abandon_on_cancel=True, max_wait_s=inf)


def open_traces(config: Config) -> Traces | None:
    """Return the daemon's traces; None if there are none. Raises TracesUnavailable."""
    endpoint = config.otel.endpoint
    if not endpoint:
        return None
    try:
        return Traces(endpoint, VERSION, config.cluster.instance or platform.node())
    except ImportError:
        raise TracesUnavailable("otel.endpoint is set, but OpenTelemetry is not installed") from None


def traced(endpoint: Endpoint, traces: Traces | None) -> Endpoint:
    """Wrap a hot route: it records requests of recorded traces; for any other it reads one header."""
    if traces is None or not endpoint.route.hot:
        return endpoint
    handler = endpoint.handler

    def handle(request: Request, answered: Answered) -> None:
        if not is_sampled(request.headers.get(TRACEPARENT, "")):
            handler(request, answered)
            return
        begun_ns = time.time_ns()

        def record(outcome: Answer | Exception) -> None:
            # Before the answer is sent: otherwise its span could end after the client's span, which contains it.
            ended_ns = time.time_ns()
            answered(outcome)
            if not isinstance(outcome, RequestCancelled):
                status = status_to(outcome) if isinstance(outcome, Exception) else outcome.status
                traces.record(endpoint, request, status, begun_ns, ended_ns)

        handler(request, record)

    return Endpoint(endpoint.route, handle)


def _otlp(endpoint: str) -> SpanExporter:
    # Imported by name: it loads requests and protobuf.
    module = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S
    )
    return exporter


def _told(exporter: SpanExporter, endpoint: str) -> SpanExporter:
    """Wrap the exporter: it logs when it begins to fail, and when it works again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Told(SpanExporter):
        failing = False

        def export(self, spans: Any) -> SpanExportResult:
            result = exporter.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed and not self.failing:
                log.warning("traces cannot be sent", extra={"endpoint": endpoint})
            elif self.failing and not failed:
                log.info("traces are sent again", extra={"endpoint": endpoint})
            self.failing = failed
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Told()
