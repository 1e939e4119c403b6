"""Runs batches of messages behind all interactive turns, the rows of one prefix together.

A gateway owns a batch for some seconds at a time, so another takes it over when this one is gone.
Rows whose result is not kept yet then run again; their first turn is in the ledger all the same.
The first row of a prefix runs alone: it writes what the others read.
"""

import asyncio
import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import msgspec

from gateway.base.background import pause
from gateway.base.catalogue import Catalogue
from gateway.base.errors import (
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    JournalUnavailable,
    LedgerUnavailable,
    Overloaded,
    RateLimited,
)
from gateway.base.logs import get_logger
from gateway.base.settings import Settings
from gateway.dialects.anthropic.batches import (
    BatchResult,
    Canceled,
    Expired,
    Succeeded,
    errored,
)
from gateway.dialects.anthropic.request import VERSIONS
from gateway.dialects.anthropic.response import Message
from gateway.http.batch_rows import RowReader
from gateway.http.messages import whole
from gateway.ledger.batches import Batch, Batches, BatchItem, Result
from gateway.ledger.database import Ledger
from gateway.limits.keyring import KeyRing
from gateway.limits.workers import Workers
from gateway.prompt.ask import TurnId
from gateway.turn.turn import TurnService

_TICK_SECONDS = 0.5
_OWNED_SECONDS = 15.0
_KEPT = timedelta(days=29)
_WINDOW = 256
_MAX_ATTEMPTS = 4
_RETRY_SECONDS = 1.0
_LATER = Overloaded, RateLimited, JournalUnavailable, LedgerUnavailable
_BROKEN = EngineFailed, EngineLost, EngineTimeout
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
        """At most `concurrency` rows are at engines at one time."""
        self.store = store
        self._turns = turns
        self.reader = reader
        self._keyring = keyring
        self.workers = workers
        self._clock = turns.clock
        self._places = asyncio.Semaphore(concurrency)
        # As it was told last: at most a tick old.
        self._statuses: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        log = get_logger("batches")
        try:
            while not stopping.is_set():
                try:
                    if not self._keyring.is_sample:
                        await self._step()
                except GatewayError as error:
                    log.warning("batches_wait", error=str(error))
                await pause(stopping, _TICK_SECONDS)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._running.clear()

    async def _step(self) -> None:
        ended = [name for name, task in self._running.items() if task.done()]
        for name in ended:
            self._statuses.pop(name, None)
            self._running.pop(name).result()
        now = self._clock.wall()
        until = now + timedelta(seconds=_OWNED_SECONDS)
        for batch in await self.store.claim(self._turns.journal.instance, now, until):
            self._statuses[batch.id] = batch.status
            if batch.id not in self._running:
                work = self._work(batch)
                self._running[batch.id] = asyncio.create_task(work, name="batch")
        await self.store.forget(now - _KEPT)

    async def _work(self, batch: Batch) -> None:
        """Run the batch to its end, or until the database is away: then it is claimed again."""
        warm: set[str] = set()
        attempts: dict[int, int] = {}
        while True:
            now = self._clock.wall()
            status, rows = await self.store.pending(batch.id, _WINDOW)
            if not rows or status != "in_progress" or now >= batch.expires_at:
                if status != "ended":
                    left: BatchResult = Canceled() if status == "canceling" else Expired()
                    name = str(left.__struct_config__.tag)
                    await self.store.end(batch.id, name, zlib.compress(_encode(left)), now)
                return
            if not await self._run_rows(batch, rows, warm, attempts):
                await asyncio.sleep(_RETRY_SECONDS)

    async def _run_rows(
        self, batch: Batch, rows: Sequence[BatchItem], warm: set[str], attempts: dict[int, int]
    ) -> bool:
        """Run a window of rows. Return whether any of them ended."""
        finished: list[Result] = []
        lock = asyncio.Lock()
        num_ended = 0

        async def one(row: BatchItem) -> None:
            nonlocal num_ended
            async with self._places:
                if self._is_over(batch):
                    return
                result = await self._result(batch, row, attempts)
            if result is None:
                return
            num_ended += 1
            finished.append(result)
            async with lock:
                # What others finished while this waited goes with it.
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
        try:
            made: BatchResult = Succeeded(await self._message(batch, row, turn_id))
        except _LATER:
            await asyncio.sleep(_RETRY_SECONDS)
            return None
        except GatewayError as error:
            attempts[row.position] = attempts.get(row.position, 0) + 1
            if isinstance(error, _BROKEN) and attempts[row.position] < _MAX_ATTEMPTS:
                return None
            made = errored(error, f"req_{turn_id.removeprefix('msg_')}")
        return Result(
            position=row.position,
            status=str(made.__struct_config__.tag),
            result=zlib.compress(_encode(made)),
        )

    async def _message(self, batch: Batch, row: BatchItem, turn_id: TurnId) -> Message:
        """Run the row's turn, for the workspace as it is now."""
        body = zlib.decompress(row.params)
        principal = self._keyring.principal(batch.workspace_id, batch.key_id)
        version = next(known for known in VERSIONS if known == batch.version)
        ask = await self.workers.run(
            batch.workspace_id, len(body), self.reader.ask, body, principal, version
        )
        return await whole(self._turns.run(ask, turn_id), ask, turn_id)


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
        bounds=settings.request_bounds,
        find_model=lambda requested: catalogue.find(requested, fleet.served),
        removes_nonces=settings.remove_nonces,
        unreadable=settings.unreadable,
        most_rows=settings.batch_rows,
        clock=turns.clock,
    )
    store = Batches(ledger, settings.batch_bytes)
    return BatchRunner(store, turns, reader, keyring, workers, settings.batch_concurrency)
