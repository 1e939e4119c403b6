"""What a turn tells to its trace. Where nothing is traced, every call does nothing."""

from collections.abc import Callable

from engine.protocol import Started
from gateway.base.errors import GatewayError
from gateway.base.record import TurnRecord
from gateway.base.traces import Traces
from gateway.prompt.ask import Ask, Origin


class TurnTrace:
    """A turn that is not traced.

    `opened` has the turn's record, which is filled in until `ended`. `sent` begins the call of an
    engine, which ends with `failed` or `left`. `ended` comes last; `error` ended the turn before
    its answer was whole.
    """

    __slots__ = ()

    def opened(self, record: TurnRecord) -> None: ...
    def sent(self, engine: str, record: TurnRecord) -> None: ...
    def started(self, frame: Started) -> None: ...
    def failed(self, error: GatewayError) -> None: ...
    def left(self) -> None: ...
    def ended(self, error: GatewayError | None) -> None: ...


BeginTrace = Callable[[Ask, str, Origin], TurnTrace]
_NO_TRACE = TurnTrace()


def untraced(ask: Ask, turn_id: str, origin: Origin) -> TurnTrace:
    return _NO_TRACE


def tracing_of(traces: Traces | None, monotonic: Callable[[], float]) -> BeginTrace:
    """What begins the trace of a turn. OpenTelemetry is imported only where there are traces."""
    if traces is None:
        return untraced
    from gateway.turn.spans import Spans

    return Spans(traces, monotonic).begin
