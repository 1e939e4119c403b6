"""A few workers prepare requests: processes that are started when needed and replaced when lost.

Scopes take turns. One scope has at most all workers but one, and so have all scopes together whose
requests took long of late: a long request delays no scope of short ones. A cancelled request leaves
at once, waiting or not. A request that waits too long is refused as `overloaded`, since another
engine may have room.
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

from engine.backends.base import Renderer
from engine.backends.prepare.prepared import (
    LENGTH_BYTES,
    Answer,
    FromWorker,
    Grammar,
    Job,
    Kind,
    MayCompile,
    Postponed,
    Prepared,
    Refused,
    Start,
    ToWorker,
    WorkerSpec,
)
from engine.clock import Clock
from engine.errors import NotReady, Overloaded, SchemaTooCostly, TooCostly, rebuilt
from engine.protocol.reports import Description
from engine.settings import Settings
from engine.text.rendered import DatedBeginning, KnownDays

MAX_WORKERS = 5
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bytes of waiting bodies, of all scopes together. One scope may have half of it."""
PREPARE_SECONDS = 8.0
"""Seconds that preparing one prompt may take; then its process is ended."""
GRAMMAR_SECONDS = 2.0
"""Of the processor: what one request's grammar may take to compile."""
KNOWN_SECONDS = 600.0
"""So long it is known whether a grammar takes too much: such a one is refused without a try."""
MAX_KNOWN = 4_096
SLOW_SECONDS = 1.0
"""A scope is slow while it has used so many seconds of workers beyond its share of them."""
SCOPE_SHARE = 0.25
"""Seconds of workers that a scope may use in each second without being slow."""
WAIT_SECONDS = 5.0
"""Seconds that a prompt may wait for a worker."""
MEMORY_BYTES = 2 * 2**30
"""Memory that preparing one prompt may take."""
START_SECONDS = 60.0
MAX_TRIES = 4
"""Processes that one prompt is given to, as long as it was not too costly for two of them."""
BUSY_SHARE = 0.2
"""A process that was late is to blame for it if it used less of its time than this."""
CERTAIN_SHARE = 0.5
"""A request is to blame if the process used more of its time than this: no other one tries it."""
GIVE_UP_SECONDS = 0.5
"""A request that is left may end by itself for so long; then its process is ended."""

_from_worker = msgspec.msgpack.Decoder[FromWorker](FromWorker)
log = structlog.get_logger()


MAX_BEGINNINGS = 16_384
MAX_SCOPE_BEGINNINGS = 1_024


class SessionDays:
    """The days that templates write, remembered in the engine for all of its workers.

    A prefix whose text has a date is lost at midnight. So the day that a beginning (tools and
    system prompt) was first written with stays its day, for as long as a lease on it may live.

    `today` is asked at each request. A beginning is forgotten when it was not used for `seconds`
    of `clock`, and beyond the bounds the least recently used of a scope before others.
    """

    def __init__(self, clock: Clock, today: Callable[[], date], *, seconds: float) -> None:
        self._clock = clock
        self._today = today
        self._seconds = seconds
        # By beginning: its day, and until when that is remembered.
        self._scopes: OrderedDict[str, OrderedDict[bytes, tuple[str, float]]] = OrderedDict()
        self._num_days = 0

    def known(self, scope: str) -> KnownDays:
        """What a worker must know to render a prompt of this scope."""
        now = self._clock.now()
        today = self._today().isoformat()
        days = self._scopes.get(scope, OrderedDict())
        earlier = {one: day for one, (day, until) in days.items() if day != today and until > now}
        return KnownDays(today, earlier)

    def note(self, scope: str, used: DatedBeginning, seconds: float = 0.0) -> None:
        """A prompt was rendered. Its leases end within `seconds`, or within the usual time."""
        now = self._clock.now()
        day = used.day
        until = now + max(self._seconds, seconds)
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


