"""The state of one turn, from its admission to its close, and what failures of its attempts mean.

Pure.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.protocol import Delta, Done, Finished, Frame, Started
from gateway.admission.permit import Permit
from gateway.base.errors import (
    DemandRefused,
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    NotServed,
    Overloaded,
    SchemaTooCostly,
)
from gateway.base.record import RowTry, TurnRecord
from gateway.dialects import errors
from gateway.dialects.collector import Findings
from gateway.prompt.ask import Ask, Dialect, TurnId
from gateway.routing.client import CannotConnect, Generation
from gateway.routing.engine import Engine
from gateway.routing.router import Route
from gateway.turn.diagnostics import Comparison
from gateway.turn.tracing import TurnTrace

MAX_ATTEMPTS = 3
"""The most times that one turn is sent."""
MAX_LOST = 2
"""After this many lost or silent engines a turn is not sent again: the turn may be the cause."""
_MAX_AT_ONE = 2
"""The most times that one turn is sent to the same engine."""
PUT_OFF_SECONDS = 1.0
OK = 200
ERROR_CHARACTERS = 300
"""The most characters of an error's message that the ledger keeps."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An engine has accepted the turn. The turn may still move to another engine. A failure before
    this event is the response's status. A later failure is the end of the stream."""

    turn_id: TurnId
    findings: Findings


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine is working, and nothing more of the answer has come."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The next frames of a stream."""

    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class Whole:
    """All frames of an answer in one piece. They come together at the end, because until then
    another engine may begin the answer anew."""

    frames: Sequence[Frame]


TurnEvent = Accepted | Heartbeat | Arrived | Whole
HEARTBEAT = Heartbeat()


@dataclass(slots=True)
class Attempts:
    """The engines that one turn, or one count, was sent to.

    An engine whose connection broke is asked once more after it has answered a poll: the fleet may
    have no other, and its new process knows nothing of the turn. On vLLM a start takes minutes, so
    no turn waits for one.
    """

    # How many attempts an engine took or may have taken, by its URL.
    sent: dict[str, int] = field(default_factory=dict)
    # When an engine's connection last broke, by its URL.
    lost: dict[str, float] = field(default_factory=dict)
    # When the first connection of all broke.
    first_lost: float = math.inf
    # How many connections broke during the turn.
    num_lost: int = 0
    # How many engines did not accept the turn in time.
    num_silent: int = 0
    # Until when an engine is not asked because it put this turn off, by its URL.
    put_off_until: dict[str, float] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether no further attempt is made."""
        may_be_turns_fault = self.num_lost + self.num_silent >= MAX_LOST
        return may_be_turns_fault or sum(self.sent.values()) >= MAX_ATTEMPTS

    def begin(self, url: str) -> None:
        self.sent[url] = self.sent.get(url, 0) + 1

    def take_back(self, url: str) -> None:
        """Undo `begin`: the engine did not take the turn, and may be asked again."""
        self.sent[url] -= 1
        if not self.sent[url]:
            del self.sent[url]

    def put_off(self, url: str, now: float) -> None:
        """Note that the engine takes this turn later. It is asked again in PUT_OFF_SECONDS."""
        self.take_back(url)
        self.put_off_until[url] = now + PUT_OFF_SECONDS

    def resting(self, now: float) -> list[str]:
        """URLs of engines that put the turn off and are not asked yet."""
        return [url for url, until in self.put_off_until.items() if until > now]

    def failed(self, url: str, error: GatewayError, now: float) -> None:
        """Note why the last attempt ended. A refused connection counts as no attempt."""
        if isinstance(error, EngineLost):
            self.lost[url] = now
            self.first_lost = min(self.first_lost, now)
        if isinstance(error, CannotConnect):
            self.take_back(url)
        elif isinstance(error, EngineLost):
            self.num_lost += 1

    def tried(self, ready: Iterable[Engine]) -> list[str]:
        """URLs of engines that are not asked again, or not yet. `ready` are those that answer."""
        returned = {
            engine.url
            for engine in ready
            if self._is_awaited(engine) and engine.answered_at > self.lost[engine.url]
        }
        return [url for url in self.sent if url not in returned]

    def may_return(self, engines: Iterable[Engine], now: float, seconds: float) -> bool:
        """Whether to wait for a lost engine, for `seconds` after the first loss at most."""
        is_early = now < self.first_lost + seconds
        return is_early and not self.is_last and any(map(self._is_awaited, engines))

    def _is_awaited(self, engine: Engine) -> bool:
        is_lost = engine.url in self.lost and not engine.is_draining
        if engine.description is not None and engine.description.backend == "vllm":
            return False
        return is_lost and self.sent.get(engine.url, 0) < _MAX_AT_ONE


@dataclass(slots=True)
class FirstLeg:
    """A running first leg."""

    route: Route[Engine]
    began: float
    # Its first frame; None until that has come.
    started: Started | None = None


RowEnd = tuple[str, bytes]
"""How a row of a batch ends: its status, and its result, compressed and encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTurn:
    """A try of a batch's row."""

    attempt: RowTry
    # Makes the row's end from the whole answer.
    whole: Callable[[Findings, Sequence[Frame]], Awaitable[RowEnd]]
    # Makes the row's end from an error; None where the row is to run again.
    failed: Callable[[GatewayError], RowEnd | None]


