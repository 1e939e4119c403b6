"""Runs batches of messages behind all interactive turns, the rows of one prefix together.

A gateway owns a batch for some seconds at a time, so another takes it over when this one is gone;
rows whose result is not kept yet then run again. The first row of a prefix runs alone: it writes
what the others read. A gateway works on WORKING batches of a workspace at one time, and brings as
many rows to the queue (`admission/permit.py`) as it may have at engines in all. A row that is
refused for now keeps no place while it waits to be tried again.
"""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from weakref import WeakValueDictionary

import msgspec

from gateway.admission.workers import INLINE_BYTES
from gateway.base.background import pause
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
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.anthropic.request import VERSIONS, Version, decode_batch, decode_messages
from gateway.dialects.anthropic.response import (
    BatchResult,
    Canceled,
    Errored,
    Expired,
    Message,
    Succeeded,
)
from gateway.dialects.errors import anthropic_error
from gateway.http.model_calls import whole_message
from gateway.http.services import Services
from gateway.ledger.stored import Batch, BatchItem, Result
from gateway.prompt.ask import Ask, Origin, Principal

ROW_BYTES, BATCH_BYTES = 512, 16_384
"""What a row and a batch count besides the rows' bodies, for their places in the database.

So a workspace can't fill the database with millions of rows of a few bytes each.
"""
_COMPRESSION = 1
_MAX_NAMES = 64
_PIECE_SECONDS = 0.02
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


def row_ask(services: Services, body: bytes, principal: Principal, version: Version) -> Ask:
    """The Ask of a row's body, as the Messages API makes it of a request's. Raise the error that a
    request with this body would be answered with."""
    decoded = decode_messages(body, services.bounds)
    model = services.find_model(decoded.model)
    asked = services.asked(principal, model, services.clock.monotonic())
    ask = ask_of(decoded, asked, version, marks_for_client=services.auto_cache_messages)
    return msgspec.structs.replace(ask, stream=False, is_batch=True)


def ranked(
    services: Services, body: bytes, principal: Principal, version: Version
) -> tuple[list[BatchItem], int]:
    """The rows of a batch's body, and the bytes that it counts. Rows that begin alike have
    neighbouring ranks. A row that can't be read is no error of the batch: it is answered with its
    own. A thread does this for seconds, and rests as long as it works, so that turns have the
    processor meanwhile."""
    given = decode_batch(body, services.bounds, services.bounds.batch_rows)
    # The sort key of each row (model and names of prefixes), and the name of its shared prefix.
    found: list[tuple[list[str], str]] = []
    begun = time.monotonic()
    for item in given:
        names, shared = list[str](), ""
        with suppress(GatewayError):
            ask = row_ask(services, bytes(item.params), principal, version)
            marked = ask.plan.deepest_marked()
            names = [prefix.name.digest for prefix in ask.plan.prefixes[:_MAX_NAMES]]
            shared = marked[0] if marked is not None else (names[0] if names else "")
            names.insert(0, ask.model.id)
        found.append((names, shared))
        if (worked := time.monotonic() - begun) > _PIECE_SECONDS:
            time.sleep(worked)
            begun = time.monotonic()
    order = sorted(range(len(given)), key=lambda position: (found[position][0], position))
    ranks = {position: rank for rank, position in enumerate(order)}
    items = [
        BatchItem(
            position=position,
            custom_id=item.custom_id,
            rank=ranks[position],
            prefix=found[position][1],
            params=zlib.compress(bytes(item.params), _COMPRESSION),
        )
        for position, item in enumerate(given)
    ]
    return items, BATCH_BYTES + sum(ROW_BYTES + len(item.params) for item in given)


@dataclass(slots=True)
class _Running:
    """A batch that runs here. `status` is as it was told last: at most a tick old. `places` are its
    workspace's. `warm` are the prefixes whose first row has run; `attempts` are by row."""

    batch: Batch
    status: str
    places: asyncio.Semaphore
    warm: set[str] = field(default_factory=set)
    attempts: Counter[int] = field(default_factory=Counter)
    task: asyncio.Task[None] = field(init=False)


