"""A trace collector: receives OTLP over HTTP like real collectors, and stores the spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.daemon.harness import eventually

KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client", Span.SPAN_KIND_PRODUCER: "producer",
         Span.SPAN_KIND_CONSUMER: "consumer", Span.SPAN_KIND_INTERNAL: "internal"}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """A received span; ids in hex."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    """The ids of linked spans."""
    attributes: dict[str, Any]
    failed: bool
    took_ns: int


class Collector:
    """Listens on a free port of this machine while a ``with`` block runs."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        self._lock = threading.Lock()
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                good = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                if good:
                    keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if good else 400)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                del arguments

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _keep(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            (service,) = (
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            found = [seen(service, span) for scope in resource.scope_spans for span in scope.spans]
            with self._lock:
                self._spans += found

    def spans(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)

    def one(self, name: str, service: str = "") -> Seen:
        """Return the only span of that name, waiting for it if necessary."""

        def found() -> list[Seen]:
            return [each for each in self.spans() if each.name == name and service in ("", each.service)]

        eventually(f"a span {name} has arrived", lambda: bool(found()))
        (span,) = found()
        return span


def seen(service: str, span: Span) -> Seen:
    return Seen(
        service,
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple(each.span_id.hex() for each in span.links),
        {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
        span.status.code == 2,
        span.end_time_unix_nano - span.start_time_unix_nano,
    )
