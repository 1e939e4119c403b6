"""Runs batches of messages behind all interactive turns, the rows of one prefix together.

A gateway owns a batch for some seconds at a time, so another takes it over when this one is gone.
Rows whose result is not kept yet then run again; their first turn is in the ledger all the same.
The first row of a prefix runs alone: it writes what the others read.

A gateway works on WORKING batches of a workspace at one time; the others stay free for other
gateways. Of each workspace it brings as many rows to the queue (`admission/queue.py`) as it may
have at engines in all. They are let in when engines have idle room, and workspaces take turns
there. A row that is refused for now keeps no place while it waits to be tried again.
"""

import asyncio
import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import msgspec

from gateway.admission.keyring import KeyRing
from gateway.admission.workers import INLINE_BYTES, Workers
from gateway.base.background import pause
from gateway.base.catalogue import Catalogue
from gateway.base.errors import (
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    JournalUnavailable,
    LedgerUnavailable,
    NotServed,
    Overloaded,
    RateLimited,
)
from gateway.base.logs import bind_request_id, get_logger
from gateway.base.settings import Settings
from gateway.dialects.anthropic.request import VERSIONS
from gateway.dialects.anthropic.response import (
    BatchResult,
    Canceled,
    Errored,
    Expired,
    Message,
    Succeeded,
)
from gateway.dialects.errors import anthropic_error
from gateway.http.batch_rows import RowReader
from gateway.http.model_calls import whole_message
from gateway.ledger.database import Ledger
from gateway.ledger.stored import Batch, Batches, BatchItem, Result
from gateway.prompt.ask import TurnId
from gateway.prompt.origin import Origin
from gateway.turn.turn import TurnService

_TICK_SECONDS = 0.5
_TICKS = 10
_OWNED_SECONDS = 15.0
_KEPT = timedelta(days=29)
_FORGET_SECONDS = 60.0
_WINDOW = 64
WORKING = 2
_MAX_ATTEMPTS = 4
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 8.0
"""The pause of a batch of which no row could run; it is twice as long each time.

All rows are read from the database again behind it.
"""
_GATHER_SECONDS = 0.1
_LATER = Overloaded, RateLimited, JournalUnavailable, LedgerUnavailable
_BROKEN = EngineFailed, NotServed, EngineLost, EngineTimeout
_encode = msgspec.json.Encoder().encode


