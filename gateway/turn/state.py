"""`Turn`: the state of one turn, from its admission to its close."""

from dataclasses import dataclass, field

from engine.protocol import Done, Finished, Frame, Started
from gateway.admission.permit import Permit
from gateway.base.errors import DemandRefused, GatewayError
from gateway.base.record import CLIENT_LEFT, TurnRecord
from gateway.dialects import errors
from gateway.dialects.collector import Found
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.routing.generation import Generation
from gateway.routing.router import Route
from gateway.turn.attempts import Attempts
from gateway.turn.diagnostics import Comparison, Diagnosis
from gateway.turn.first_leg import FirstLeg
from gateway.turn.tracing import TurnTrace

OK = 200
ERROR_CHARACTERS = 300
"""The most characters of an error's message that the ledger keeps."""


@dataclass(slots=True)
class Findings(Found):
    """The gateway's additions to the engine's first frame, with the requested comparison."""

    diagnosis: Diagnosis | None = None


@dataclass(slots=True, eq=False)
class Turn:
    """`record` is what the journal keeps: the engine, the attempt, the counts, the outcome.

    `route` and `generation` are those of the last attempt. `may_run`: the engine may have its
    request. `has_started`: its first frame has come. `failure` ended the attempt before. `leg` is
    the first leg while it runs, `prefilled` what came of it (`first_leg.py`).

    `is_streaming`: the head of a stream went out. `whole` has the frames of an answer in one piece.
    """

    ask: Ask
    record: TurnRecord
    permit: Permit
    trace: TurnTrace
    comparison: Comparison | None = None
    findings: Findings = field(default_factory=Findings)
    attempts: Attempts = field(default_factory=Attempts)
    route: Route[Engine] | None = None
    generation: Generation | None = None
    may_run: bool = False
    has_started: bool = False
    failure: GatewayError | None = None
    leg: FirstLeg | None = None
    prefilled: Started | None = None
    outcome: str = CLIENT_LEFT
    stop_reason: str | None = None
    is_streaming: bool = False
    is_closed: bool = False
    whole: list[Frame] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        assert self.route is not None
        return self.route.engine

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def has_gone_out(self) -> bool:
        """Whether a byte of the answer has gone out. An answer in one piece goes out at its end."""
        return self.has_started and self.ask.stream

    def note(self, frame: Frame, seconds: float) -> None:
        """Count a frame that came `seconds` after the turn did."""
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
                record.take_usage(frame.usage)
            case Finished():
                self.stop_reason = self.stop_reason or frame.reason
                record.thinking_tokens += frame.thinking_tokens
            case Done():
                record.output_tokens = frame.output_tokens
                record.decode_seconds = frame.decode_seconds
                record.outcome = record.stop_reason = self.stop_reason or "stop"
        if not self.ask.stream:
            self.whole.append(frame)

    def fail(self, error: GatewayError) -> None:
        """The turn ends by an error, which the client is told. The record keeps its message.

        A refused schema is named by its place alone, because the reason quotes what the client
        wrote.
        """
        text = str(error)
        if isinstance(error, DemandRefused):
            text = f"{text.split(' ', 1)[0].rstrip(':')}: output can't be held to it"
        self.outcome = error.type
        self.record.error = text.replace("\x00", "")[:ERROR_CHARACTERS]
        # Google's statuses are those of OpenAI.
        status = errors.status_of(
            error, "anthropic" if self.ask.dialect == "anthropic" else "openai"
        )
        self.record.status = OK if self.is_streaming else status
