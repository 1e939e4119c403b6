"""A worker process as the engine's event loop sees it: started when needed, replaced when lost."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from engine.backends.prepare.prepared import DAYS, LENGTH_BYTES, START, Answer, Kind, Start
from engine.errors import NotReady, TooCostly
from engine.text.rendered import KnownDays

START_SECONDS = 60.0
GIVE_UP_SECONDS = 0.5
"""A request that is left may end by itself for so long; then its process is ended."""

_answer = msgspec.msgpack.Decoder(Answer)
log = structlog.get_logger()


class WorkerProcess:
    """Works on one message at a time. Nothing here is safe for two callers at once.

    A start goes on when its request leaves. It costs a quarter of a second of processor, and
    clients that leave early would cost a start each.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._is_asked = False
        self.num_started = 0

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        """The worker's answer. Raises TooCostly at the deadline, or where the process ended.

        Cancelled, it makes the worker stop; `recover` must be called before the next `run`.
        """
        process = await self._ready()
        self._is_asked = True
        try:
            async with asyncio.timeout(self._start.seconds):
                if days is not None:
                    _write(process, DAYS, msgspec.msgpack.encode(days))
                await _send(process, kind, body)
                answer = await _receive(process)
                self._is_asked = False
                return answer
        except TimeoutError:
            await self._end()
            raise TooCostly(f"more than {self._start.seconds:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end()
            log.error("a worker ended over a request", status=process.returncode)
            raise TooCostly("memory") from None

    async def recover(self) -> None:
        """After a cancelled `run`: the worker is free again when this returns."""
        if self._starting is not None:
            with suppress(NotReady):
                await asyncio.shield(self._starting)
        process = self._process
        if process is None or not self._is_asked:
            return
        try:
            process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await _receive(process)
            self._is_asked = False
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ProcessLookupError):
            await self._end()

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._starting is None:
            if self._process is not None and self._process.returncode is None:
                return self._process
            self._starting = asyncio.create_task(self._begin())
        return await asyncio.shield(self._starting)

    async def _begin(self) -> asyncio.subprocess.Process:
        try:
            self._process = process = await _spawn()
            self.num_started += 1
            async with asyncio.timeout(START_SECONDS):
                await _send(process, START, msgspec.msgpack.encode(self._start))
                await _receive(process)
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
        process, self._process, self._is_asked = self._process, None, False
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _spawn() -> asyncio.subprocess.Process:
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__.replace("process", "worker"),
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


async def _send(process: asyncio.subprocess.Process, kind: Kind, body: bytes) -> None:
    assert process.stdin is not None
    _write(process, kind, body)
    await process.stdin.drain()


def _write(process: asyncio.subprocess.Process, kind: Kind, body: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "big") + kind)
    process.stdin.write(body)


async def _receive(process: asyncio.subprocess.Process) -> Answer:
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    answer: Answer = _answer.decode(await process.stdout.readexactly(length))
    return answer
