"""Workers of a forked engine (tests/forking.py) are forked from the engine itself.

A worker that starts as `python -m engine.backends.prepare.worker` takes half a second of CPU time
to import what it needs, one of a real model a whole second, and each engine starts two.
tests/scripts and tests/engine/backends/prepare start that command.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Mapping
from typing import Any

from engine.backends.prepare import worker

COMMAND = ("-m", worker.__name__)
_execute = asyncio.create_subprocess_exec
_FIRST_OF_OTHERS = 3
"""The descriptors below are the standard ones."""


class ForkedWorker:
    """What a pool of workers uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._exit = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._exit, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._exit)
        os.close(self._exit)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self.stdin.close()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Raises ProcessLookupError where it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)


def fork_workers() -> None:
    """From now on this process, an engine, forks its workers."""
    asyncio.create_subprocess_exec = execute


async def execute(
    program: str, *arguments: str, env: Mapping[str, str], **more: Any
) -> ForkedWorker | asyncio.subprocess.Process:
    """As `asyncio.create_subprocess_exec`, which starts all but workers."""
    if arguments != COMMAND:
        return await _execute(program, *arguments, env=env, **more)
    worker_input, to_worker = os.pipe()
    from_worker, worker_output = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_worker(worker_input, worker_output, env)
    os.close(worker_input)
    os.close(worker_output)
    loop = asyncio.get_running_loop()
    stdout = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(from_worker, "rb", 0)
    )
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
        os.fdopen(to_worker, "wb", 0),
    )
    return ForkedWorker(pid, asyncio.StreamWriter(transport, protocol, None, loop), stdout)


def _be_worker(worker_input: int, worker_output: int, env: Mapping[str, str]) -> None:
    """Be the worker, and end. Nothing of the engine's goes on here but its memory."""
    status = 1
    try:
        # A collection would copy the pages of all that the engine has loaded.
        gc.freeze()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        os.dup2(worker_input, 0)
        os.dup2(worker_output, 1)
        os.closerange(_FIRST_OF_OTHERS, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        status = worker.main()
    finally:
        os._exit(status)
