"""THE MAIN PATH: one turn, served and accounted for.

`_run` is the whole of it, in the order of the design: admit, wait until an engine has room
(`gate.py`), open, send (`dispatch.py`: route and generate, at another engine if need be), close.
Every turn's record is closed, however the turn ends. On the last frame the record is closed before
the frame is passed on. Otherwise the reconciler closes it, with the engine's own counts.
"""

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass, field

from engine.protocol import Done, Finished, Frame, Started
from gateway.base.background import Background
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.grants import AutoCache
from gateway.base.metrics import Metrics
from gateway.base.record import CLIENT_LEFT, MODEL_CHARACTERS, TurnRecord
from gateway.journal.charge import Billing, Meter
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.limits.admission import Admission
from gateway.limits.congestion import Unanswered
from gateway.prompt.ask import Ask, TurnId
from gateway.prompt.ignored import Ignored
from gateway.prompt.origin import NO_ORIGIN, Origin
from gateway.routing.engine import Engine
from gateway.turn.answers import kept_text, status_of
from gateway.turn.diagnostics import Comparison, Diagnosis, PromptComparer
from gateway.turn.dispatch import Dispatch, Dispatcher
from gateway.turn.failures import is_unsure
from gateway.turn.ids import Ids
from gateway.turn.tracing import NO_TRACE, TracedTurn, Tracing, TurnTrace
from gateway.turn.why_missed import LastHolders

_OK = 200


@dataclass(slots=True)
class Findings:
    """The gateway's additions to the engine's first frame.

    They are complete when that frame is passed on.
    """

    engine: str = ""
    miss_reason: str | None = None
    ignored: list[Ignored] = field(default_factory=list)
    auto_cache: AutoCache | None = None
    diagnosis: Diagnosis | None = None


@dataclass(slots=True)
class RunningTurn:
    """The state of one running turn."""

    id: TurnId
    ask: Ask
    meter: Meter
    dispatch: Dispatch
    is_closed: bool = False
    outcome: str = CLIENT_LEFT
    comparison: Comparison | None = None
    findings: Findings = field(default_factory=Findings)
    is_streaming: bool = False

    @property
    def record(self) -> TurnRecord:
        return self.meter.record


@dataclass(frozen=True, slots=True)
class Taken:
    """The first item of every turn: an engine has accepted it.

    The turn may still move to another engine until the first frame.
    """

    findings: Findings