class Grammars:
    """Which grammars are known, by digest, and how many workers compile others.

    One that is not known may take long. So at most `most` workers compile such ones at once, of all
    scopes together, and the last worker compiles none. What was found is known for KNOWN_SECONDS of
    `monotonic`, and beyond MAX_KNOWN the oldest is forgotten.
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._monotonic = monotonic
        self._known = OrderedDict[bytes, tuple[bool, float]]()
        self._compiling = Counter[bytes]()

    @property
    def has_room(self) -> bool:
        return self._compiling.total() < self._most

    def begin(self, digest: bytes) -> MayCompile:
        """A worker asks whether to compile. After a `yes` comes `end`."""
        is_costly, until = self._known.get(digest, (False, 0.0))
        is_known = until > self._monotonic()
        if is_known and is_costly:
            return MayCompile("costly")
        if not is_known and not self.has_room:
            return MayCompile("later")
        if not is_known:
            self._compiling[digest] += 1
        return MayCompile("yes")

    def end(self, digest: bytes, *, is_costly: bool | None) -> None:
        """The worker no longer compiles. `is_costly` None: what it takes was not found."""
        if self._compiling[digest]:
            self._compiling[digest] -= 1
        self._compiling += Counter()  # drops what is at zero
        if is_costly is None:
            return
        self._known[digest] = is_costly, self._monotonic() + KNOWN_SECONDS
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


class ScopeLoads:
    """How much of the workers each scope used of late: a leaky bucket a scope. Pure.

    What a scope used fades by SCOPE_SHARE of a worker. Moments are seconds of one clock.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        self._running: dict[str, list[float]] = {}

    def begin(self, scope: str, now: float) -> None:
        """A worker begins to work for the scope."""
        self._running.setdefault(scope, []).append(now)

    def end(self, scope: str, now: float) -> None:
        """A worker has ended its oldest work for the scope."""
        began = self._running[scope].pop(0)
        if not self._running[scope]:
            del self._running[scope]
        used = self._faded(scope, now) + now - began
        self._used[scope] = used, now
        self._used = {each: load for each, load in self._used.items() if self._faded(each, now)}

    def is_slow(self, scope: str, now: float) -> bool:
        running = sum(now - began for began in self._running.get(scope, ()))
        return self._faded(scope, now) + running > SLOW_SECONDS

    def num_slow(self, now: float) -> int:
        """Workers that work for slow scopes."""
        running = self._running.items()
        return sum(len(begun) for scope, begun in running if self.is_slow(scope, now))

    def _faded(self, scope: str, now: float) -> float:
        used, at = self._used.get(scope, (0.0, now))
        return max(used - (now - at) * SCOPE_SHARE, 0.0)


