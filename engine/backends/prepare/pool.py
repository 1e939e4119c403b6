"""A few workers prepare requests: processes that are started when needed and replaced when lost.

Scopes take turns. One scope has at most all workers but one, and so have all scopes together whose
requests took long of late. The last worker takes only what is short: a long request delays no scope
of short ones, whoever else sends some. A cancelled request leaves at once, waiting or not. A
request that waits too long is refused as `overloaded`, since another engine may have room.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from engine.backends.prepare.loads import Grammars, ScopeLoads
from engine.backends.prepare.prepared import (
    LENGTH_BYTES,
    Answer,
    FromWorker,
    Grammar,
    Job,
    Kind,
    Postponed,
    Prepared,
    Refused,
    Start,
    ToWorker,
    WorkerSpec,
)
from engine.backends.renderer import Renderer
from engine.clock import Clock
from engine.errors import NotReady, Overloaded, PreparationFull, SchemaTooCostly, TooCostly, rebuilt
from engine.protocol.reports import Description
from engine.settings import Settings
from engine.text.rendered import DatedBeginning, KnownDays

MAX_WORKERS = 5
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bytes of waiting bodies, of all scopes together. One scope may have half of it."""
PREPARE_SECONDS = 8.0
"""Seconds that preparing one prompt may take; then its process is ended."""
GRAMMAR_SECONDS = 2.0
"""Seconds of the processor that compiling one request's grammar may take."""
COMPILE_SECONDS = 60.0
"""Seconds on the wall that compiling it may take, where others use the processor."""
SHORT_BYTES = 256 * 1024
"""A body of no more is prepared in half a second of processor time, whatever is in it."""
WAIT_SECONDS = 5.0
"""Seconds that a prompt may wait for a worker."""
MEMORY_BYTES = 2 * 2**30
"""Memory that preparing one prompt may take."""
START_SECONDS = 60.0
MAX_TRIES = 4
"""How many processes one prompt is given to, unless it was too costly for two of them."""
BUSY_SHARE = 0.2
"""A late process is to blame if it used less than this part of its time."""
CERTAIN_SHARE = 0.5
"""The request is to blame if the process used more than this part of its time. Then no other
process tries it."""
_OTHERS_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM)
"""The exit of a process that others ended, or that ended itself when its engine did not listen."""
NICENESS = 5
"""A long prompt takes a third of the processor that a step of the engine takes beside it.

A short one still runs at once: Linux lets a process that slept go before one that computes.
"""
GIVE_UP_SECONDS = 0.5
"""How long a request that its caller left may go on. Then its process is ended."""

_from_worker = msgspec.msgpack.Decoder[FromWorker](FromWorker)
log = structlog.get_logger()


MAX_BEGINNINGS = 16_384
MAX_SCOPE_BEGINNINGS = 1_024


