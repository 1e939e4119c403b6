"""THE MAIN PATH: one turn, served and accounted for.

`serve` is the whole path: admit (limits, then the queue), choose an engine, open in the journal,
send (`dispatch.py`), close. A turn that is refused before the opening has no record. A turn that
all engines refuse for want of room loses its record. Both are counted as refusals. The record of a
whole answer is closed before its last frame is passed on. Any other turn's record is closed when
the turn ends. If an engine may still run that turn, the reconciler closes the record with the
engine's counts.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from engine.protocol import Done, Frame, Started, held_as
from gateway.admission.permit import Admission, Permit
from gateway.base.background import Background
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, GatewayStopped, JournalUnavailable
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.record import CLIENT_DISCONNECT, MODEL_CHARACTERS, TurnRecord
from gateway.journal.contents import Content
from gateway.journal.drain import Billing
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prompt.ask import NO_ORIGIN, Ask, Origin, TurnId
from gateway.prompt.fingerprint import Fingerprint
from gateway.prompt.ignored import Ignored
from gateway.structs.usage import KEPT, NOT_BEGUN, UNFINISHED
from gateway.turn.contents import ContentWriter
from gateway.turn.diagnostics import LastHolders, PrefixRecaller, PromptComparer
from gateway.turn.dispatch import Dispatcher
from gateway.turn.misses import Missed, Misses, marks_of
from gateway.turn.state import (
    HEARTBEAT,
    OK,
    Accepted,
    Arrived,
    RowTurn,
    Turn,
    TurnEvent,
    Whole,
    is_unsure,
)
from gateway.turn.tracing import BeginTrace, TurnTrace

TurnEvents = AsyncGenerator[TurnEvent, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnService:
    """Serves turns."""

    dispatcher: Dispatcher
    journal: Journal
    reconciler: Reconciler
    admission: Admission
    billing: Billing
    metrics: Metrics
    background: Background
    diagnostics: PromptComparer
    last_holders: LastHolders
    recaller: PrefixRecaller
    content_writer: ContentWriter
    clock: Clock
    begin_trace: BeginTrace
    # Set when the gateway stops and its grace is over: what still runs is cut off.
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    def new_id(self) -> TurnId:
        """A new id. It begins with this journal's id, so each gateway recognizes its own turns."""
        return TurnId(f"msg_{self.journal.instance}{os.urandom(10).hex()}")

    def run(
        self,
        ask: Ask,
        turn_id: TurnId,
        origin: Origin = NO_ORIGIN,
        row: RowTurn | None = None,
    ) -> TurnEvents:
        """As `serve`, in a trace that ends with the turn, however the turn ends."""
        trace = self.begin_trace(ask, turn_id, origin)
        return trace.around(self.serve(ask, turn_id, origin, trace, row))

    async def serve(
        self,
        ask: Ask,
        turn_id: TurnId,
        origin: Origin,
        trace: TurnTrace,
        row: RowTurn | None = None,
    ) -> TurnEvents:
        """Yield Accepted; then the frames of a stream as Arrived, with heartbeats between them, or
        the frames of an answer in one piece as one Whole. With `row` the turn runs a batch's row,
        and the row ends with it."""
        self.dispatcher.check_length(ask)
        with Permit(turn_id=turn_id, ask=ask, admission=self.admission) as permit:
            await self.admission.admit(permit, self.journal.backlog)
            record = self._record(ask, turn_id, origin, row)
            trace.opened(record)
            turn = Turn(ask, record, permit, trace, row)
            await self._open(turn)
            try:
                turn.comparison = self.diagnostics.begin(ask)
                await self.dispatcher.send(turn)
                turn.is_streaming = ask.stream
                yield Accepted(turn_id, turn.findings)
                async for frames in self.dispatcher.frames(turn):
                    await self._take(turn, frames)
                    if ask.stream:
                        yield Arrived(frames) if frames else HEARTBEAT
                if not ask.stream:
                    yield Whole(turn.whole)
            except GatewayError as error:
                turn.fail(error)
                error.is_recorded = not turn.is_refused
                permit.is_open = not turn.is_refused
                if turn.has_started:
                    get_logger("turn").warning(
                        "turn_failed", turn=turn_id, type=turn.outcome, error=record.error
                    )
                raise
            except (asyncio.CancelledError, GeneratorExit):
                if row is None and self.cut.is_set():
                    turn.fail(GatewayStopped())
                    permit.is_open = not turn.is_refused
                else:
                    turn.outcome = CLIENT_DISCONNECT
                raise
            finally:
                self._leave(turn)

    async def _take(self, turn: Turn, frames: Sequence[Frame]) -> None:
        """Take in the next frames, and close the turn with the last one."""
        seconds = self._seconds(turn)
        for frame in frames:
            turn.note(frame, seconds)
            if isinstance(frame, Started):
                if frame.miss_reason == "cold":
                    await self._recall(turn)
                self._explain(turn, frame)
        if frames and isinstance(frames[-1], Done):
            await self._close(turn)
            await turn.permit.give_back()

    def _record(self, ask: Ask, turn_id: TurnId, origin: Origin, row: RowTurn | None) -> TurnRecord:
        """The turn's record as it is opened."""
        record = TurnRecord(
            id=turn_id,
            instance=self.journal.instance,
            workspace=ask.principal.workspace,
            key_id=ask.principal.key_id,
            # Cut to what the ledger can hold. While no engine is known the client chose the id.
            model=ask.model.name.replace("\x00", "")[:MODEL_CHARACTERS],
            stream=ask.stream,
            opened_at=self.clock.wall(),
            price=ask.model.price,
            num_removed=ask.num_removed,
            dialect=ask.dialect,
            http_request_id=origin.request_id,
            user_agent=origin.user_agent,
            name=ask.name,
            row=None if row is None else row.attempt,
            content=UNFINISHED if ask.principal.keeps_contents else None,
        )
        breakpoint = ask.plan.deepest_breakpoint()
        if breakpoint is not None:
            record.prefix, record.prefix_ttl = breakpoint
        return record

    async def _open(self, turn: Turn) -> None:
        """Give the turn an engine, then open it durably. Where no engine can take it, or the
        journal has no room, the turn is refused and has no record."""
        try:
            await self.dispatcher.assign(turn)
            await self.journal.open(turn.record)
            turn.permit.is_open = True
        finally:
            if not turn.permit.is_open:
                self.dispatcher.leave(turn)

    async def _close(self, turn: Turn) -> None:
        """Close the turn durably, before its last event goes out.

        If the close fails, the event never goes out. The record then says what the client got, even
        if the close succeeds later. A batch's row can wait: its result is written with the close,
        which has no deadline.
        """
        record = turn.record
        content = await self._content_of(turn)
        record.duration_seconds = self._seconds(turn)
        record.status = OK
        if turn.row is not None:
            turn.end_row(await turn.row.whole(turn.findings, turn.whole))
        self.billing.price(record)
        turn.is_closed = True
        try:
            if turn.row is not None:
                await self.journal.close_soon(record, content)
            else:
                await self.journal.close(record, content)
        except JournalUnavailable as error:
            turn.fail(error)
            record.outcome = turn.outcome
            record.withhold()
            self.journal.correct_soon(record)
            raise
        finally:
            self.billing.count(record)

    async def _content_of(self, turn: Turn) -> Content | None:
        """The content of a whole turn to store; None where its workspace stores none."""
        if not turn.ask.principal.keeps_contents:
            return None
        content = await self.content_writer.sealed(turn)
        if content is not None:
            turn.record.content = KEPT
        return content

    async def count(self, ask: Ask) -> int:
        """The exact tokens of the prompt, from the engine that would serve it."""
        return await self.dispatcher.count(ask)

    def _explain(self, turn: Turn, started: Started) -> None:
        """Complete the turn's findings, and remember the turn for later comparisons."""
        ask = turn.ask
        record = turn.record
        engine = turn.engine
        findings = turn.findings
        cache = "read" if started.usage.cache_read_tokens else "cold"
        seconds = record.first_token_seconds or 0.0
        self.metrics.count_first_token(cache, record.model, seconds)
        findings.engine = engine.name
        findings.ignored = ask.notes.ignored_by(engine.capabilities, started.unheld)
        ttls = engine.ttls
        findings.ignored += ask.shortened(ttls)
        findings.ttls = ttls
        findings.is_isolated = engine.is_isolated
        breakpoint = ask.plan.deepest_breakpoint()
        if breakpoint is not None:
            record.prefix_ttl = held_as(breakpoint[1], ttls)
        description = engine.description
        max_tokens = ask.sampling.max_tokens or 0
        # With log probabilities `max_tokens` may be the bound of a gathered answer.
        is_of_client = ask.sampling.logprobs is None
        if description is not None and is_of_client and max_tokens > description.max_context_tokens:
            reason = f"an answer ends where the context of {description.max_context_tokens} is full"
            findings.ignored.append(Ignored(ask.path_of("max_tokens"), reason))
        findings.auto_cache = ask.plan.policy
        tokens = started.receipt.name_tokens
        fingerprint = ask.fingerprint(started.usage.prompt_tokens, tokens)
        if turn.comparison is not None:
            findings.diagnosis = turn.comparison.diagnosis(fingerprint)
        missed = self._missed(turn, started, fingerprint)
        record.miss_reason = missed.request
        findings.miss_reason = missed.request
        findings.missed = missed.marks
        record.marks = marks_of(ask.plan, started, missed)
        record.fingerprint = self.diagnostics.remember(
            record.workspace, record.id, fingerprint, record.key_id
        )
        now = self.clock.monotonic()
        model = record.engine_model or ""
        self.last_holders.learn(engine.name, model, started, ask.plan.names, now)

    async def _recall(self, turn: Turn) -> None:
        """Ask the ledger who held the prefix, if this process does not know. Engine and gateway may
        both have been restarted. This waits for a moment at most."""
        prefixes = list(turn.ask.plan.marked_prefixes())
        if not prefixes or self.last_holders.knows(prefixes):
            return
        use = await self.recaller.last_use(turn.record.workspace, prefixes)
        if use is not None:
            self.last_holders.recall(use, self.clock.wall(), self.clock.monotonic())

    def _missed(self, turn: Turn, started: Started, fingerprint: Fingerprint) -> Missed:
        """Why the turn's breakpoints were not read."""
        record = turn.record
        misses = Misses(
            holders=self.last_holders,
            engine=turn.prefilled_by or turn.engine.name,
            model=record.engine_model or "",
            epoch=turn.prefilled.epoch if turn.prefilled is not None else started.epoch,
            arrived=turn.ask.arrived,
            plan=turn.ask.plan,
            started=started,
        )
        diagnosis = turn.findings.diagnosis
        change = None
        if diagnosis is not None:
            change = diagnosis.divergence
        elif misses.may_be_changed_head:
            change = self.diagnostics.changed_since(record.key_id, fingerprint)
        return misses.explain(change)

    def _leave(self, turn: Turn) -> None:
        """End a turn that was not closed. This never awaits: the client's task may be cancelled."""
        self.dispatcher.leave(turn)
        if turn.is_closed:
            return
        if turn.is_refused:
            self.journal.drop_soon(turn.record.journal_id)
            return
        if turn.ask.principal.keeps_contents and not turn.record.is_given_up:
            if turn.has_started:
                self.content_writer.write(turn)
            else:
                turn.record.content = NOT_BEGUN
        record = turn.record
        record.outcome = turn.outcome
        if record.status is None and turn.is_streaming:
            record.status = OK
        elif record.status is None and turn.outcome != CLIENT_DISCONNECT:
            record.status = GatewayError.status  # a failure that nobody foresaw
        record.duration_seconds = self._seconds(turn)
        if not turn.may_run:
            self.billing.charge(record)
            self.journal.close_soon(record)
            return

        async def cancel() -> None:
            try:
                await turn.engine.cancel(record.request_id)
            except GatewayError as error:
                if not is_unsure(error):
                    raise

        self.background.spawn(cancel(), "cancel")
        self.reconciler.take_over(record)

    def _seconds(self, turn: Turn) -> float:
        return self.clock.monotonic() - turn.ask.arrived
