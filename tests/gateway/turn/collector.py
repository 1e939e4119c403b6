"""A collector: it takes OTLP by HTTP or gRPC and decodes it with OpenTelemetry's own messages.

Its services are OpenTelemetry's own (`opentelemetry-proto`), on a port of the loopback interface.
"""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Span:
    """A span as it came. Times are ns since 1970."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Value]
    events: tuple[str, ...] = ()


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Collector:
    """It answers nobody while `may_answer` is cleared."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""
    may_answer: threading.Event = field(default_factory=_set)

    def take(self, body: bytes) -> None:
        self.raw += body
        self.read(ExportTraceServiceRequest.FromString(body))

    def read(self, request: Any) -> None:
        for resource in request.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(about["service.name"], span) for span in scope.spans]

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, in the order in which they began."""
        spans = [span for span in self.spans if span.trace == trace_id]
        return sorted(spans, key=lambda span: (span.began, -span.ended))


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        {attribute.key: _value(attribute.value) for attribute in span.attributes},
        tuple(event.name for event in span.events),
    )


def _value(any_value: Any) -> Value:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [item.string_value for item in any_value.array_value.values]
    value: Value = getattr(any_value, kind)
    return value


@contextmanager
def collecting_grpc() -> Iterator[Collector]:
    """A collector on gRPC. Its `raw` stays empty."""
    collector = Collector()

    class Service(TraceServiceServicer):
        def Export(self, request: Any, _context: Any) -> Any:
            collector.may_answer.wait()
            collector.read(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.may_answer.wait()
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