class WorkerProcess:
    """Works on one message at a time. Nothing here is safe for two callers at once.

    After a cancelled `run` comes `recover`, then the next `run`. All raise only EngineErrors.

    A start goes on when its request leaves. It costs a quarter of a second of processor, and
    clients that leave early would cost a start each.
    """

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._start = start
        self._grammars = grammars
        self._grammar: Grammar | None = None
        """What the process may be compiling."""
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._is_asked = False

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        """The worker's answer.

        Raises SchemaTooCostly where the grammar takes too much, which is found once, and TooCostly
        where the request was at work for most of its time, or was too much for two processes. What
        else happens once may be the process's fault, so a new one prepares the request again. A
        process that is killed or stopped is never the request's fault. Raises Overloaded for many.
        """
        num_costly = 0
        seconds = self._start.seconds
        for _ in range(MAX_TRIES):
            process = await self.ready()
            self._is_asked = True
            used = _cpu_seconds(process.pid)
            try:
                async with asyncio.timeout(seconds):
                    message = await _ask(process, Job(kind, body, days))
                    answer = await self._answer(process, message)
                    self._is_asked = False
                    return answer
            except TimeoutError:
                why = f"more than {seconds:g} seconds"
                share = (_cpu_seconds(process.pid) - used) / seconds
                is_costly = share >= BUSY_SHARE
                num_costly += share >= CERTAIN_SHARE
                self._compiled(is_costly=None)
                await self._end()
            except (asyncio.IncompleteReadError, ConnectionError):
                why = "memory"
                with suppress(TimeoutError):  # how it ended is told behind the end of its pipe
                    await asyncio.wait_for(process.wait(), GIVE_UP_SECONDS)
                await self._end()
                is_costly = process.returncode not in (-signal.SIGKILL, -signal.SIGTERM)
                grammar = self._grammar
                self._compiled(is_costly=True if is_costly else None)
                if is_costly and grammar is not None:
                    log.warning("a worker was ended over a grammar", status=process.returncode)
                    if grammar.is_optional:
                        continue
                    raise SchemaTooCostly(grammar.refusal) from None
            log.error("a worker was lost over a request", why=why, status=process.returncode)
            num_costly += is_costly
            if num_costly >= 2:
                raise TooCostly(why)
        raise Overloaded("the workers that prepared the request were killed or stopped")

    async def _answer(self, process: asyncio.subprocess.Process, message: FromWorker) -> Answer:
        """The worker's answer, when it has asked what it had to ask."""
        if isinstance(message, Grammar):
            answer = self._grammars.begin(message.digest)
            if answer.verdict == "yes":
                self._grammar = message
            message = await _ask(process, answer)
            self._compiled(is_costly=False)
        assert not isinstance(message, Grammar), "a request has one grammar"
        return message

    def _compiled(self, *, is_costly: bool | None) -> None:
        """The process compiles nothing any more."""
        grammar = self._grammar
        self._grammar = None
        if grammar is not None:
            self._grammars.end(grammar.digest, is_costly=is_costly)

    async def recover(self) -> None:
        """After a cancelled `run`: the worker is free again when this returns.

        A start is not waited for here: the next request waits for it as the first one would have.
        """
        process = self._process
        if process is None or not self._is_asked:
            return
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._answer(process, await _receive(process))
            self._is_asked = False
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self._end()
        finally:
            self._compiled(is_costly=None)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    async def ready(self) -> asyncio.subprocess.Process:
        if self._starting is None:
            if self._process is not None and self._process.returncode is None:
                return self._process
            self._starting = asyncio.create_task(self._begin())
            # All who waited for it may have left.
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
        self._is_asked = False
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _cpu_seconds(pid: int) -> float:
    """Processor seconds of a process. Of one that can't be asked, those on the wall."""
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
    """`compiles` where a grammar is known to wait for its turn."""

    scope: str
    num_bytes: int
    granted: asyncio.Future[WorkerProcess]
    compiles: bool = False


