"""A few workers prepare requests. Scopes share them fairly.

Scopes take turns. One scope has at most all workers but one, so that a long request does not delay
other scopes. The number of its waiting requests is bounded. A cancelled request leaves at once,
waiting or not. A request that waits too long is refused as `overloaded`, since another engine may
have room. One that takes too long is refused as `too_costly`, since every engine would take as
long.
"""

import asyncio
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.backends.prepare.prepared import Answer, Kind, Prepared, Refused
from engine.backends.prepare.session_days import SessionDays
from engine.errors import Overloaded, rebuilt
from engine.text.rendered import KnownDays

MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bytes of waiting bodies, of all scopes together. One scope may have half of it."""
_HEAD_BYTES = 4096
_SCOPE = re.compile(rb'"scope":\s*"([^"\\]{1,64})"')


class Worker(Protocol):
    """Prepares one body at a time; after a cancelled `run` comes `recover`, then the next `run`.

    `run` raises nothing but EngineErrors.
    """

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer: ...
    async def recover(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    scope: bytes
    num_bytes: int
    granted: "asyncio.Future[Worker]"


@dataclass(slots=True)
class _Load:
    """What waits and runs. `lines` are in the order of their turns, none is empty."""

    lines: "OrderedDict[bytes, deque[_Job]]" = field(default_factory=OrderedDict)
    running: Counter[bytes] = field(default_factory=Counter)
    waiting_bytes: Counter[bytes] = field(default_factory=Counter)


class PreparePool:
    """`new_worker` is called for up to `max_workers`, each time that all others are busy.

    A request waits for a worker for `wait_seconds` at most; a scope has `max_waiting` waiting.
    `days` are there if the template writes the date and a session's prefix keeps its own.
    """

    def __init__(
        self,
        new_worker: Callable[[], Worker],
        *,
        max_workers: int,
        max_waiting: int,
        wait_seconds: float,
        days: SessionDays | None = None,
    ) -> None:
        self._new_worker = new_worker
        self._max_workers = max_workers
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._days = days
        self._load = _Load()
        self._idle: list[tuple[Worker, bytes]] = []
        self._workers: list[Worker] = []
        self._recovering: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._load.lines.values()))

    async def run(self, kind: Kind, body: bytes) -> Answer:
        """The answer of a worker. Raises Overloaded, TooCostly and what the worker refuses."""
        job = _Job(scope_of(body), len(body), asyncio.get_running_loop().create_future())
        worker = await self._wait(job)
        is_left = False
        days = None if self._days is None else self._days.known(job.scope)
        try:
            answer = await worker.run(kind, body, days)
        except asyncio.CancelledError:
            is_left = True
            task = asyncio.create_task(self._recover(worker, job.scope))
            self._recovering.add(task)
            task.add_done_callback(self._recovering.discard)
            raise
        finally:
            if not is_left:
                self._give_back(worker, job.scope)
        if isinstance(answer, Refused):
            raise rebuilt(answer.code, answer.message, is_public=answer.is_public)
        if self._days is not None and isinstance(answer, Prepared) and answer.dated is not None:
            self._days.note(job.scope, answer.dated, answer.own_seconds)
        return answer

    async def close(self) -> None:
        """End all workers; what runs or waits fails."""
        self._max_workers = 0
        for worker in self._workers:
            await worker.close()

    async def _wait(self, job: _Job) -> Worker:
        """A worker for this job; whoever is cancelled or refused here has none."""
        load, scope = self._load, job.scope
        line = load.lines.setdefault(scope, deque())
        if len(line) >= self._max_waiting or self._is_full(job):
            if not line:
                del load.lines[scope]
            raise Overloaded("too many requests of one scope wait to be prepared")
        line.append(job)
        load.waiting_bytes[scope] += job.num_bytes
        self._grant()
        has_worker = False
        try:
            async with asyncio.timeout(self._wait_seconds):
                worker = await asyncio.shield(job.granted)
                has_worker = True
                return worker
        except TimeoutError:
            raise Overloaded("no worker was free to prepare the request") from None
        finally:
            if not has_worker and job.granted.done():
                self._give_back(job.granted.result(), scope)
            elif not has_worker:
                self._take_out(job)
                job.granted.cancel()

    def _is_full(self, job: _Job) -> bool:
        waiting = self._load.waiting_bytes
        mine = waiting[job.scope] + job.num_bytes
        return bool(waiting.total()) and (
            mine > MAX_WAITING_BYTES // 2 or waiting.total() + job.num_bytes > MAX_WAITING_BYTES
        )

    def _grant(self) -> None:
        """Give free workers to those whose turn it is."""
        while (scope := self._next_scope()) is not None:
            worker = self._take_worker(scope)
            if worker is None:
                return
            job = self._load.lines[scope][0]
            self._take_out(job)
            if scope in self._load.lines:
                self._load.lines.move_to_end(scope)
            self._load.running[scope] += 1
            job.granted.set_result(worker)

    def _next_scope(self) -> bytes | None:
        most = max(self._max_workers - 1, 1)
        running = self._load.running
        return next((scope for scope in self._load.lines if running[scope] < most), None)

    def _take_worker(self, scope: bytes) -> Worker | None:
        """Take a free worker, preferably one that has this scope's tokenized text in its cache."""
        if self._idle:
            mine = [i for i, (_, last) in enumerate(self._idle) if last == scope]
            return self._idle.pop(mine[-1] if mine else 0)[0]
        if len(self._workers) >= self._max_workers:
            return None
        worker = self._new_worker()
        self._workers.append(worker)
        return worker

    def _take_out(self, job: _Job) -> None:
        load = self._load
        line = load.lines[job.scope]
        line.remove(job)
        if not line:
            del load.lines[job.scope]
        load.waiting_bytes[job.scope] -= job.num_bytes
        if not load.waiting_bytes[job.scope]:
            del load.waiting_bytes[job.scope]

    def _give_back(self, worker: Worker, scope: bytes) -> None:
        self._load.running[scope] -= 1
        if not self._load.running[scope]:
            del self._load.running[scope]
        self._idle.append((worker, scope))
        self._grant()

    async def _recover(self, worker: Worker, scope: bytes) -> None:
        try:
            await worker.recover()
        finally:
            self._give_back(worker, scope)


def scope_of(body: bytes) -> bytes:
    """The request's scope, from the body's beginning, where gateways write it; for fairness only.

    Only the worker reads the whole body. A scope that is not found takes turns as an empty one.
    """
    found = _SCOPE.search(body, 0, _HEAD_BYTES)
    return found[1] if found else b""
