"""The engine's spans of one call, below the span of the gateway's call.

`generate` is the whole call. Below it stand, one after the other: `look_up` (the prompt is
rendered, tokenized and looked up), `queue`, `prefill` and `decode`. The times of the last three are
the engine's own, as its frames tell them. All are made when the call is over.
"""

import time
from collections.abc import AsyncIterator

from opentelemetry.trace import SpanKind

from engine.backends.base import Generation
from engine.protocol import Done, Failed, Finished, Frame, Started
from engine.protocol.reports import Description
from engine.traces import Traces, Value, fail


class Call:
    """One call of `/v1/generate`."""

    def __init__(self, traces: Traces, headers: dict[str, str]) -> None:
        """`headers` are those of the caller's span."""
        self._traces = traces
        self._headers = headers
        self._began_ns = self._at_ns = time.time_ns()
        self._about: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "holdfast",
        }
        # Each part's name, beginning and end, and what is told of it.
        self._parts: list[tuple[str, int, int, dict[str, Value]]] = []
        self._is_ended = False

    def opened(self, engine: Description) -> None:
        """The request has its look-up behind it and waits for blocks."""
        self._about["gen_ai.request.model"] = engine.model
        self._about["holdfast.backend"] = engine.backend
        self._part("look_up", time.time_ns())

    def take(self, frame: Frame) -> None:
        match frame:
            case Started(usage=usage):
                now = time.time_ns()
                computed: dict[str, Value] = {
                    "holdfast.cache.computed_tokens": usage.computed_tokens
                }
                self._about |= computed | {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
                    "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens,
                    "holdfast.cache.tier": frame.receipt.tier,
                }
                if frame.miss_reason is not None:
                    self._about["holdfast.cache.miss_reason"] = frame.miss_reason
                self._part("queue", max(now - int(frame.prefill_seconds * 1e9), self._at_ns))
                self._part("prefill", now, computed)
            case Finished():
                self._about["gen_ai.response.finish_reasons"] = [frame.reason]
            case Done():
                told: dict[str, Value] = {"gen_ai.usage.output_tokens": frame.output_tokens}
                self._about |= told
                self._part("decode", time.time_ns(), told)
                self.end()
            case Failed():
                self.end(frame.code)

    def end(self, error: str | None = None) -> None:
        """It is over, with an `error`'s kind if it failed. Only the first end counts."""
        if self._is_ended:
            return
        self._is_ended = True
        if error == "cancelled" and self._parts and self._parts[-1][0] == "prefill":
            self._part("decode", time.time_ns())
        parent = self._traces.context_of(self._headers)
        span = self._traces.begin("generate", parent, SpanKind.SERVER, self._about, self._began_ns)
        below = self._traces.below(span)
        for name, began_ns, ended_ns, about in self._parts:
            self._traces.begin(name, below, SpanKind.INTERNAL, about, began_ns).end(ended_ns)
        if error is not None:
            fail(span, error)
        span.end()

    def _part(self, name: str, ended_ns: int, about: dict[str, Value] | None = None) -> None:
        self._parts.append((name, self._at_ns, ended_ns, about or {}))
        self._at_ns = ended_ns


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
        self._call.end("cancelled")

    def __del__(self) -> None:
        self._call.end("cancelled")
