"""One worker process, as the engine sees it: its start, its requests, and its end.

It is started when a request needs it, and replaced when it was lost.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from engine.backends.prepare.loads import Grammars
from engine.backends.prepare.prepared import (
    LENGTH_BYTES,
    Answer,
    FromWorker,
    Grammar,
    Job,
    Kind,
    Start,
    ToWorker,
)
from engine.errors import NotReady, Overloaded, PreparationFull, SchemaTooCostly, TooCostly
from engine.text.rendered import KnownDays

START_SECONDS = 60.0
MAX_TRIES = 4
"""The most processes that try one prompt. Fewer try it if it was too costly for two of them."""
BUSY_SHARE = 0.2
"""The request is to blame for a late process that spent at least this part of its time on the
processor. A process that spent less was stopped or had to wait, which is not the request's
fault."""
CERTAIN_SHARE = 0.5
"""A late process that spent at least this part of its time on the processor counts as two. So no
other process tries the request."""
_OTHERS_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM)
"""The exit codes of a process that others ended, or that ended itself because its engine was
gone."""
NICENESS = 5
"""With it a long prompt gets a third of the processor time that the engine's steps get beside it.

A short prompt still runs at once, because Linux prefers a process that slept.
"""
GIVE_UP_SECONDS = 0.5
"""How long a request may go on after its caller left. Then its process is ended."""

_from_worker = msgspec.msgpack.Decoder[FromWorker](FromWorker)
log = structlog.get_logger()


class StillCompiling(PreparationFull):
    """The request's time is over, and its grammar is still compiled. The grammar's time will be
    known."""


class WorkerProcess:
    """One worker process, which works on one request at a time. Only one caller may use it.

    After a cancelled `run`, `recover` must come before the next `run`. All methods raise only
    EngineErrors.

    Without `any_grammar` it compiles only grammars that are known to be short. A start goes on when
    its request leaves. A start takes a quarter of a second of processor time, and otherwise each
    client that leaves early would cost one.
    """

    def __init__(self, start: Start, grammars: Grammars, *, any_grammar: bool = True) -> None:
        self._start = start
        self._grammars = grammars
        self._any_grammar = any_grammar
        # The grammar that the process may be compiling; None: it compiles none.
        self._grammar: Grammar | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        # Reads the answer that the process works on, even if nobody waits for it any more.
        self._asked: asyncio.Task[Answer] | None = None
        self._is_closed = False

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        """The worker's answer.

        A process may be lost by its own fault, so a new one prepares the request again. A killed
        or stopped process is never the request's fault.

        Raises

        - SchemaTooCostly if the grammar takes too much, which is found by one process
        - TooCostly if it was too much for two processes, or kept one busy for most of its time
        - StillCompiling if the request's time is over and its grammar is still compiled. Only
          processor time tells whether a grammar takes too much, and others may use the processor.
          `recover` then waits for it
        - Overloaded if MAX_TRIES processes were lost
        - NotReady if no process starts
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
        """The worker's answer. A question about a grammar that comes before it is answered."""
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
        """Clean up after a process that has ended. Return whether its request was the reason.

        If so, the request's grammar counts as too costly.
        """
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
        """Make the worker free again, after a cancelled `run` or a StillCompiling.

        A grammar is compiled to its end, which processor time bounds. So its time becomes known,
        and no second try is needed. A start is not waited for. The next request waits for it.
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
        """End the process, which must be idle. The next request starts another one."""
        process = self._process
        if self._starting is None and process is not None:
            self._process = None
            with suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the process. No other one starts."""
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
    """A worker's niceness. It holds during the start too, because a client can cause starts."""
    return min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)


def _cpu_seconds(pid: int) -> float:
    """The processor time of a process, or the time of a clock if it can't be read."""
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