class PreparePool:
    """`new_worker` is called for up to `max_workers`, each time that all others are busy.

    A request waits for a worker for `wait_seconds` at most; a scope has `max_waiting` waiting.
    `days` are there if the template writes the date and a session's prefix keeps its own.
    """

    def __init__(
        self,
        new_worker: Callable[[], WorkerProcess],
        *,
        max_workers: int,
        max_waiting: int,
        wait_seconds: float,
        days: SessionDays | None = None,
        grammars: Grammars | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grammars = grammars
        self._monotonic = monotonic
        self._loads = ScopeLoads()
        self._new_worker = new_worker
        self._max_workers = max_workers
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._days = days
        # In the order of their turns; no line is empty.
        self._lines: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._idle: list[tuple[WorkerProcess, str]] = []
        self._workers: list[WorkerProcess] = []
        self._recovering: set[asyncio.Task[None]] = set()

    async def run(self, kind: Kind, body: bytes, scope: str) -> Answer:
        """The answer of a worker. Raises Overloaded, TooCostly and what the worker refuses."""
        answer = await self._run(kind, body, scope)
        for _ in range(MAX_TRIES):
            if not isinstance(answer, Postponed):
                break
            answer = await self._run(kind, body, scope, compiles=True)
        if isinstance(answer, Postponed):
            raise Overloaded("no worker was free to compile the request's grammar")
        if isinstance(answer, Refused):
            raise rebuilt(answer.code, answer.message, is_public=answer.is_public)
        if self._days is not None and isinstance(answer, Prepared) and answer.dated is not None:
            self._days.note(scope, answer.dated, answer.own_seconds)
        return answer

    async def _run(self, kind: Kind, body: bytes, scope: str, *, compiles: bool = False) -> Answer:
        granted = asyncio.get_running_loop().create_future()
        job = _Job(scope, len(body), granted, compiles)
        worker = await self._wait(job)
        days = None if self._days is None else self._days.known(scope)
        is_free = True
        try:
            return await worker.run(kind, body, days)
        except asyncio.CancelledError:
            is_free = False
            recovering = self._later(worker.recover())
            recovering.add_done_callback(lambda _: self._give_back(worker, scope))
            raise
        except TooCostly:
            # The scope has the worker until another process has started.
            is_free = False
            starting = self._later(_started(worker))
            starting.add_done_callback(lambda _: self._give_back(worker, scope))
            raise
        finally:
            if is_free:
                self._give_back(worker, scope)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)
        return task

    async def warm(self) -> None:
        """Start one worker, so that no prompt of a ready engine waits for all of a start."""
        worker = self._new_worker()
        self._workers.append(worker)
        await _started(worker)
        self._idle.append((worker, ""))
        self._grant()

    async def close(self) -> None:
        """End all workers; what runs or waits fails."""
        self._max_workers = 0
        for worker in self._workers:
            await worker.close()

    async def _wait(self, job: _Job) -> WorkerProcess:
        """A worker for this job; whoever is cancelled or refused here has none."""
        scope = job.scope
        waiting = self._waiting_bytes
        of_scope = waiting[scope] + job.num_bytes
        of_all = waiting.total() + job.num_bytes
        is_full = of_scope > MAX_WAITING_BYTES // 2 or of_all > MAX_WAITING_BYTES
        # A body that is larger than the bounds waits where nothing else does.
        is_full = is_full and of_all > job.num_bytes
        if is_full or len(self._lines.get(scope, ())) >= self._max_waiting:
            raise Overloaded("too many requests of one scope wait to be prepared")
        self._lines.setdefault(scope, deque()).append(job)
        waiting[scope] = of_scope
        self._grant()
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await asyncio.shield(job.granted)
        except (asyncio.CancelledError, TimeoutError) as error:
            if job.granted.done():
                self._give_back(job.granted.result(), scope)
            else:
                self._take_out(job)
            if isinstance(error, TimeoutError):
                raise Overloaded("no worker was free to prepare the request") from None
            raise

    def _grant(self) -> None:
        """Give free workers to those whose turn it is."""
        most = max(self._max_workers - 1, 1)
        now = self._monotonic()
        may_compile = self._grammars is None or self._grammars.has_room
        while True:
            has_slow_room = self._loads.num_slow(now) < most
            allowed = (
                scope
                for scope, line in self._lines.items()
                if self._running[scope] < most
                and (may_compile or not line[0].compiles)
                and (has_slow_room or not self._loads.is_slow(scope, now))
            )
            scope = next(allowed, None)
            if scope is None or not (self._idle or len(self._workers) < self._max_workers):
                return
            if self._idle:
                # Preferably one that has this scope's tokenized text in its cache.
                mine = [i for i, (_, last) in enumerate(self._idle) if last == scope]
                worker = self._idle.pop(mine[-1] if mine else 0)[0]
            else:
                worker = self._new_worker()
                self._workers.append(worker)
            job = self._lines[scope][0]
            self._take_out(job)
            if scope in self._lines:
                self._lines.move_to_end(scope)
            self._running[scope] += 1
            self._loads.begin(scope, now)
            may_compile = may_compile and not job.compiles  # it asks for its room in a moment
            job.granted.set_result(worker)
            num_started = len(self._workers)
            if not self._idle and num_started == most < self._max_workers:
                # The last worker starts before anybody waits for it.
                self._later(self.warm())

    def _take_out(self, job: _Job) -> None:
        line = self._lines[job.scope]
        line.remove(job)
        self._waiting_bytes[job.scope] -= job.num_bytes
        if not line:
            del self._lines[job.scope], self._waiting_bytes[job.scope]

    def _give_back(self, worker: WorkerProcess, scope: str) -> None:
        self._loads.end(scope, self._monotonic())
        self._running[scope] -= 1
        if not self._running[scope]:
            del self._running[scope]
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
    )
    max_workers = min((os.cpu_count() or 1) + 1, MAX_WORKERS)
    grammars = Grammars(max_workers - 1)
    return PreparePool(
        partial(WorkerProcess, start, grammars),
        max_workers=max_workers,
        max_waiting=settings.max_waiting,
        wait_seconds=WAIT_SECONDS,
        days=days if renderer.writes_date else None,
        grammars=grammars,
    )