class SessionDays:
    """The days that templates write, remembered in the engine for all of its workers.

    A prefix whose text has a date is lost at midnight. So the day that a beginning (tools and
    system prompt) was first written with stays its day, for as long as a lease on it may live.
    """

    def __init__(
        self,
        clock: Clock,
        today: Callable[[], date],
        *,
        seconds: float,
        grace_seconds: float = 0.0,
    ) -> None:
        """`today` is called at each request.

        A beginning is forgotten when it was not used for `seconds` of `clock`, or for as long as
        its leases live and `grace_seconds` more. Beyond the bounds the least recently used of a
        scope go before others.
        """
        self._clock = clock
        self._today = today
        self._seconds = seconds
        self._grace_seconds = grace_seconds
        # By beginning: its day, and until when the day is remembered.
        self._scopes: OrderedDict[str, OrderedDict[bytes, tuple[str, float]]] = OrderedDict()
        self._num_days = 0

    def known(self, scope: str) -> KnownDays:
        """What a worker must know to render a prompt of this scope."""
        now = self._clock.now()
        today = self._today().isoformat()
        days = self._scopes.get(scope, OrderedDict())
        earlier = {
            beginning: day
            for beginning, (day, until) in days.items()
            if day != today and until > now
        }
        return KnownDays(today, earlier)

    def note(self, scope: str, used: DatedBeginning, seconds: float = 0.0) -> None:
        """Note that a prompt was rendered. Its leases end within `seconds`, or within the usual
        time."""
        now = self._clock.now()
        day = used.day
        until = now + max(self._seconds, seconds + self._grace_seconds)
        days = self._scopes.setdefault(scope, OrderedDict())
        self._scopes.move_to_end(scope)
        known = days.pop(used.beginning, None)
        self._num_days += known is None
        if known is not None and known[1] > now:
            day = known[0]
            until = max(until, known[1])
        days[used.beginning] = day, until
        if len(days) > MAX_SCOPE_BEGINNINGS:
            self._forget(scope)
        while self._num_days > MAX_BEGINNINGS:
            self._forget(next(iter(self._scopes)))

    def _forget(self, scope: str) -> None:
        self._scopes[scope].popitem(last=False)
        self._num_days -= 1
        if not self._scopes[scope]:
            del self._scopes[scope]


class StillCompiling(PreparationFull):
    """The request's time is over. What its grammar takes is not known yet, but will be."""