@dataclass(slots=True, eq=False)
class Turn:
    """The state of one turn."""

    ask: Ask
    # As it goes to the journal.
    record: TurnRecord
    permit: Permit
    trace: TurnTrace
    # The batch's row that this turn runs; None for a turn of its own.
    row: RowTurn | None = None
    # What the gateway adds to the answer. The turn fills it in; the answer's writer reads it.
    findings: Findings = field(default_factory=Findings)
    comparison: Comparison | None = None
    attempts: Attempts = field(default_factory=Attempts)
    # The route and the frames of the last attempt.
    route: Route[Engine] | None = None
    generation: Generation | None = None
    # Whether the engine may run the last attempt's request.
    may_run: bool = False
    # Whether any engine may have taken one of the turn's requests.
    was_taken: bool = False
    # Whether all engines refused the turn for want of room. It has no record then.
    is_refused: bool = False
    # Whether the last attempt's first frame has come.
    has_started: bool = False
    # What ended the last attempt.
    failure: GatewayError | None = None
    # The first leg while it runs (`dispatch.py`).
    leg: FirstLeg | None = None
    # The first frame of an ended first leg, and the name of its engine.
    prefilled: Started | None = None
    prefilled_by: str = ""
    outcome: str = GatewayError.type
    stop_reason: str | None = None
    # Whether the head of a stream has gone out.
    is_streaming: bool = False
    is_closed: bool = False
    # The frames of an answer in one piece, or of one that is stored.
    whole: list[Frame] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        assert self.route is not None
        return self.route.engine

    @property
    def has_gone_out(self) -> bool:
        """Whether a byte of the answer has gone out. An answer in one piece goes out at its end."""
        return self.has_started and self.ask.stream

    def note(self, frame: Frame, seconds: float) -> None:
        """Take in a frame that came `seconds` after the turn's arrival. Raise SchemaTooCostly if
        the frame says so."""
        if not isinstance(frame, Delta):
            self._count(frame, seconds)
        if not self.ask.stream or self.ask.principal.keeps_contents:
            self.whole.append(frame)

    def _count(self, frame: Frame, seconds: float) -> None:
        record = self.record
        match frame:
            case Started():
                # The answer begins, at the first engine or anew at another.
                self.stop_reason = None
                self.whole.clear()
                record.epoch = frame.epoch
                record.miss_reason = frame.miss_reason
                record.first_token_seconds = seconds
                record.queue_seconds = frame.queue_seconds
                record.prefill_seconds = frame.prefill_seconds
                record.leases_granted = frame.leases_granted
                record.approximate = frame.approximate.text if frame.approximate else None
                record.take_usage(frame.usage)
            case Finished(reason="too_costly"):
                raise SchemaTooCostly(
                    f"{self._constraint}: the answer can't be held to it: what may come next"
                    " takes too much time or memory to find out"
                )
            case Finished():
                self.stop_reason = self.stop_reason or frame.reason
                record.thinking_tokens += frame.thinking_tokens
            case Done():
                record.output_tokens = frame.output_tokens
                record.decode_seconds = frame.decode_seconds
                record.stop_reason = self.stop_reason or "stop"
                record.outcome = record.stop_reason

    @property
    def _constraint(self) -> str:
        """The field of the request that constrains the answer."""
        if self.ask.output_pattern is not None:
            return "output_pattern"
        return "tools" if self.ask.output_schema is None else "output_schema"

    def fail(self, error: GatewayError) -> None:
        """End the turn with an error, for the client and for the record. The record of a refused
        schema names only its place, because the reason quotes the client."""
        text = str(error)
        if type(error) is DemandRefused:
            text = f"{text.split(' ', 1)[0].rstrip(':')}: output can't be held to it"
        self.outcome = error.type
        self.record.error = text.replace("\x00", "")[:ERROR_CHARACTERS]
        # Google's statuses are those of OpenAI.
        dialect: Dialect = "anthropic" if self.ask.dialect == "anthropic" else "openai"
        status = errors.status_of(error, dialect)
        self.record.status = OK if self.is_streaming else status
        end = None if self.row is None else self.row.failed(error)
        if end is not None:
            self.end_row(end)
        self.is_refused = isinstance(error, Overloaded) and not self.was_taken and end is None

    def end_row(self, end: RowEnd) -> None:
        """Write the row's result into the record."""
        attempt = self.record.row
        assert attempt is not None
        attempt.status, attempt.result = end


def is_unsure(error: GatewayError) -> bool:
    """Whether the engine may have taken the turn although no answer came."""
    return isinstance(error, EngineLost | EngineTimeout)


def is_breakdown(error: GatewayError) -> bool:
    """Whether the error counts against the engine: it was lost, was silent, or failed."""
    return is_unsure(error) or isinstance(error, EngineFailed)


def is_retried(error: GatewayError) -> bool:
    """Whether another engine may succeed. An error of the prompt itself would come from any."""
    return is_breakdown(error) or isinstance(error, Overloaded)


def for_client(error: GatewayError) -> GatewayError:
    """The error for a client that has received nothing of the answer."""
    return NotServed() if isinstance(error, EngineLost) else error


def reason_of(error: GatewayError) -> str:
    match error:
        case EngineTimeout() | NotServed():
            return "timeout"
        case EngineLost():
            return "lost"
        case EngineFailed():
            return "failed"
    return "refused"
