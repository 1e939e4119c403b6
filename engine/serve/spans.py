"""The engine's spans of one call, below the span of the gateway's call.

`generate` is the whole call. Below it stand, one after the other: `look_up` (the prompt is
rendered, tokenized and looked up), `queue`, `prefill` and `decode`. The times of the last three are
the engine's own, as its frames tell them.
"""

import time
from collections.abc import AsyncIterator

from opentelemetry.trace import Span, SpanKind

from engine.backends.base import Generation
from engine.protocol import Done, Failed, Finished, Frame, Started
from engine.protocol.reports import Description
from engine.traces import Traces, Value, fail

_NS = 1_000_000_000


class Call:
    """One call of `/v1/generate`. It ends once, with its last frame or when it is closed."""

    def __init__(self, traces: Traces, headers: dict[str, str]) -> None:
        """`headers` are those of the caller's span."""
        self._traces = traces
        self._at_ns = time.time_ns()
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "holdfast",
        }
        parent = traces.context_of(headers)
        self._span = traces.begin("generate", parent, SpanKind.SERVER, attributes, self._at_ns)
        self._below = traces.below(self._span)
        self._is_open = self._is_ended = self._has_started = False

    def opened(self, engine: Description) -> None:
        """The request has its look-up behind it and waits for blocks."""
        now, self._is_open = time.time_ns(), True
        self._span.set_attributes(
            {"gen_ai.request.model": engine.model, "holdfast.backend": engine.backend}
        )
        self._child("look_up", self._at_ns, now)
        self._at_ns = now

    def take(self, frame: Frame) -> None:
        match frame:
            case Started():
                self._started(frame)
            case Finished():
                self._span.set_attribute("gen_ai.response.finish_reasons", [frame.reason])
            case Done():
                attributes: dict[str, Value] = {"gen_ai.usage.output_tokens": frame.output_tokens}
                self._span.set_attributes(attributes)
                self._child("decode", self._at_ns, time.time_ns(), attributes)
                self._end()
            case Failed():
                fail(self._span, frame.code)
                self._end()

    def failed(self, kind: str) -> None:
        """The call was refused, or failed before it had frames."""
        if not self._is_ended:
            fail(self._span, kind)
            self._end()

    def abandoned(self) -> None:
        """Nothing more is done to open the request."""
        if not self._is_open:
            self.failed("cancelled")

    def close(self) -> None:
        """The caller left."""
        if self._is_ended:
            return
        if self._has_started:
            self._child("decode", self._at_ns, time.time_ns())
        self.failed("cancelled")

    def _started(self, frame: Started) -> None:
        now, usage = time.time_ns(), frame.usage
        began = max(now - int(frame.prefill_seconds * _NS), self._at_ns)
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens,
            "holdfast.cache.computed_tokens": usage.computed_tokens,
            "holdfast.cache.tier": frame.receipt.tier,
        }
        if frame.miss_reason is not None:
            attributes["holdfast.cache.miss_reason"] = frame.miss_reason
        self._span.set_attributes(attributes)
        self._child("queue", self._at_ns, began)
        computed: dict[str, Value] = {"holdfast.cache.computed_tokens": usage.computed_tokens}
        self._child("prefill", began, now, computed)
        self._at_ns, self._has_started = now, True

    def _child(
        self, name: str, began_ns: int, ended_ns: int, attributes: dict[str, Value] | None = None
    ) -> Span:
        span = self._traces.begin(name, self._below, SpanKind.INTERNAL, attributes or {}, began_ns)
        span.end(ended_ns)
        return span

    def _end(self) -> None:
        self._is_ended = True
        self._span.end()


class SpannedGeneration:
    """A generation whose frames are told to the call."""

    def __init__(self, generation: Generation, call: Call) -> None:
        self._generation = generation
        self._call = call

    async def __aiter__(self) -> AsyncIterator[Frame | None]:
        async for frame in self._generation:
            if frame is not None:
                self._call.take(frame)
            yield frame

    def close(self) -> None:
        self._generation.close()
        self._call.close()

    def __del__(self) -> None:
        self._call.close()
