"""Runs batches of messages behind all interactive turns, the rows of one prefix together.

A gateway owns a batch for some seconds at a time. If that gateway is gone, another one takes the
batch over and runs the rows that have not ended.

A row's turn has one id in all tries. Its result is written to the journal with the turn's close.
The drain ends the row in the transaction that inserts the turn. So a row that has ended is not run
again, whatever the database does. It is charged once, however many gateways ran it.

The first row of a prefix runs alone, because it writes what the others read. A gateway works on
WORKING batches of a workspace at one time. It brings as many rows to the queue
(`admission/batch_rows.py`) as it may have at engines in all. A row that was refused for now holds
no place while it waits for its next try.
"""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from weakref import WeakValueDictionary

import msgspec

from engine.protocol import Frame
from gateway.admission.workers import INLINE_BYTES
from gateway.base.background import pause
from gateway.base.errors import (
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    InvalidRequest,
    JournalUnavailable,
    LedgerUnavailable,
    NotServed,
    Overloaded,
    RateLimited,
)
from gateway.base.logs import bind_request_id, get_logger
from gateway.base.record import RowTry
from gateway.base.row_ids import new_try_id, row_turn_id
from gateway.dialects.anthropic.batch import decode_batch
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.anthropic.request import VERSIONS, Version
from gateway.dialects.anthropic.response import BatchResult, Canceled, Errored, Expired, Succeeded
from gateway.dialects.collector import Findings
from gateway.dialects.errors import anthropic_error
from gateway.http.model_calls import whole_message
from gateway.http.services import Services
from gateway.ledger.batches import Batch, BatchItem, Result
from gateway.prompt.ask import Ask, Origin, Principal, TurnId
from gateway.turn.state import RowEnd, RowTurn

ROW_BYTES = 512
BATCH_BYTES = 16_384
"""The bytes that count for each row and for each batch, besides the rows' bodies.

So a workspace can't fill the database with millions of rows of a few bytes each.
"""
_COMPRESSION = 1
_MAX_NAMES = 64
_PIECE_SECONDS = 0.02
_TICK_SECONDS = 0.5
_TICKS = 10
_OWNED_SECONDS = 15.0
_STORED = timedelta(days=29)
_FORGET_SECONDS = 60.0
_WINDOW = 64
WORKING = 2
_MAX_ATTEMPTS = 4
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 8.0
"""The longest pause of a batch of which no row could run. Each pause is twice the one before. After
it the rows are read from the database again."""
_DRAIN_SECONDS = 0.25
"""The pause between two looks whether ended rows have reached the database."""
_LATER = Overloaded, RateLimited, JournalUnavailable, LedgerUnavailable
_BROKEN = EngineFailed, NotServed, EngineLost, EngineTimeout
_encode = msgspec.json.Encoder().encode


def row_ask(services: Services, body: bytes, principal: Principal, version: Version) -> Ask:
    """The Ask of a row's body, as the Messages API makes it from a request's body. Raise the errors
    of such a request."""
    decoded = decode_messages(body, services.bounds)
    if decoded.max_tokens == 0:
        raise InvalidRequest("max_tokens: Input should be greater than or equal to 1 in a batch")
    model = services.find_model(decoded.model)
    context = services.context_of(principal, model, services.clock.monotonic())
    ask = ask_of(decoded, context, version, marks_for_client=services.auto_cache_messages)
    return msgspec.structs.replace(ask, stream=False, is_batch=True)


def ranked(
    services: Services, body: bytes, principal: Principal, version: Version
) -> tuple[list[BatchItem], int]:
    """The rows of a batch's body, and the bytes that count for the batch.

    Rows that begin alike have neighbouring ranks. A row that can't be read is answered with its
    error and does not fail the batch. This takes a thread some seconds. The thread rests for as
    long as it works, so that turns get the processor.
    """
    rows = decode_batch(body, services.bounds, services.bounds.batch_rows)
    # The sort key of each row (model and names of prefixes), and the name of its shared prefix.
    keys: list[tuple[list[str], str]] = []
    began = time.monotonic()
    for item in rows:
        names = list[str]()
        shared = ""
        with suppress(GatewayError):
            ask = row_ask(services, bytes(item.params), principal, version)
            breakpoint = ask.plan.deepest_breakpoint()
            names = [prefix.name.digest for prefix in ask.plan.prefixes[:_MAX_NAMES]]
            if breakpoint is not None:
                shared = breakpoint[0]
            elif names:
                shared = names[0]
            names.insert(0, ask.model.id)
        keys.append((names, shared))
        seconds = time.monotonic() - began
        if seconds > _PIECE_SECONDS:
            time.sleep(seconds)
            began = time.monotonic()
    order = sorted(range(len(rows)), key=lambda position: (keys[position][0], position))
    ranks = {position: rank for rank, position in enumerate(order)}
    items = [
        BatchItem(
            position=position,
            custom_id=item.custom_id,
            rank=ranks[position],
            prefix=keys[position][1],
            params=zlib.compress(bytes(item.params), _COMPRESSION),
        )
        for position, item in enumerate(rows)
    ]
    return items, BATCH_BYTES + sum(ROW_BYTES + len(item.params) for item in rows)


