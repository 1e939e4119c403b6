"""Closes turns that ended without their last frame, from the engine's own final counts.

These are turns whose client or engine went away, and turns that a killed gateway left open in its
journal. An engine stores final counts until they are acknowledged. A turn that no engine knows
after some time is closed with the counts that are known. A turn that moves to another engine leaves
a request behind. That request is cancelled and acknowledged, and nobody pays for it.

An engine may report counts of a turn that the journal does not have. They are acknowledged only if
the ledger has the turn. If the ledger does not have it either, one of the two was damaged or
restored. The turn is then set aside by its name, and closed with the engine's counts (`lost.py`). A
damaged journal goes on under a new instance, so counts of its former instances are its own too.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from engine.protocol import FinalCounts
from gateway.base.background import pause
from gateway.base.errors import GatewayError, LedgerUnavailable
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.record import CLIENT_DISCONNECT, TurnRecord, turn_of
from gateway.base.row_ids import is_try
from gateway.journal.drain import Known
from gateway.journal.lost import LostTurns
from gateway.journal.rebuilt import Counted
from gateway.journal.store import Journal
from gateway.journal.table import LOST

_POLL_SECONDS = 0.1
_SWEEP_SECONDS = 30.0
_SWEEP_COUNTS = 500
"""How many turns the journal's thread looks up at once. Other turns wait for it meanwhile."""
_CLOSED_TOGETHER = 256
"""How many turns are closed at once. The journal's deadline holds for all of them together."""
_PATIENCE_SECONDS = 10.0
"""The wait for the counts of a turn that no engine runs."""
_AWAY_SECONDS = 300.0
"""The wait for an engine that does not answer. It may come back with the counts."""
_POLL_SECONDS_PER_COUNT = 0.0002
"""The pause between two questions, for each count of the last answers. While the database is away
nothing is acknowledged, so the answers get long."""


@dataclass(slots=True)
class _Leftover:
    """A turn to be closed."""

    record: TurnRecord
    since: float
    # The engines that must still be asked to cancel it.
    to_cancel: set[str]
    # The engines that answered in this step that the turn does not run there.
    denied: set[str] = field(default_factory=set)
    is_charged: bool = False


@dataclass(slots=True)
class _Retired:
    """A request whose turn moved to another engine."""

    engine: str
    since: float
    # Whether the engine answered that the request does not run.
    is_denied: bool = False


class Witness(Protocol):
    """The parts of an engine that the reconciler uses."""

    name: str

    @property
    def is_ready(self) -> bool: ...
    async def unacknowledged(self) -> list[FinalCounts]: ...
    async def ack(self, request_ids: list[str], /) -> None: ...
    async def cancel(self, request_id: str, /) -> bool: ...