class WorkerProcess:
    """Works on one message at a time. Nothing here is safe for two callers at once.

    After a cancelled `run` comes `recover`, then the next `run`. All raise only EngineErrors.

    Without `any_grammar` it compiles only what is known to be short. A start goes on when its
    request leaves. It costs a quarter of a second of processor, and clients that leave early would
    cost a start each.
    """

    def __init__(self, start: Start, grammars: Grammars, *, any_grammar: bool = True) -> None:
        self._start = start
        self._grammars = grammars
        self._any_grammar = any_grammar
        self._grammar: Grammar | None = None
        """What the process may be compiling."""
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._asked: asyncio.Task[Answer] | None = None
        """What the process works on, read to its end whoever waits for it."""
        self._is_closed = False

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        """The worker's answer.

        Raises SchemaTooCostly where the grammar takes too much, which is found once, and TooCostly
        where the request was at work for most of its time, or was too much for two processes. What
        else happens once may be the process's fault, so a new one prepares the request again. A
        process that is killed or stopped is never the request's fault. Raises Overloaded for many.

        Only processor time tells that a grammar takes too much. Where others take the processor,
        the request's own time may be over before that is found. Then this raises StillCompiling,
        and `recover` finds it.
        """
        num_costly = 0
        seconds = self._start.seconds
        for _ in range(MAX_TRIES):
            process = await self.ready()
            used = _cpu_seconds(process.pid)
            self._asked = asyncio.create_task(self._answer(process, Job(kind, body, days)))
            # Nobody may wait for it when the process ends.
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                async with asyncio.timeout(seconds):
                    answer = await asyncio.shield(self._asked)
                self._asked = None
                return answer
            except TimeoutError:
                if self._grammar is not None:
                    raise StillCompiling("the request's grammar is still compiled") from None
                why = f"more than {seconds:g} seconds"
                share = (_cpu_seconds(process.pid) - used) / seconds
                is_costly = share >= BUSY_SHARE
                num_costly += share >= CERTAIN_SHARE
                await self._end()
            except (asyncio.IncompleteReadError, ConnectionError):
                why = "memory"
                grammar = self._grammar
                is_costly = await self._lost(process)
                if is_costly and grammar is not None:
                    if grammar.is_optional:
                        continue
                    raise SchemaTooCostly(grammar.refusal) from None
            log.error("a worker was lost over a request", why=why, status=process.returncode)
            num_costly += is_costly
            if num_costly >= 2:
                raise TooCostly(why)
        raise Overloaded("the workers that prepared the request were killed or stopped")

    async def _answer(self, process: asyncio.subprocess.Process, job: Job) -> Answer:
        """The worker's answer, after the questions that it had to ask."""
        message = await _ask(process, job)
        if isinstance(message, Grammar):
            answer = self._grammars.begin(message.digest, any_grammar=self._any_grammar)
            if answer.verdict == "yes":
                self._grammar = message
            used = _cpu_seconds(process.pid)
            digest = message.digest
            message = await _ask(process, answer)
            if self._grammar is not None:
                self._grammar = None
                self._grammars.end(digest, seconds=_cpu_seconds(process.pid) - used)
        assert not isinstance(message, Grammar), "a request has one grammar"
        return message

    async def _lost(self, process: asyncio.subprocess.Process) -> bool:
        """The process has ended. Whether over its request: then its grammar takes too much."""
        with suppress(TimeoutError):  # the exit is told after the end of its pipe
            await asyncio.wait_for(process.wait(), GIVE_UP_SECONDS)
        grammar = self._grammar
        self._grammar = None
        await self._end()
        is_costly = process.returncode not in _OTHERS_SIGNALS
        if grammar is not None and is_costly:
            log.warning("a worker was ended over a grammar", status=process.returncode)
            self._grammars.end(grammar.digest, seconds=None)
        elif grammar is not None:
            self._grammars.leave(grammar.digest)
        return is_costly

    async def recover(self) -> None:
        """After a cancelled `run`, or StillCompiling: the worker is free again when this returns.

        What a grammar takes is found to the end, which processor time bounds: who asks for it again
        does not pay for it again. A start is not waited for here: the next request waits for it as
        the first one would have.
        """
        process = self._process
        answer = self._asked
        if process is None or answer is None:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(GIVE_UP_SECONDS):
                    await asyncio.shield(answer)
            if not answer.done() and self._grammar is not None:
                async with asyncio.timeout(self._start.compile_seconds):
                    await asyncio.shield(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._lost(process)
        except TimeoutError:
            log.error("a worker was ended in the midst of a grammar", status=process.returncode)
        if not answer.done():
            await self._end()
        self._asked = None

    def forget(self) -> None:
        """End the process, which works on nothing. The next request has another one."""
        process = self._process
        if self._starting is None and process is not None:
            self._process = None
            with suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the process; no other one starts."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    @property
    def has_started(self) -> bool:
        """Whether it has a process that takes requests."""
        return self._starting is None and self._process is not None

    async def ready(self) -> asyncio.subprocess.Process:
        """Its process, when it has started. Raises NotReady."""
        if self._is_closed:
            raise NotReady("the engine ends")
        if self._starting is None:
            if self._process is not None and self._process.returncode is None:
                return self._process
            self._starting = asyncio.create_task(self._begin())
            # Everybody who waited for it may have left.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._starting)

    async def _begin(self) -> asyncio.subprocess.Process:
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"{__package__}.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    # The working directory may have packages of our libraries' names.
                    "PYTHONSAFEPATH": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _niceness())
            async with asyncio.timeout(START_SECONDS):
                await _ask(process, self._start)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._end()
            log.error("a worker did not start", status=process.returncode)
            raise NotReady("a worker did not start") from None
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            self._starting = None
        return process

    async def _end(self) -> None:
        process = self._process
        self._process = None
        self._asked = None
        if self._grammar is not None:
            self._grammars.leave(self._grammar.digest)
            self._grammar = None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _niceness() -> int:
    """A worker's niceness, already while it starts: who makes workers end makes them start."""
    return min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)


def _cpu_seconds(pid: int) -> float:
    """A process's seconds of the processor. Where they can't be read: its seconds on the wall."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _ask(process: asyncio.subprocess.Process, message: ToWorker) -> FromWorker:
    assert process.stdin is not None
    body = msgspec.msgpack.encode(message)
    process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big"))
    process.stdin.write(body)
    await process.stdin.drain()
    return await _receive(process)


async def _receive(process: asyncio.subprocess.Process) -> FromWorker:
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    message: FromWorker = _from_worker.decode(await process.stdout.readexactly(length))
    return message


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits for a worker."""

    scope: str
    num_bytes: int
    granted: asyncio.Future[WorkerProcess]
    # Of its grammar, where that is known to wait for its turn.
    digest: bytes | None = None


