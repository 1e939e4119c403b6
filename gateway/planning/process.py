"""Runs the planner in a process group of its own, with a deadline.

The event loop only moves bytes. When the caller stops waiting, the planner is killed.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path

import msgspec

from gateway.base.errors import InvalidRequest, Overloaded, RateLimited
from gateway.planning.traffic import Job
from gateway.structs.plan import Line, Plan, PlanFailed, Planned, Progress

DEADLINE_SECONDS = 170.0
_ALL_KEYS = ""
"""The key under which all plans take their places, so that all keys share these."""
_ROOT = Path(__file__).resolve().parents[2]
_MAX_LINE = 16 * 2**20


class PlanTimeout(Overloaded):
    """The planner has not ended by its deadline."""

    status = 504
    type = "timeout_error"
    default = f"the plan took longer than {DEADLINE_SECONDS:.0f} seconds: give it less traffic"


class Planners:
    """Runs plans. `place_for` gives each plan its place, and raises RateLimited where none is free
    in time."""

    def __init__(
        self,
        place_for: Callable[[str], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._place_for = place_for

    async def lines(self, job: Job) -> AsyncGenerator[Progress | Planned, None]:
        """Progress, and then the plan.

        Raise InvalidRequest where the planner refuses the job, Overloaded where no place is free or
        the planner ends early, and PlanTimeout.
        """
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._place_for(_ALL_KEYS))
            except RateLimited:
                raise Overloaded("too many plans are being made") from None
            packed = await asyncio.to_thread(msgspec.msgpack.encode, job)
            output = await stack.enter_async_context(_process(packed))
            deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        text = await output.readline()
                except TimeoutError:
                    raise PlanTimeout from None
                if not text:
                    raise Overloaded(
                        "the planner has ended early: it may have had too little memory"
                    )
                line: Line = msgspec.json.decode(text, type=Line)
                if isinstance(line, PlanFailed):
                    raise InvalidRequest(line.message)
                yield line
                if isinstance(line, Planned):
                    return

    async def plan(self, job: Job) -> Plan:
        """The plan alone. Raise as `lines` does."""
        async with aclosing(self.lines(job)) as lines:  # closing it ends the process
            async for line in lines:
                if isinstance(line, Planned):
                    return line.plan
        raise Overloaded("the planner has ended early")


@asynccontextmanager
async def _process(job: bytes) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.planner"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        limit=_MAX_LINE,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin = process.stdin

    async def feed() -> None:
        with suppress(ConnectionError):
            stdin.write(job)
            await stdin.drain()
            stdin.close()

    feeding = asyncio.create_task(feed())
    try:
        yield process.stdout
    finally:
        feeding.cancel()
        # The planner makes its process group when it begins. Until then only the process can be
        # killed.
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
