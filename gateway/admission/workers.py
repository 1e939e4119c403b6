"""Threads for work that grows with a request, so that the event loop never waits for it.

A small body is read at once, since handing it over would cost more. A large body waits for a
thread, in fair order between workspaces by bytes. A workspace has one thread at a time; the other
threads are left to other workspaces. Work with a line of its own has one thread for all workspaces,
and takes none of theirs. The waiting work of a client that leaves is dropped. Work that
a thread has begun ends by itself, since every request is bounded.

Threads share the interpreter's lock. It changes hands every `SWITCH_SECONDS`, a fiftieth of
Python's default, so that the loop waits for a thread no longer than that at a time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.admission.fair_queue import Bounds, FairQueue, QueueFull, Waiting
from gateway.base.errors import Overloaded

INLINE_BYTES = 16 * 1024
"""The densest body of this size has some 600 blocks and takes the loop 5 ms; most take a tenth."""
SWITCH_SECONDS = 0.0001
_NUM_THREADS = 4
_MAX_WAITING = 1024

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Job:
    future: asyncio.Future[Any]
    work: Callable[[], Any]


class Workers:
    """Used from one event loop; `close` when nothing runs any more."""

    def __init__(self, num_threads: int = _NUM_THREADS, max_bytes: int = 1 << 30) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "worker")
        # The total bounds the bytes of waiting bodies. A workspace is bounded by their number
        # alone.
        self._queue: FairQueue[_Job] = FairQueue(
            Bounds(
                turns=_MAX_WAITING,
                tokens=max_bytes,
                workspace_turns=_MAX_WAITING // 4,
                workspace_tokens=max_bytes,
            )
        )
        self._busy: set[str | None] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def run(
        self,
        workspace: str,
        num_bytes: int,
        work: Callable[..., Result],
        *arguments: Any,
        line: str | None = None,
    ) -> Result:
        """Run `work` and return its result. The `line` is the workspace's where it is None.

        Raise its error, or Overloaded if too much waits already.
        """
        if num_bytes <= INLINE_BYTES:
            return work(*arguments)
        loop = asyncio.get_running_loop()
        job = _Job(loop.create_future(), lambda: work(*arguments))
        waiting = Waiting(workspace, line or workspace, num_bytes, job)
        try:
            victims = self._queue.push(waiting)
        except QueueFull:
            raise Overloaded from None
        for victim in victims:
            if not victim.item.future.done():
                victim.item.future.set_exception(Overloaded())
        self._start(loop)
        try:
            result: Result = await job.future
        finally:
            self._queue.remove(waiting)
        return result

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while len(self._busy) < self._num_threads:
            waiting = self._queue.pop(lambda line: line not in self._busy)
            if waiting is None:
                return
            self._busy.add(waiting.kind)
            self._threads.submit(waiting.item.work).add_done_callback(
                lambda done, waiting=waiting: self._end_soon(loop, waiting, done)  # type: ignore[misc]
            )

    def _end_soon(
        self, loop: asyncio.AbstractEventLoop, waiting: Waiting[_Job], done: "Future[Any]"
    ) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._end, loop, waiting, done)

    def _end(
        self, loop: asyncio.AbstractEventLoop, waiting: Waiting[_Job], done: "Future[Any]"
    ) -> None:
        self._busy.discard(waiting.kind)
        future = waiting.item.future
        if not future.done() and not done.cancelled():
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
        self._start(loop)