class PreparePool:
    """The workers, and the requests that wait for one.

    A request gets a worker that has started, where there is one: a start may take longer than all
    that is in front of it. Another one starts meanwhile, for whoever is next then.

    The last worker takes only what is short: no body of more than SHORT_BYTES, no grammar that may
    take long, and nothing of a scope that another worker works for. So no number of long requests,
    of however many scopes, takes all workers. With one worker there is no such last one.
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
        """`new_worker` is called each time that a request waits, up to `max_workers` times.

        `new_last` makes the last worker. A request waits `wait_seconds` at most, and a scope has
        `max_waiting` requests waiting at most. `days`: None unless the template writes the date and
        a session's prefix keeps its own.
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
        # In the order of their turns; no line is empty.
        self._lines: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._idle: list[tuple[WorkerProcess, str]] = []
        self._last: WorkerProcess | None = None
        self._is_last_busy = False
        self._workers: list[WorkerProcess] = []
        self._recovering: set[asyncio.Task[None]] = set()
        self._adding: asyncio.Task[None] | None = None
        self._stale = set[WorkerProcess]()
        """They end when they have done what they work on."""

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
        """Start the last worker and one other, so that no prompt of a ready engine waits for all of
        a start."""
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
        """End all processes, whose memory has texts that they tokenized, and start one anew. Those
        that work on a request end behind it."""
        is_last_idle = self._last is not None and not self._is_last_busy
        idle = [worker for worker, _ in self._idle]
        idle += [self._last] if is_last_idle and self._last is not None else []
        self._stale = {worker for worker in self._workers if worker not in idle}
        for worker in idle:
            worker.forget()
        if idle:
            self._later(_started(idle[-1]))

    async def close(self) -> None:
        """End all workers; what runs or waits fails."""
        self._is_closed = True
        for worker in self._workers:
            await worker.close()

    async def _wait(self, job: _Job) -> WorkerProcess:
        """Wait for a worker for this job. A job that is cancelled or refused here gets none."""
        scope = job.scope
        waiting = self._waiting_bytes
        of_scope = waiting[scope] + job.num_bytes
        of_all = waiting.total() + job.num_bytes
        is_full = of_scope > MAX_WAITING_BYTES // 2 or of_all > MAX_WAITING_BYTES
        # A body beyond the bounds may wait where no other body waits.
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
        """Give free workers to those whose turn it is."""
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
        """The first whose turn it is, of those that a free worker may take.

        `may_wait`: or that one more worker might take.
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
        """Whether there may be another worker that takes all requests."""
        num_started = len(self._workers) - (self._last is not None)
        return num_started < self._most

    def _has_worker_for(self, job: _Job) -> bool:
        """Whether one is free. While none has started a request waits for the start of its own."""
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
            # Preferably one that has this scope's tokenized text in its cache.
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
    """Wait for the worker's process. One that does not start is tried again with a request."""
    with suppress(NotReady):
        await worker.ready()


def new_pool(
    renderer: Renderer,
    spec: WorkerSpec,
    description: Description,
    settings: Settings,
    days: SessionDays,
) -> PreparePool:
    """Worker processes: one for each core, and one that long requests don't get."""
    start = Start(
        spec=spec,
        description=description,
        memory_bytes=MEMORY_BYTES,
        seconds=PREPARE_SECONDS,
        grammar_seconds=GRAMMAR_SECONDS,
        compile_seconds=COMPILE_SECONDS,
    )
    max_workers = min((os.cpu_count() or 1) + 1, MAX_WORKERS)
    # Grammars that may take long don't get all of the workers that take long requests either.
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
