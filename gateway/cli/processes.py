"""Keeps the worker processes running: starts them, starts them again, and ends them.

A worker that ends is started again after a pause that doubles each time. One that ends before it
ever served stops the whole gateway, since the next would end alike. One that has not answered for
SILENT_SECONDS is killed, and started again; meanwhile nobody waits for its answers.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.base.background import pause
from gateway.base.errors import GatewayError
from gateway.base.link import Handler, Link
from gateway.base.logs import get_logger
from gateway.http.accepting import Board
from gateway.http.machine import WorkerState
from gateway.turn.room import Room, make_room

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 15.0
STEADY_SECONDS = 10.0
SILENT_SECONDS = 60.0
LOOK_SECONDS = 5.0
ANSWER_SECONDS = 3.0
MAX_UNREAD_BYTES = 64 << 20
"""What a worker has not read yet of its parent's messages. One with more is killed."""
_LAST_WORDS_SECONDS = 2.0


@dataclass(slots=True)
class Worker:
    """One worker over all its processes.

    `has_begun`: the process of now serves. `is_silent`: it did not answer in time.
    """

    number: int
    process: Process | None = None
    link: Link | None = None
    has_begun: bool = False
    is_silent: bool = False
    num_started: int = 0
    num_ends: int = 0

    @property
    def state(self) -> WorkerState:
        return WorkerState(
            worker=self.number,
            pid=self.process.pid if self.process else None,
            is_running=self.has_begun,
            is_silent=self.is_silent,
            restarts=max(self.num_started - 1, 0),
        )


class Processes:
    """`seat` gives the handlers of a worker's new process, and is told of its end by `left`."""

    def __init__(
        self,
        num_workers: int,
        listening: socket.socket,
        seat: Callable[[Worker], Mapping[str, Handler]],
        left: Callable[[Worker], None],
        command: Sequence[str] = (sys.executable, "-m", "gateway", "serve", "--worker"),
    ) -> None:
        self._command = command
        self.workers = [Worker(number) for number in range(1, num_workers + 1)]
        self._listening = listening
        self._board, self._counts = Board.made(num_workers)
        self._room = make_room(num_workers)
        self.room = Room(self._room, num_workers)
        self._seat = seat
        self._left = left
        self._stopping = asyncio.Event()
        self.exit_status: int | None = None
        """The exit status of a worker that never served."""
        self._log = get_logger("workers")

    async def run(self) -> None:
        """Run all workers until they have ended behind `signal`."""
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._keep(worker))

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on. No worker is started again behind it."""
        self._stopping.set()
        for worker in self.workers:
            if worker.process is not None:
                with suppress(ProcessLookupError):
                    worker.process.send_signal(number)

    async def _keep(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            since, status = loop.time(), None
            try:
                status = await self._run(worker)
            except OSError as error:  # no room for another process, or no descriptor
                self._log.error("worker_not_started", worker=worker.number, error=str(error))
            if self._stopping.is_set():
                return
            if self.exit_status is not None:
                self.signal(signal.SIGTERM)
                return
            worker.num_ends = 1 if loop.time() - since >= STEADY_SECONDS else worker.num_ends + 1
            seconds = min(FIRST_PAUSE_SECONDS * 2 ** (worker.num_ends - 1), MAX_PAUSE_SECONDS)
            self._log.error(
                "worker_ended", worker=worker.number, status=status, retry_seconds=seconds
            )
            await pause(self._stopping, seconds)

    async def _run(self, worker: Worker) -> int:
        """Run one process to its end. Return its exit status, below 0 for a signal."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptors = self._listening.fileno(), theirs.fileno(), self._counts, self._room
            worker.process = await asyncio.create_subprocess_exec(
                *self._command,
                *map(str, (worker.number, len(self.workers), *descriptors)),
                pass_fds=descriptors,
                # A terminal's SIGINT goes to the parent alone, which passes it on.
                start_new_session=True,
            )
            worker.num_started += 1
            is_lost = asyncio.Event()
            worker.link = await Link.over(ours.dup(), self._seat(worker), is_lost.set)
        if self._stopping.is_set():  # it was asked to end while this one was being started
            worker.process.send_signal(signal.SIGTERM)
        watching = asyncio.create_task(self._watch(worker, worker.process, worker.link))
        status = await worker.process.wait()
        watching.cancel()
        self._board.leave(worker.number)
        await pause(is_lost, _LAST_WORDS_SECONDS)  # what it told last is read first
        worker.link.close()
        has_served, worker.has_begun, worker.is_silent = worker.has_begun, False, False
        self._left(worker)
        worker.process = worker.link = None
        if not has_served and not self._stopping.is_set():
            self._log.error("worker_never_served", worker=worker.number, status=status)
            if worker.num_started == 1 and status >= 0:
                self.exit_status = status or os.EX_SOFTWARE
        return status

    async def _watch(self, worker: Worker, process: Process, link: Link) -> None:
        """Kill the process when it stops answering, or reading."""
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not worker.has_begun:
                answered_at = loop.time()
                continue
            try:
                await link.ask("alive", None, type(None), ANSWER_SECONDS)
            except GatewayError:
                worker.is_silent = True
            else:
                worker.is_silent, answered_at = False, loop.time()
            seconds = loop.time() - answered_at
            if seconds > SILENT_SECONDS or link.num_unread > MAX_UNREAD_BYTES:
                self._log.error("worker_silent_killed", worker=worker.number, seconds=seconds)
                with suppress(ProcessLookupError):
                    process.kill()
                return
