"""Spans for a collector, through OpenTelemetry's SDK and its OTLP exporters.

The standard `OTEL_*` variables say where spans go, how many are sampled and how many may wait.
OpenTelemetry (the extra `otel`) is imported by `open_traces` alone.

A span that ends waits in a bounded queue for a thread that sends batches. A collector that is down
or slow holds nothing else up: spans beyond the queue are dropped. The SDK logs that, and counts it
with OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_FLUSH_SECONDS = 3.0
_CONTEXT_HEADERS = ("traceparent", "tracestate")
Value = str | int | float | bool | Sequence[str]


class TracesError(Exception):
    """Traces are switched on and can't work. The message says what to do."""


class Traces:
    """The spans of one process."""

    def __init__(self, service: str, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
        # `create` adds the attributes that the variables set. `attributes` count before these.
        resource = Resource.create(attributes)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:  # a queue that is smaller than a batch
            raise TracesError(f"OTEL_BSP_*: {error}") from None
        self._tracer = self._provider.get_tracer("holdfast")
        self._propagator = TraceContextTextMapPropagator()

    def context_of(self, headers: Mapping[str, str]) -> "Context":
        """The caller's span, from `traceparent` and `tracestate`. Invalid headers are ignored."""
        return self._propagator.extract(headers)

    def begin(
        self,
        name: str,
        parent: "Context",
        kind: Literal["server", "client", "internal"],
        attributes: Mapping[str, Value],
        at_ns: int | None = None,
    ) -> "Span":
        """Begin a span at `at_ns`, in nanoseconds since 1970, or now. It does not become the
        current span."""
        from opentelemetry.trace import SpanKind

        span_kind = SpanKind[kind.upper()]
        values = dict(attributes)
        return self._tracer.start_span(
            name, parent, span_kind, values, start_time=at_ns, record_exception=False
        )

    def below(self, span: "Span") -> "Context":
        """The context of a span's children."""
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)

    async def aclose(self) -> None:
        """Send the spans that wait, for some seconds at most. Without a collector they are lost."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        deadline = time.monotonic() + _FLUSH_SECONDS
        while closing.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of a request that are about its caller's trace."""
    names = {name.encode(): name for name in _CONTEXT_HEADERS}
    return {names[name]: value.decode("latin-1") for name, value in headers if name in names}


def fail(span: "Span", kind: str) -> None:
    """Mark a span as failed. No message is kept, since it may quote what a client wrote."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def open_traces(service: str) -> Traces | None:
    """The service's spans, which go where the `OTEL_*` variables say; None where those turn traces
    off. Raise TracesError where the extra is not installed or the protocol is unknown."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return None
    protocol = os.environ.get(OF_TRACES) or os.environ.get(PROTOCOL) or "http/protobuf"
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                OTLPSpanExporter as OverGrpc,
            )

            return Traces(service, OverGrpc())
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                OTLPSpanExporter as OverHttp,
            )

            return Traces(service, OverHttp())
    except ImportError as error:
        message = f"traces need the extra `otel`: scripts/install otel ({error})"
        raise TracesError(message) from error
    raise TracesError(f"{PROTOCOL}: `{protocol[:40]}` is neither grpc nor http/protobuf")