@dataclass(slots=True)
class Reconciler:
    """Closes turns that ended without their last frame, here or in an earlier process."""

    journal: Journal
    engines: Sequence[Witness]
    metrics: Metrics
    charge: Callable[[TurnRecord], None]
    monotonic: Callable[[], float]
    # Tells which turns the ledger has. Without it the journal's word is enough.
    known: Known | None = None
    # Without it turns that are set aside stay so.
    lost: LostTurns | None = None
    _pending: dict[str, _Leftover] = field(default_factory=dict)
    _retired: dict[str, _Retired] = field(default_factory=dict)
    _num_counts: int = 0
    # One step at a time: two at once would settle the same turns twice.
    _stepping: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take_over(self, record: TurnRecord) -> None:
        """Take over a turn that will get no more frames. This never awaits."""
        self._pending[record.journal_id] = _Leftover(record, self.monotonic(), set())

    def retire(self, engine: str, request_id: str) -> None:
        """Take over a request whose turn goes on at another engine. This never awaits."""
        self._retired[request_id] = _Retired(engine, self.monotonic())

    @property
    def _by_name(self) -> dict[str, Witness]:
        return {engine.name: engine for engine in self.engines}

    @property
    def num_pending(self) -> int:
        """How many turns are to be closed."""
        return len(self._pending)

    async def recover(self) -> int:
        """Take over every turn that an earlier run left open; return how many. Each engine is asked
        to cancel these turns, since a lost machine closes no connection."""
        records = await self.journal.open_turns()
        for record in records:
            record.outcome = "gateway_killed"
            self._pending[record.journal_id] = _Leftover(
                record, self.monotonic(), set(self._by_name)
            )
        return len(records)

    async def run(self, stopping: asyncio.Event) -> None:
        # An engine is swept when it first answers, and then at each interval.
        swept_at: dict[str, float] = {}
        while not stopping.is_set():
            now = self.monotonic()
            ready = [engine.name for engine in self.engines if engine.is_ready]
            is_sweep = any(now - swept_at.get(name, -inf) >= _SWEEP_SECONDS for name in ready)
            if is_sweep:
                swept_at = dict.fromkeys(ready, now)
            if is_sweep or self._pending or self._retired:
                try:
                    await self.step(is_sweep=is_sweep)
                except GatewayError as error:
                    get_logger("reconcile").warning("reconcile_failed", error=str(error))
            await pause(stopping, max(_POLL_SECONDS, self._num_counts * _POLL_SECONDS_PER_COUNT))

    async def step(self, *, is_sweep: bool = False) -> None:
        """Ask every ready engine for its counts, and close the turns that can be closed."""
        log = get_logger("reconcile")
        async with self._stepping:
            self._num_counts = 0
            heard: set[str] = set()
            unclaimed: list[Counted] = []
            for engine in [engine for engine in self._by_name.values() if engine.is_ready]:
                try:
                    # A request that does not run when it is cancelled, and has no counts after
                    # that, never ran. So counts are asked for last.
                    await self._cancel(engine)
                    counts = await engine.unacknowledged()
                except GatewayError as error:
                    log.warning("unacknowledged_failed", engine=engine.name, error=str(error))
                    continue
                heard.add(engine.name)
                self._num_counts += len(counts)
                await self._match(engine, counts)
                counts = await self._without_retired(engine, counts)
                unclaimed += [Counted(engine.name, final) for final in counts]
                if is_sweep:
                    await self._sweep_ours(engine, counts)
            if is_sweep and self.lost is not None:
                try:
                    await self.lost.look(unclaimed, is_whole=heard >= set(self._by_name))
                except LedgerUnavailable as error:
                    log.warning("lost_turns_wait", error=str(error))
            await self._close(self._given_up(heard), "lost")
            self._forget_retired()

    async def _cancel(self, engine: Witness) -> None:
        """Cancel at this engine its retired requests, and the turns that were pending for too
        long."""
        now = self.monotonic()
        for leftover in list(self._pending.values()):
            leftover.denied.discard(engine.name)
            is_due = now - leftover.since >= _PATIENCE_SECONDS
            if is_due or engine.name in leftover.to_cancel:
                is_running = await engine.cancel(leftover.record.request_id)
                leftover.to_cancel.discard(engine.name)
                if is_due and not is_running:
                    leftover.denied.add(engine.name)
        for request_id, retired in list(self._retired.items()):
            if retired.engine == engine.name and not retired.is_denied:
                retired.is_denied = not await engine.cancel(request_id)

    async def _without_retired(
        self, engine: Witness, counts: list[FinalCounts]
    ) -> list[FinalCounts]:
        """Acknowledge the counts of retired requests; return the other counts. A retired request
        that does not run and has no counts is forgotten."""
        retired_ids = {
            request_id
            for request_id, retired in self._retired.items()
            if retired.engine == engine.name
        }
        counted = {final.request_id for final in counts if final.request_id in retired_ids}
        if counted:
            await engine.ack(sorted(counted))
            self.metrics.count("reconciled_turns", "retried", amount=len(counted))
        for request_id in retired_ids:
            if request_id in counted or self._retired[request_id].is_denied:
                del self._retired[request_id]
        return [final for final in counts if final.request_id not in counted]

    async def _sweep_ours(self, engine: Witness, counts: list[FinalCounts]) -> None:
        """Sweep the counts whose turns this journal opened, some at a time."""
        prefixes = tuple(f"msg_{instance}" for instance in self.journal.instances)
        ours = [final for final in counts if final.request_id.startswith(prefixes)]
        try:
            for start in range(0, len(ours), _SWEEP_COUNTS):
                await self._sweep(engine, ours[start : start + _SWEEP_COUNTS])
        except LedgerUnavailable as error:
            get_logger("reconcile").warning("sweep_waits", engine=engine.name, error=str(error))

    def _given_up(self, heard: set[str]) -> list[_Leftover]:
        """The turns that no engine knows. Only engines that were `heard` in this step count as not
        knowing a turn, because a busy one may have its counts."""
        now = self.monotonic()
        given_up = []
        for leftover in self._pending.values():
            # If a gateway was killed before routing was recorded, any engine may have the turn.
            name = leftover.record.engine
            possible = {name} if name in self._by_name else set(self._by_name)
            is_unknown = possible <= (heard & leftover.denied)
            patience = _PATIENCE_SECONDS if is_unknown else _AWAY_SECONDS
            if now - leftover.since >= patience:
                given_up.append(leftover)
        return given_up

    def _forget_retired(self) -> None:
        """Forget retired requests whose engine is removed, or away for too long."""
        now = self.monotonic()
        for request_id, retired in list(self._retired.items()):
            if retired.engine not in self._by_name or now - retired.since >= _AWAY_SECONDS:
                del self._retired[request_id]

    async def finish(self, deadline_seconds: float) -> None:
        """At shutdown, close the turns that can be closed soon. The others stay open for the next
        start."""
        deadline = self.monotonic() + deadline_seconds
        while self._pending and self.monotonic() < deadline:
            await self.step()
            await asyncio.sleep(_POLL_SECONDS)

    async def _match(self, engine: Witness, counts: list[FinalCounts]) -> None:
        closing: dict[str, _Leftover] = {}
        for final in counts:
            leftover = self._pending.get(turn_of(final.request_id)[0])
            # Counts of an earlier attempt are not the turn's.
            if leftover is None or leftover.record.request_id != final.request_id:
                continue
            record = leftover.record
            if record.journal_id in closing:
                continue
            record.engine = engine.name
            record.epoch = final.epoch
            if (
                final.usage is not None
                and record.is_first_leg
                and record.outcome != CLIENT_DISCONNECT
            ):
                record.take_prefill(final.usage.computed_tokens)
            elif final.usage is not None:
                record.take_usage(record.over_legs(final.usage))
            else:
                record.take_prefill(final.prefilled_tokens)
            record.stop_reason = final.reason
            record.output_tokens = final.output_tokens
            record.thinking_tokens = final.thinking_tokens
            closing[record.journal_id] = leftover
        await self._close(closing.values(), "engine_counts")

    async def _close(self, leftovers: Iterable[_Leftover], result: str) -> None:
        """Close turns in groups, so that they share writes to the disk. Raise the journal's error
        for a turn when all of its group have ended."""

        async def close_leftover(leftover: _Leftover) -> None:
            if not leftover.is_charged:
                self.charge(leftover.record)
                leftover.is_charged = True
            await self.journal.close(leftover.record)
            self._pending.pop(leftover.record.journal_id, None)
            self.metrics.count("reconciled_turns", result)

        waiting = list(leftovers)
        for start in range(0, len(waiting), _CLOSED_TOGETHER):
            group = waiting[start : start + _CLOSED_TOGETHER]
            closing = map(close_leftover, group)
            for failure in await asyncio.gather(*closing, return_exceptions=True):
                if failure is not None:
                    raise failure

    async def _sweep(self, engine: Witness, mine: list[FinalCounts]) -> None:
        """Acknowledge our turns that are in the ledger, and set the others aside by their names.
        The journal is asked first, because a turn that has left it is in the ledger by then."""
        requests = [final.request_id for final in mine]
        unknown = set(await self.journal.unknown([turn_of(request)[0] for request in requests]))
        if not unknown:
            return
        in_ledger = unknown if self.known is None else await self.known(sorted(unknown))
        # A try of a row that neither of them has was given up, and the row runs again.
        given_up = {turn_id for turn_id in unknown - self._pending.keys() if is_try(turn_id)}
        stored = in_ledger | given_up
        stored_requests = [request for request in requests if turn_of(request)[0] in stored]
        if stored_requests:
            await engine.ack(stored_requests)
        # These turns of this process are not lost, even if a damaged file lost their records.
        retired = {turn_of(request_id)[0] for request_id in self._retired}
        lost = unknown - stored - self._pending.keys() - retired
        if not lost:
            return
        # From now on the journal knows these turns, so the next sweep passes over them.
        await self.journal.set_aside(sorted(lost), LOST)
        self.metrics.count("turns_set_aside", amount=len(lost))
        for turn_id in sorted(lost):
            get_logger("reconcile").error("turn_lost", turn=turn_id, engine=engine.name)