@dataclass(slots=True, kw_only=True)
class TurnService:
    dispatcher: Dispatcher
    journal: Journal
    reconciler: Reconciler
    admission: Admission
    billing: Billing
    metrics: Metrics
    background: Background
    diagnostics: PromptComparer
    residency: LastHolders
    clock: Clock
    ids: Ids = field(default_factory=Ids)
    tracing: Tracing | None = None

    def new_id(self) -> TurnId:
        """A new id.

        It begins with this journal's id, so that each gateway recognizes its own turns.
        """
        return TurnId(f"msg_{self.journal.instance}{self.ids.hex(10)}")

    def run(
        self, ask: Ask, turn_id: TurnId, origin: Origin = NO_ORIGIN
    ) -> AsyncGenerator[Taken | list[Frame], None]:
        """Yield Taken, then the turn's frames, as many at a time as have come.

        An empty list is a heartbeat.

        An error before the first item is the response's status. A later error is the stream's. The
        frames of an answer that is not streamed come when the answer is whole, because another
        engine may begin it anew.
        """
        if self.tracing is None:
            return self._run(ask, turn_id, origin, NO_TRACE)
        return self._traced(ask, turn_id, origin, self.tracing.begin(ask, turn_id, origin))

    async def _traced(
        self, ask: Ask, turn_id: TurnId, origin: Origin, trace: TracedTurn
    ) -> AsyncGenerator[Taken | list[Frame], None]:
        """As `run`. The trace ends when the turn does, in whatever way."""
        failure: GatewayError | None = None
        items = self._run(ask, turn_id, origin, trace)
        try:
            async for item in items:
                yield item
        except GatewayError as error:
            failure = error
            raise
        finally:
            await items.aclose()
            trace.ended(failure)

    async def _run(
        self, ask: Ask, turn_id: TurnId, origin: Origin, trace: TurnTrace
    ) -> AsyncGenerator[Taken | list[Frame], None]:
        self.dispatcher.check_length(ask)
        gate, tokens = self.dispatcher.gate, ask.estimated_tokens
        with ExitStack() as admitted:
            with ExitStack() as entering:
                if ask.is_batch:
                    # A row that waits for idle room takes no place of its workspace's turns.
                    passing = entering.enter_context(await gate.enter(ask))
                backlog = self.journal.backlog
                place = admitted.enter_context(
                    self.admission.admitted(turn_id, ask.principal, tokens, backlog)
                )
                if not ask.is_batch:
                    passing = entering.enter_context(await gate.enter(ask))
                if passing.unanswered is not None:
                    admitted.enter_context(passing.unanswered)
                turn = await self._open(ask, turn_id, origin, trace)
                turn.dispatch.is_charged = passing.is_charged
                turn.dispatch.unanswered = passing.unanswered
            place.is_open = True
            try:
                turn.comparison = self.diagnostics.begin(ask)
                await self.dispatcher.send(turn.dispatch)
                # The head of a stream goes out next.
                turn.is_streaming = ask.stream
                yield Taken(turn.findings)
                whole: list[Frame] = []
                async for frames in self.dispatcher.frames(turn.dispatch):
                    for frame in frames:
                        self._note(turn, frame)
                        if isinstance(frame, Started):
                            whole.clear()
                        if not ask.stream:
                            whole.append(frame)
                    if frames and isinstance(frames[-1], Done):
                        await self._close(turn)
                    if ask.stream:
                        yield frames
                if whole:
                    yield whole
            except GatewayError as error:
                turn.outcome = error.type
                turn.record.error = kept_text(error)
                turn.record.status = _OK if turn.is_streaming else status_of(error, ask.dialect)
                raise
            finally:
                self._leave(turn)

    async def count(self, ask: Ask) -> int:
        """The exact tokens of the prompt, from the engine that would serve it."""
        return await self.dispatcher.count(ask)

    async def _open(
        self, ask: Ask, turn_id: TurnId, origin: Origin, trace: TurnTrace
    ) -> RunningTurn:
        """Write the turn's record to the journal, before an engine is called.

        Raise JournalFull or JournalUnavailable.
        """
        now = self.clock.wall()
        record = TurnRecord(
            id=turn_id,
            instance=self.journal.instance,
            workspace=ask.principal.workspace,
            key_id=ask.principal.key_id,
            model=_storable(ask.model.id),
            stream=ask.stream,
            opened_at=now,
            price=ask.model.price,
            num_removed=ask.num_removed,
            dialect=ask.dialect,
            http_request_id=origin.request_id,
            user_agent=origin.user_agent,
            name=ask.name,
        )
        trace.opened(record)
        if (marked := ask.plan.deepest_marked()) is not None:
            record.prefix, record.prefix_ttl = marked
        await self.journal.open(record)
        dispatch = Dispatch(ask, record, trace=trace)
        return RunningTurn(turn_id, ask, Meter(record), dispatch)

    def _note(self, turn: RunningTurn, frame: Frame) -> None:
        match frame:
            case Started():
                seconds = self._seconds(turn)
                turn.meter.started(frame, seconds)
                cache = "read" if frame.usage.cache_read_tokens else "cold"
                self.metrics.turns.count_first_token(cache, turn.record.engine_model, seconds)
                self._explain(turn, frame)
            case Finished():
                turn.meter.finish(frame)
            case Done():
                turn.meter.done(frame)

    def _explain(self, turn: RunningTurn, started: Started) -> None:
        """Complete the turn's findings, and remember the turn for later comparisons."""
        ask, engine = turn.ask, turn.dispatch.engine
        turn.findings.engine = engine.name
        turn.findings.ignored = ask.notes.told(engine.capabilities, started.unheld)
        turn.findings.auto_cache = ask.plan.automatic
        tokens = started.receipt.name_tokens
        fingerprint = ask.fingerprint(started.usage.prompt_tokens, tokens)
        packed = self.diagnostics.remember(ask.principal.workspace, turn.id, fingerprint)
        turn.record.fingerprint = packed
        findings, diagnosis = turn.findings, None
        if turn.comparison is not None:
            diagnosis = findings.diagnosis = turn.comparison.diagnosis(fingerprint)
        reason: str | None = started.miss_reason
        if reason == "cold":
            held = self.residency.explain(
                engine.name, started.epoch, ask.plan.marked_prefixes(), ask.arrived
            )
            changed = diagnosis.divergence if diagnosis else None
            if held is not None:
                reason = held
            elif changed is not None and changed.missed_tokens is not None:
                reason = changed.kind
        turn.record.miss_reason = findings.miss_reason = reason
        self.residency.learn(engine.name, started, ask.plan.names, self.clock.monotonic())

    async def _close(self, turn: RunningTurn) -> None:
        """Close the record durably before the last event goes out.

        If that fails, the event never goes out.
        """
        turn.record.duration_seconds = self._seconds(turn)
        turn.record.status = _OK
        self.billing.charge(turn.record)
        turn.is_closed = True
        await self.journal.close(turn.record)

    def _leave(self, turn: RunningTurn) -> None:
        """Handle every other end of a turn.

        This never awaits: it may run while the client's task is cancelled.
        """
        self.dispatcher.leave(turn.dispatch)
        if turn.is_closed:
            return
        record = turn.record
        record.outcome = turn.outcome
        if record.status is None and turn.is_streaming:
            record.status = _OK
        record.duration_seconds = self._seconds(turn)
        if not turn.dispatch.may_run:
            self.billing.charge(record)
            self.journal.close_soon(record)
            return
        unanswered = turn.dispatch.unanswered
        if unanswered is not None and record.outcome == CLIENT_LEFT:
            unanswered.abandoned()
        cancelling = self._cancel(turn.dispatch.engine, record.request_id, unanswered)
        self.background.spawn(cancelling, "cancel")
        self.reconciler.take_over(record)

    async def _cancel(self, engine: Engine, request_id: str, unanswered: Unanswered | None) -> None:
        try:
            await engine.cancel(request_id)
        except GatewayError as error:
            if not is_unsure(error):
                raise
        finally:
            if unanswered is not None:
                unanswered.ended()

    def _seconds(self, turn: RunningTurn) -> float:
        return self.clock.monotonic() - turn.ask.arrived


def _storable(model: str) -> str:
    """The model id, cut to what the ledger can hold. With an alias the client chose the id."""
    return model.replace("\x00", "")[:MODEL_CHARACTERS]
