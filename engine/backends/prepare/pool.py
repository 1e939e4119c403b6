"""Worker processes that prepare requests. They are started when needed and replaced when lost.

Scopes take turns. One scope has at most all workers but one. The scopes whose requests took long of
late have together at most all workers but one. The last worker takes only short requests, so long
ones delay no scope that sends short ones. A cancelled request leaves at once, even while it waits.
A request that waits too long is refused as `overloaded`, since another engine may have room.
"""

import asyncio
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.backends.prepare.loads import Grammars, ScopeLoads
from engine.backends.prepare.prepared import (
    Answer,
    Kind,
    Postponed,
    Prepared,
    Refused,
    Start,
    WorkerSpec,
)
from engine.backends.prepare.process import MAX_TRIES, StillCompiling, WorkerProcess
from engine.backends.prepare.session_days import SessionDays
from engine.backends.renderer import Renderer
from engine.errors import NotReady, PreparationFull, TooCostly, rebuilt
from engine.protocol.reports import Description
from engine.settings import Settings

MAX_WORKERS = 5
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""The most bytes of waiting bodies, of all scopes together. One scope may have half of them."""
PREPARE_SECONDS = 8.0
"""The most time for preparing one prompt. Then its process is ended."""
GRAMMAR_SECONDS = 2.0
"""The most processor time for compiling one request's grammar."""
COMPILE_SECONDS = 60.0
"""The most wall time for compiling it. It is longer, because others may use the processor."""
SHORT_BYTES = 256 * 1024
"""A body of at most this size is prepared in half a second of processor time, whatever it has."""
WAIT_SECONDS = 5.0
"""The most time that a prompt waits for a worker."""
MEMORY_BYTES = 2 * 2**30
"""The most memory for preparing one prompt."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits for a worker."""

    scope: str
    num_bytes: int
    granted: asyncio.Future[WorkerProcess]
    # Its grammar's digest if a worker postponed it; None: not postponed.
    digest: bytes | None = None