@dataclass(slots=True)
class _Running:
    """A batch that runs here."""

    batch: Batch
    # Its status as it was last read, a tick ago at most.
    status: str
    # Until when this gateway owns it.
    owned_until: datetime
    # The places of its workspace's rows.
    places: asyncio.Semaphore
    # The prefixes whose first row has run.
    warm: set[str] = field(default_factory=set)
    # How often each row failed at engines, by its position.
    attempts: Counter[int] = field(default_factory=Counter)
    # The positions of rows that ended here. The database may not know it yet.
    ended: set[int] = field(default_factory=set)
    task: asyncio.Task[None] = field(init=False)


class BatchRunner:
    """Runs batches. At most `concurrency` rows of a workspace wait for room or are at engines."""

    def __init__(self, services: Services, concurrency: int) -> None:
        self._services = services
        self._store = services.batches
        self._turns = services.turns
        self._clock = services.clock
        self._concurrency = concurrency
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._forget_at = self._clock.wall()
        self._running: dict[str, _Running] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        log = get_logger("batches")
        try:
            while not stopping.is_set():
                try:
                    if not self._services.keyring.is_sample:
                        await self._step()
                except GatewayError as error:
                    log.warning("batches_wait", error=str(error))
                # Wait for the next tick, or until a batch ends and leaves its place to another.
                for _ in range(_TICKS):
                    await pause(stopping, _TICK_SECONDS / _TICKS)
                    if any(batch.task.done() for batch in self._running.values()):
                        break
        finally:
            tasks = [batch.task for batch in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.clear()

    async def _step(self) -> None:
        for name in [name for name, batch in self._running.items() if batch.task.done()]:
            self._running.pop(name).task.result()
        now = self._clock.wall()
        until = now + timedelta(seconds=_OWNED_SECONDS)
        owner = self._turns.journal.instance
        owned = await self._store.claim(owner, now, until, working=self._running, max_owned=WORKING)
        for lost_id in self._running.keys() - {batch.id for batch in owned}:
            self._running[lost_id].owned_until = now
        for batch in owned:
            running = self._running.get(batch.id)
            if running is not None:
                running.status = batch.status
                running.owned_until = until
                continue
            semaphore = asyncio.Semaphore(self._concurrency)
            places = self._places.setdefault(batch.workspace_id, semaphore)
            running = _Running(batch, batch.status, until, places)
            self._running[batch.id] = running
            running.task = asyncio.create_task(self._work(running), name="batch")
        if now >= self._forget_at:
            self._forget_at = now + timedelta(seconds=_FORGET_SECONDS)
            await self._store.forget(now - _STORED)

    def _is_ours(self, running: _Running) -> bool:
        """Whether this gateway still owns the batch. If not, another gateway may run it."""
        return self._clock.wall() < running.owned_until

    async def _work(self, running: _Running) -> None:
        """Run the batch to its end. Return earlier if this gateway no longer owns it, because the
        database is away or another gateway has it. It must then be claimed again."""
        pause_seconds = _RETRY_SECONDS
        while self._is_ours(running):
            rows = await self._pending(running)
            if rows is None:
                return
            if rows and self._turns.dispatcher.fleet.ready and await self._run_rows(running, rows):
                pause_seconds = _RETRY_SECONDS
                continue
            if not rows:
                await asyncio.sleep(_DRAIN_SECONDS)
                continue
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RETRY_SECONDS)

    async def _pending(self, running: _Running) -> list[BatchItem] | None:
        """The next rows to run. The list is empty while all remaining rows wait for the drain.

        None once the batch has ended. Its remaining rows are then canceled or expired.
        """
        batch = running.batch
        # The journal is read first, because a row that leaves it has ended in the database.
        waiting = await self._turns.journal.ended_rows()
        now = self._clock.wall()
        status, rows = await self._store.pending(batch.id, _WINDOW + len(running.ended))
        ended = {row.position for row in rows if row_turn_id(batch.id, row.position) in waiting}
        if status == "in_progress" and now < batch.expires_at and rows:
            running.ended &= {row.position for row in rows}
            return [row for row in rows if row.position not in ended | running.ended]
        if ended and status != "ended":
            return []
        if status != "ended":
            result: BatchResult = Canceled() if status == "canceling" else Expired()
            name = str(result.__struct_config__.tag)
            await self._store.end(batch.id, name, _compressed(result), now)
        return None

    async def _run_rows(self, running: _Running, rows: Sequence[BatchItem]) -> bool:
        """Run a window of rows. Return whether any of them ended."""
        batch = running.batch
        num_before = len(running.ended)

        async def run_in_place(row: BatchItem) -> None:
            async with running.places:
                is_over = self._clock.wall() >= batch.expires_at
                if running.status != "in_progress" or is_over or not self._is_ours(running):
                    return
                has_ended = await self._run_row(running, row)
            if has_ended:
                running.ended.add(row.position)
            else:
                await asyncio.sleep(_RETRY_SECONDS)

        async def run_group(prefix: str, members: list[BatchItem]) -> None:
            if prefix not in running.warm:
                await run_in_place(members.pop(0))
                running.warm.add(prefix)
            async with asyncio.TaskGroup() as tasks:
                for row in members:
                    tasks.create_task(run_in_place(row))

        async with asyncio.TaskGroup() as groups:
            for prefix, members in groupby(rows, key=lambda row: row.prefix):
                groups.create_task(run_group(prefix, list(members)))
        return len(running.ended) > num_before

    async def _run_row(self, running: _Running, row: BatchItem) -> bool:
        """Try a row; return whether it has ended. The result of an ended row is in the database, in
        the journal, or on its way there."""
        batch = running.batch
        turn_id = TurnId(row_turn_id(batch.id, row.position))
        request_id = f"req_{turn_id.removeprefix('msg_')}"
        bind_request_id(request_id)
        try_id = new_try_id(self._turns.journal.instance, turn_id)
        attempt = RowTry(id=try_id, batch=batch.id, position=row.position)

        def failed(error: GatewayError) -> RowEnd | None:
            result = self._failed(running, row, error, request_id)
            return None if result is None else self._sealed(batch, result)

        async def work() -> None:
            """Run the row's turn, for the workspace as it is now."""
            principal = self._services.keyring.principal(batch.workspace_id, batch.key_id)
            version = next(version for version in VERSIONS if version == batch.version)
            ask = await self._services.workers.run(
                batch.workspace_id,
                INLINE_BYTES + len(row.params),  # never inline
                lambda: row_ask(self._services, zlib.decompress(row.params), principal, version),
                line="rows of batches",
            )

            def sealed(findings: Findings, frames: Sequence[Frame]) -> RowEnd:
                message = Succeeded(whole_message(ask, turn_id, findings, frames))
                return self._sealed(batch, _result(row, message))

            async def whole(findings: Findings, frames: Sequence[Frame]) -> RowEnd:
                return await asyncio.to_thread(sealed, findings, frames)

            row_turn = RowTurn(attempt=attempt, whole=whole, failed=failed)
            async for _ in self._turns.run(ask, turn_id, Origin(request_id), row_turn):
                pass

        (outcome,) = await asyncio.gather(work(), return_exceptions=True)
        if outcome is None or attempt.result is not None:
            return True
        if not isinstance(outcome, Exception):
            raise outcome
        if not isinstance(outcome, GatewayError):
            # An unexpected failure ends only this row.
            get_logger("batches").error("unhandled", exc_info=outcome)
            outcome = GatewayError()
        result = self._failed(running, row, outcome, request_id)
        if result is None:
            running.attempts[row.position] += isinstance(outcome, _BROKEN)
            return False
        # The row was refused before it had a turn, so the drain does not end it.
        try:
            await self._store.finish(batch.id, [result])
        except GatewayError as error:
            get_logger("batches").warning("row_waits", error=str(error))
            return False
        return True

    def _failed(
        self, running: _Running, row: BatchItem, error: GatewayError, request_id: str
    ) -> Result | None:
        """The result of a row that failed; None for one that is to run again."""
        is_broken = isinstance(error, _BROKEN)
        if isinstance(error, _LATER) and not is_broken:
            return None
        if is_broken and running.attempts[row.position] + 1 < _MAX_ATTEMPTS:
            return None
        return _result(row, Errored(anthropic_error(error, request_id)))

    def _sealed(self, batch: Batch, result: Result) -> RowEnd:
        return result.status, self._store.sealed_result(batch.id, result)


def _result(row: BatchItem, result: BatchResult) -> Result:
    status = str(result.__struct_config__.tag)
    return Result(position=row.position, status=status, result=_compressed(result))


def _compressed(result: BatchResult) -> bytes:
    return zlib.compress(_encode(result))
