"""The trace of a turn: a span for the turn, and below it a span for each call of an engine.

Names and attributes are OpenTelemetry's for generative AI (`gen_ai.*`). Others begin with
`holdfast.`. The parts of an engine's work are spans below its call, with the times that its frames
report. The only words of a client in attributes are the names of the model and of the workspace.
"""

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine.protocol import Started
from gateway.base.errors import ClientGone, GatewayError
from gateway.base.record import CLIENT_DISCONNECT, MODEL_CHARACTERS, TurnRecord
from gateway.base.traces import Traces, Value, fail, trace_headers
from gateway.prompt.ask import Ask, Origin

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OPERATION = "chat"
PROVIDER = "holdfast"
_RANKS = ("leased", "best_effort", "none")
Item = TypeVar("Item")


class TurnTrace:
    """A trace that records nothing, and what a trace is told.

    `opened` takes the turn's record, which is filled in until the turn ends. `sent` begins the call
    of an engine. `failed` or `left` ends that call. `around` yields the turn's items and then ends
    the trace.
    """

    __slots__ = ()

    def opened(self, record: TurnRecord) -> None: ...
    def sent(self, engine: str, record: TurnRecord) -> None: ...
    def started(self, frame: Started) -> None: ...
    def failed(self, error: GatewayError) -> None: ...
    def left(self) -> None: ...
    def around(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        return items


BeginTrace = Callable[[Ask, str, Origin], TurnTrace]


class SpannedTurn(TurnTrace):
    """The trace of a traced turn.

    Its span begins when the request arrived, below the client's own span. `monotonic` is the clock
    of `Ask.arrived`.
    """

    __slots__ = (
        *("_at_ns", "_below", "_call", "_has_started"),
        *("_model", "_record", "_span", "_traces"),
    )

    def __init__(
        self, traces: Traces, monotonic: Callable[[], float], ask: Ask, turn_id: str, origin: Origin
    ) -> None:
        waited = max(monotonic() - ask.arrived, 0.0)
        self._traces = traces
        self._model = ask.model.id[:MODEL_CHARACTERS]
        self._span = traces.begin(
            f"{OPERATION} {self._model}",
            traces.context_of(trace_headers(origin.headers)),
            "server",
            {
                "gen_ai.operation.name": OPERATION,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model,
                "gen_ai.request.stream": ask.stream,
                "gen_ai.response.id": turn_id,
                "holdfast.api": ask.dialect,
                "holdfast.workspace": ask.principal.workspace,
                "holdfast.request_id": origin.request_id or "",
            },
            time.time_ns() - int(waited * 1e9),
        )
        self._below = traces.below(self._span)
        self._call: Span | None = None
        self._record: TurnRecord | None = None
        # When the last part of the call ended.
        self._at_ns = 0
        self._has_started = False

    def opened(self, record: TurnRecord) -> None:
        """The turn was let in; until then it waited for an engine with room."""
        self._record = record
        self._span.add_event("holdfast.admitted")

    def sent(self, engine: str, record: TurnRecord) -> None:
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "server.address": engine,
            "holdfast.attempt": record.attempt,
        }
        self._call = self._traces.begin("engine_call", self._below, "client", attributes)
        self._at_ns = time.time_ns()

    def started(self, frame: Started) -> None:
        self._span.add_event("holdfast.first_frame")
        usage = frame.usage
        # What was read and written, why not more, and what is held now and where.
        attributes: dict[str, Value] = {
            # With all classes, as the convention asks.
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens,
            "holdfast.cache.automatic_tokens": usage.automatic_tokens,
            "holdfast.cache.computed_tokens": usage.computed_tokens,
            "holdfast.cache.tier": frame.receipt.tier,
            "holdfast.lease.state": min(
                (report.state for report in frame.breakpoints), key=_RANKS.index, default="none"
            ),
        }
        if frame.miss_reason is not None:
            attributes["holdfast.cache.miss_reason"] = frame.miss_reason
        seconds = [
            report.expires_in_seconds for report in frame.breakpoints if report.expires_in_seconds
        ]
        if seconds:
            attributes["holdfast.lease.seconds"] = max(seconds)
        for span in (self._span, self._call):
            if span is not None:
                span.set_attributes(attributes)
        now = time.time_ns()
        began = now - int(frame.prefill_seconds * 1e9)
        self._part("look_up", began - int(frame.queue_seconds * 1e9))
        self._part("queue", began)
        self._part("prefill", now)
        self._has_started = True

    def failed(self, error: GatewayError) -> None:
        if self._call is not None:
            fail(self._call, type(error).__name__)

    def left(self) -> None:
        if self._call is not None:
            if self._has_started:
                self._part("decode", time.time_ns())
            self._call.end()
            self._call = None
            self._has_started = False

    async def around(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        failure: GatewayError | None = None
        try:
            async for item in items:
                yield item
        except GatewayError as error:
            failure = error
            raise
        finally:
            await items.aclose()
            self.left()
            record = self._record
            if record is not None:
                attributes: dict[str, Value | None] = {
                    "gen_ai.usage.output_tokens": record.output_tokens,
                    "holdfast.outcome": record.outcome,
                    "holdfast.attempts": record.attempt,
                    "gen_ai.response.model": record.engine_model,
                    "gen_ai.response.time_to_first_chunk": record.first_token_seconds,
                    "gen_ai.response.finish_reasons": record.stop_reason and [record.stop_reason],
                    "http.response.status_code": record.status,
                    "holdfast.engine": record.engine,
                    # The gateway knows other engines and earlier turns, so its reason says more.
                    "holdfast.cache.miss_reason": record.miss_reason,
                }
                known = {name: value for name, value in attributes.items() if value is not None}
                self._span.set_attributes(known)
            if failure is not None:
                fail(self._span, failure.type)
            elif record is not None and record.outcome == CLIENT_DISCONNECT:
                fail(self._span, ClientGone.__name__)
            self._span.end()

    def _part(self, name: str, ended_ns: int) -> None:
        """Record a part of the engine's work, from the end of the part before it."""
        if self._call is not None:
            began_ns = self._at_ns
            self._at_ns = max(ended_ns, self._at_ns)
            below = self._traces.below(self._call)
            self._traces.begin(name, below, "internal", {}, began_ns).end(self._at_ns)


def tracing_of(traces: Traces | None, monotonic: Callable[[], float]) -> BeginTrace:
    """The function that begins the trace of a turn."""
    if traces is not None:
        return partial(SpannedTurn, traces, monotonic)
    untraced = TurnTrace()
    return lambda ask, turn_id, origin: untraced