class BatchRunner:
    def __init__(
        self,
        store: Batches,
        turns: TurnService,
        reader: RowReader,
        keyring: KeyRing,
        workers: Workers,
        concurrency: int,
    ) -> None:
        """At most `concurrency` rows of a workspace wait at the gate or are at engines."""
        self.store = store
        self._turns = turns
        self.reader = reader
        self._keyring = keyring
        self.workers = workers
        self._clock = turns.clock
        self._concurrency = concurrency
        self._places: dict[str, asyncio.Semaphore] = {}
        self._forget_at = self._clock.wall()
        # As it was told last: at most a tick old.
        self._statuses: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._workspaces: dict[str, str] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        log = get_logger("batches")
        try:
            while not stopping.is_set():
                try:
                    if not self._keyring.is_sample:
                        await self._step()
                except GatewayError as error:
                    log.warning("batches_wait", error=str(error))
                await self._rest(stopping)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._running.clear()

    async def _rest(self, stopping: asyncio.Event) -> None:
        """Until the next tick, or until a batch ends and leaves its place to another."""
        if not self._running:
            await pause(stopping, _TICK_SECONDS)
            return
        for _ in range(_TICKS):
            await pause(stopping, _TICK_SECONDS / _TICKS)
            if stopping.is_set() or any(task.done() for task in self._running.values()):
                return

    async def _step(self) -> None:
        ended = [name for name, task in self._running.items() if task.done()]
        for name in ended:
            self._statuses.pop(name, None)
            workspace = self._workspaces.pop(name)
            if workspace not in self._workspaces.values():
                del self._places[workspace]
            self._running.pop(name).result()
        now = self._clock.wall()
        until = now + timedelta(seconds=_OWNED_SECONDS)
        owner = self._turns.journal.instance
        owned = await self.store.claim(owner, now, until, working=self._running, most=WORKING)
        for batch in owned:
            self._statuses[batch.id] = batch.status
            if batch.id not in self._running:
                workspace = self._workspaces[batch.id] = batch.workspace_id
                self._places.setdefault(workspace, asyncio.Semaphore(self._concurrency))
                self._running[batch.id] = asyncio.create_task(self._work(batch), name="batch")
        if now >= self._forget_at:
            self._forget_at = now + timedelta(seconds=_FORGET_SECONDS)
            await self.store.forget(now - _KEPT)

    async def _work(self, batch: Batch) -> None:
        """Run the batch to its end, or until the database is away: then it is claimed again."""
        warm: set[str] = set()
        attempts: dict[int, int] = {}
        pause_seconds = _RETRY_SECONDS
        while True:
            now = self._clock.wall()
            status, rows = await self.store.pending(batch.id, _WINDOW)
            if not rows or status != "in_progress" or now >= batch.expires_at:
                if status != "ended":
                    left: BatchResult = Canceled() if status == "canceling" else Expired()
                    name = str(left.__struct_config__.tag)
                    await self.store.end(batch.id, name, _compressed(left), now)
                return
            if await self._run_rows(batch, rows, warm, attempts):
                pause_seconds = _RETRY_SECONDS
                continue
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RETRY_SECONDS)

    async def _run_rows(
        self, batch: Batch, rows: Sequence[BatchItem], warm: set[str], attempts: dict[int, int]
    ) -> bool:
        """Run a window of rows. Return whether any of them ended."""
        finished: list[Result] = []
        lock = asyncio.Lock()
        places = self._places[batch.workspace_id]
        num_ended = 0

        async def one(row: BatchItem) -> None:
            nonlocal num_ended
            async with places:
                if self._is_over(batch):
                    return
                result = await self._result(batch, row, attempts)
            if result is None:
                await asyncio.sleep(_RETRY_SECONDS)
                return
            num_ended += 1
            finished.append(result)
            async with lock:
                # What others finish meanwhile goes with it: few transactions, since turns open and
                # close beside them on the same disk. It is kept also where this is cancelled.
                try:
                    if finished:
                        await asyncio.sleep(_GATHER_SECONDS)
                finally:
                    taken = finished.copy()
                    finished.clear()
                    if taken:
                        await self.store.finish(batch.id, taken)

        async def group(prefix: str, members: list[BatchItem]) -> None:
            if prefix not in warm:
                await one(members.pop(0))
                warm.add(prefix)
            async with asyncio.TaskGroup() as others:
                for row in members:
                    others.create_task(one(row))

        try:
            async with asyncio.TaskGroup() as groups:
                for prefix, members in groupby(rows, key=lambda row: row.prefix):
                    groups.create_task(group(prefix, list(members)))
        except* GatewayError as errors:
            raise LedgerUnavailable from errors
        return num_ended > 0

    def _is_over(self, batch: Batch) -> bool:
        """Whether rows that have not begun are not to run any more."""
        status = self._statuses.get(batch.id, "in_progress")
        return status != "in_progress" or self._clock.wall() >= batch.expires_at

    async def _result(
        self, batch: Batch, row: BatchItem, attempts: dict[int, int]
    ) -> Result | None:
        """The row's result; None for one that is to run again."""
        turn_id = self._turns.new_id()
        request_id = f"req_{turn_id.removeprefix('msg_')}"
        bind_request_id(request_id)
        answering = self._message(batch, row, turn_id, Origin(request_id))
        answer: Message | BaseException
        (answer,) = await asyncio.gather(answering, return_exceptions=True)
        if isinstance(answer, Message):
            made: BatchResult = Succeeded(answer)
        else:
            error = answer
            if not isinstance(error, Exception):
                raise error
            if not isinstance(error, GatewayError):
                # A failure that nobody foresaw ends this row, and not the batches of all.
                get_logger("batches").error("unhandled", exc_info=error)
                error = GatewayError()
            if isinstance(error, _LATER) and not isinstance(error, _BROKEN):
                return None
            attempts[row.position] = attempts.get(row.position, 0) + 1
            if isinstance(error, _BROKEN) and attempts[row.position] < _MAX_ATTEMPTS:
                return None
            made = Errored(anthropic_error(error, request_id))
        status = str(made.__struct_config__.tag)
        kept = await asyncio.to_thread(_compressed, made)
        return Result(position=row.position, status=status, result=kept)

    async def _message(
        self, batch: Batch, row: BatchItem, turn_id: TurnId, origin: Origin
    ) -> Message:
        """Run the row's turn, for the workspace as it is now."""
        principal = self._keyring.principal(batch.workspace_id, batch.key_id)
        version = next(known for known in VERSIONS if known == batch.version)
        ask = await self.workers.run(
            batch.workspace_id,
            INLINE_BYTES + len(row.params),  # never inline
            self.reader.kept,
            row.params,
            principal,
            version,
            line="rows of batches",
        )
        return await whole_message(self._turns.run(ask, turn_id, origin), ask, turn_id)


def _compressed(result: BatchResult) -> bytes:
    return zlib.compress(_encode(result))


def make_runner(
    settings: Settings,
    ledger: Ledger,
    turns: TurnService,
    keyring: KeyRing,
    workers: Workers,
    catalogue: Catalogue,
) -> BatchRunner:
    fleet = turns.dispatcher.fleet
    reader = RowReader(
        bounds=settings.tuning,
        find_model=lambda requested: catalogue.find(requested, fleet.served),
        removes_nonces=settings.remove_nonces,
        unreadable=settings.unreadable,
        auto_cache_messages=settings.auto_cache_messages,
        most_rows=settings.tuning.batch_rows,
        clock=turns.clock,
    )
    tuning = settings.tuning
    store = Batches(ledger, most_running=tuning.batches, most_bytes=tuning.batch_bytes)
    return BatchRunner(store, turns, reader, keyring, workers, settings.batch_concurrency)