class BatchRunner:
    """At most `concurrency` rows of a workspace wait for room or are at engines."""

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
                # Until the next tick, or until a batch ends and leaves its place to another.
                for _ in range(_TICKS):
                    await pause(stopping, _TICK_SECONDS / _TICKS)
                    if any(one.task.done() for one in self._running.values()):
                        break
        finally:
            tasks = [one.task for one in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.clear()

    async def _step(self) -> None:
        for name in [name for name, one in self._running.items() if one.task.done()]:
            self._running.pop(name).task.result()
        now = self._clock.wall()
        until = now + timedelta(seconds=_OWNED_SECONDS)
        owner = self._turns.journal.instance
        owned = await self._store.claim(owner, now, until, working=self._running, most=WORKING)
        for batch in owned:
            if (running := self._running.get(batch.id)) is not None:
                running.status = batch.status
                continue
            new = asyncio.Semaphore(self._concurrency)
            places = self._places.setdefault(batch.workspace_id, new)
            running = self._running[batch.id] = _Running(batch, batch.status, places)
            running.task = asyncio.create_task(self._work(running), name="batch")
        if now >= self._forget_at:
            self._forget_at = now + timedelta(seconds=_FORGET_SECONDS)
            await self._store.forget(now - _KEPT)

    async def _work(self, running: _Running) -> None:
        """Run the batch to its end, or until the database is away: then it is claimed again."""
        batch, pause_seconds = running.batch, _RETRY_SECONDS
        while True:
            now = self._clock.wall()
            status, rows = await self._store.pending(batch.id, _WINDOW)
            if not rows or status != "in_progress" or now >= batch.expires_at:
                if status != "ended":
                    left: BatchResult = Canceled() if status == "canceling" else Expired()
                    name = str(left.__struct_config__.tag)
                    await self._store.end(batch.id, name, _compressed(left), now)
                return
            if await self._run_rows(running, rows):
                pause_seconds = _RETRY_SECONDS
                continue
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RETRY_SECONDS)

    async def _run_rows(self, running: _Running, rows: Sequence[BatchItem]) -> bool:
        """Run a window of rows. Return whether any of them ended."""
        batch, finished, lock = running.batch, list[Result](), asyncio.Lock()
        num_ended = 0

        async def one(row: BatchItem) -> None:
            nonlocal num_ended
            async with running.places:
                if running.status != "in_progress" or self._clock.wall() >= batch.expires_at:
                    return
                result = await self._result(running, row)
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
                        await self._store.finish(batch.id, taken)

        async def group(prefix: str, members: list[BatchItem]) -> None:
            if prefix not in running.warm:
                await one(members.pop(0))
                running.warm.add(prefix)
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

    async def _result(self, running: _Running, row: BatchItem) -> Result | None:
        """The row's result; None for one that is to run again."""
        batch, turn_id = running.batch, self._turns.new_id()
        request_id = f"req_{turn_id.removeprefix('msg_')}"
        bind_request_id(request_id)

        async def message() -> Message:
            """Run the row's turn, for the workspace as it is now."""
            principal = self._services.keyring.principal(batch.workspace_id, batch.key_id)
            version = next(known for known in VERSIONS if known == batch.version)
            ask = await self._services.workers.run(
                batch.workspace_id,
                INLINE_BYTES + len(row.params),  # never inline
                lambda: row_ask(self._services, zlib.decompress(row.params), principal, version),
                line="rows of batches",
            )
            return await whole_message(self._turns, ask, turn_id, Origin(request_id))

        outcome: Message | BaseException
        (outcome,) = await asyncio.gather(message(), return_exceptions=True)
        if isinstance(outcome, Message):
            made: BatchResult = Succeeded(outcome)
        else:
            error = outcome
            if not isinstance(error, Exception):
                raise error
            if not isinstance(error, GatewayError):
                # A failure that nobody foresaw ends this row, and not the batches of all.
                get_logger("batches").error("unhandled", exc_info=error)
                error = GatewayError()
            if isinstance(error, _LATER) and not isinstance(error, _BROKEN):
                return None
            running.attempts[row.position] += 1
            if isinstance(error, _BROKEN) and running.attempts[row.position] < _MAX_ATTEMPTS:
                return None
            made = Errored(anthropic_error(error, request_id))
        status = str(made.__struct_config__.tag)
        kept = await asyncio.to_thread(_compressed, made)
        return Result(position=row.position, status=status, result=kept)


def _compressed(result: BatchResult) -> bytes:
    return zlib.compress(_encode(result))