class PreparePool:
    """The workers, and the requests that wait for one.

    A request waits for a started worker if there is one, because a start may take longer than all
    requests before it. Another worker starts meanwhile, for the next request.

    The last worker takes only short requests: no body of more than SHORT_BYTES, no grammar that may
    take long, and none of a scope that another worker works for. So long requests can't take all
    workers, however many they are. If there is only one worker, it takes all requests.
    """

    def __init__(
        self,
        new_worker: Callable[[], WorkerProcess],
        *,
        max_workers: int,
        max_waiting: int,
        wait_seconds: float,
        new_last: Callable[[], WorkerProcess] | None = None,
        days: SessionDays | None = None,
        grammars: Grammars | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new_worker` is called when a request waits, until there are `max_workers`.

        `new_last` makes the last worker. A request waits at most `wait_seconds`, and at most
        `max_waiting` requests of a scope wait. `days` is None if the template writes no date.
        """
        self._grammars = grammars
        self._monotonic = monotonic
        self._loads = ScopeLoads()
        self._new_worker = new_worker
        self._new_last = new_last or new_worker
        # The most workers that take all requests.
        self._most = max(max_workers - 1, 1)
        self._has_last = max_workers > 1
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._days = days
        self._is_closed = False
        # The waiting jobs of each scope, in the order of the scopes' turns. No line is empty.
        self._lines: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._idle: list[tuple[WorkerProcess, str]] = []
        self._last: WorkerProcess | None = None
        self._is_last_busy = False
        self._workers: list[WorkerProcess] = []
        self._recovering: set[asyncio.Task[None]] = set()
        self._adding: asyncio.Task[None] | None = None
        # Busy workers whose process ends after its request.
        self._stale = set[WorkerProcess]()

    async def run(self, kind: Kind, body: bytes, scope: str) -> Answer:
        """The answer of a worker. Raises Overloaded, TooCostly and what the worker refuses."""
        answer = await self._run(kind, body, scope)
        for _ in range(MAX_TRIES):
            if not isinstance(answer, Postponed):
                break
            answer = await self._run(kind, body, scope, answer.digest)
        if isinstance(answer, Postponed):
            raise PreparationFull("no worker was free to compile the request's grammar")
        if isinstance(answer, Refused):
            raise rebuilt(answer.code, answer.message, is_public=answer.is_public)
        if self._days is not None and isinstance(answer, Prepared) and answer.dated is not None:
            self._days.note(scope, answer.dated, answer.lease_seconds)
        return answer

    async def _run(
        self, kind: Kind, body: bytes, scope: str, digest: bytes | None = None
    ) -> Answer:
        granted = asyncio.get_running_loop().create_future()
        job = _Job(scope, len(body), granted, digest)
        worker = await self._wait(job)
        days = None if self._days is None else self._days.known(scope)
        is_free = True
        try:
            return await worker.run(kind, body, days)
        except (asyncio.CancelledError, StillCompiling):
            is_free = False
            recovering = self._later(worker.recover())
            recovering.add_done_callback(lambda _: self._give_back(worker, scope))
            raise
        except TooCostly:
            # The scope has the worker until another process has started.
            self._grant()
            is_free = False
            starting = self._later(_started(worker))
            starting.add_done_callback(lambda _: self._give_back(worker, scope))
            raise
        finally:
            if self._grammars is not None and digest is not None:
                self._grammars.end_reservation(digest)
            if is_free:
                self._give_back(worker, scope)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)
        return task

    async def warm(self) -> None:
        """Start the last worker and another one, so that prompts of a ready engine find one
        started."""
        worker = self._new_worker()
        self._workers.append(worker)
        starting = [_started(worker)]
        if self._has_last:
            starting.append(_started(self._last_worker()))
        await asyncio.gather(*starting)
        self._idle.append((worker, ""))
        self._grant()

    def _last_worker(self) -> WorkerProcess:
        if self._last is None:
            self._last = self._new_last()
            self._workers.append(self._last)
        return self._last

    def renew(self) -> None:
        """End all processes, because their memory has tokenized texts, and start one anew.

        A process that works on a request ends after it.
        """
        is_last_idle = self._last is not None and not self._is_last_busy
        idle = [worker for worker, _ in self._idle]
        idle += [self._last] if is_last_idle and self._last is not None else []
        self._stale = {worker for worker in self._workers if worker not in idle}
        for worker in idle:
            worker.forget()
        if idle:
            self._later(_started(idle[-1]))

    async def close(self) -> None:
        """End all workers. Requests that run or wait fail."""
        self._is_closed = True
        for worker in self._workers:
            await worker.close()

    async def _wait(self, job: _Job) -> WorkerProcess:
        """The worker for this job, once it is free. A cancelled or refused job gets none.

        Raises PreparationFull.
        """
        scope = job.scope
        waiting = self._waiting_bytes
        of_scope = waiting[scope] + job.num_bytes
        of_all = waiting.total() + job.num_bytes
        is_full = of_scope > MAX_WAITING_BYTES // 2 or of_all > MAX_WAITING_BYTES
        # A body beyond the bounds may wait if no other body waits.
        is_full = is_full and of_all > job.num_bytes
        if is_full or len(self._lines.get(scope, ())) >= self._max_waiting:
            raise PreparationFull("too many requests of one scope wait to be prepared")
        self._lines.setdefault(scope, deque()).append(job)
        waiting[scope] = of_scope
        if self._grammars is not None:
            self._grammars.num_waiting += job.digest is not None
        self._grant()
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await asyncio.shield(job.granted)
        except (asyncio.CancelledError, TimeoutError) as error:
            if job.granted.done():
                if self._grammars is not None and job.digest is not None:
                    self._grammars.end_reservation(job.digest)
                self._give_back(job.granted.result(), scope)
            else:
                self._take_out(job)
            if isinstance(error, TimeoutError):
                raise PreparationFull("no worker was free to prepare the request") from None
            raise

    def _grant(self) -> None:
        """Give the free workers to the jobs whose turn it is, and start another one if needed."""
        while True:
            job = self._next_job()
            if job is None:
                break
            scope = job.scope
            worker = self._worker_for(job)
            self._take_out(job)
            if scope in self._lines:
                self._lines.move_to_end(scope)
            self._running[scope] += 1
            self._loads.begin(scope, self._monotonic())
            if self._grammars is not None and job.digest is not None:
                self._grammars.reserve(job.digest)
            job.granted.set_result(worker)
        is_adding = self._adding is not None and not self._adding.done()
        if self._may_start and not is_adding and self._next_job(may_wait=True) is not None:
            worker = self._new_worker()
            self._workers.append(worker)
            self._adding = self._later(self._add(worker))

    async def _add(self, worker: WorkerProcess) -> None:
        await _started(worker)
        self._adding = None
        self._idle.append((worker, ""))
        self._grant()

    def _next_job(self, *, may_wait: bool = False) -> _Job | None:
        """The first job in turn that a free worker may take; None: there is none.

        With `may_wait`, the first that one more worker could take.
        """
        if self._is_closed:
            return None
        now = self._monotonic()
        has_slow_room = self._loads.num_slow(now) < self._most
        for scope, line in self._lines.items():
            job = line[0]
            if self._running[scope] >= self._most:
                continue
            if not may_wait and not self._has_worker_for(job):
                continue
            if not has_slow_room and self._loads.is_slow(scope, now):
                continue
            if self._grammars is None or job.digest is None or self._grammars.may_begin(job.digest):
                return job
        return None

    @property
    def _may_start(self) -> bool:
        """Whether another worker that takes all requests may be started."""
        num_started = len(self._workers) - (self._last is not None)
        return num_started < self._most

    def _has_worker_for(self, job: _Job) -> bool:
        """Whether a worker is free for the job. A new one counts as free while none has started."""
        has_any = any(worker.has_started for worker in self._workers)
        if self._idle or (self._may_start and not has_any):
            return True
        is_last_there = not self._may_start or (self._last is not None and self._last.has_started)
        return is_last_there and self._suits_last(job)

    def _suits_last(self, job: _Job) -> bool:
        is_short = job.num_bytes <= SHORT_BYTES and job.digest is None
        is_free = self._has_last and not self._is_last_busy
        return is_free and is_short and not self._running[job.scope]

    def _worker_for(self, job: _Job) -> WorkerProcess:
        if self._idle:
            # A worker that last served this scope has its tokenized text in the cache.
            mine = [i for i, (_, scope) in enumerate(self._idle) if scope == job.scope]
            return self._idle.pop(mine[-1] if mine else 0)[0]
        is_last_warm = self._last is not None
        if self._suits_last(job) and (is_last_warm or not self._may_start):
            self._is_last_busy = True
            return self._last_worker()
        worker = self._new_worker()
        self._workers.append(worker)
        return worker

    def _take_out(self, job: _Job) -> None:
        line = self._lines[job.scope]
        line.remove(job)
        if self._grammars is not None:
            self._grammars.num_waiting -= job.digest is not None
        self._waiting_bytes[job.scope] -= job.num_bytes
        if not line:
            del self._lines[job.scope], self._waiting_bytes[job.scope]

    def _give_back(self, worker: WorkerProcess, scope: str) -> None:
        self._loads.end(scope, self._monotonic())
        self._running[scope] -= 1
        if not self._running[scope]:
            del self._running[scope]
        if worker in self._stale:
            self._stale.discard(worker)
            worker.forget()
        if worker is self._last:
            self._is_last_busy = False
        else:
            self._idle.append((worker, scope))
        self._grant()


async def _started(worker: WorkerProcess) -> None:
    """Wait for the worker's process. If it does not start, the next request tries again."""
    with suppress(NotReady):
        await worker.ready()


def new_pool(
    renderer: Renderer,
    spec: WorkerSpec,
    description: Description,
    settings: Settings,
    days: SessionDays,
) -> PreparePool:
    """The pool of an engine: a worker for each core and one for short requests, at most
    MAX_WORKERS."""
    start = Start(
        spec=spec,
        description=description,
        memory_bytes=MEMORY_BYTES,
        seconds=PREPARE_SECONDS,
        grammar_seconds=GRAMMAR_SECONDS,
        compile_seconds=COMPILE_SECONDS,
    )
    max_workers = min((os.cpu_count() or 1) + 1, MAX_WORKERS)
    # Long grammars leave one worker to other long requests.
    grammars = Grammars(max(max_workers - 2, 1))
    return PreparePool(
        partial(WorkerProcess, start, grammars),
        new_last=partial(WorkerProcess, start, grammars, any_grammar=False),
        max_workers=max_workers,
        max_waiting=settings.max_waiting,
        wait_seconds=WAIT_SECONDS,
        days=days if renderer.writes_date else None,
        grammars=grammars,
    )
