"""A worker process: `python -m engine.backends.prepare.worker`, with messages on standard pipes.

It prepares one request at a time. Being a process, it holds no lock that the engine needs. It ends
when its input ends.
"""

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.backends.prepare.prepared import (
    LENGTH_BYTES,
    FromWorker,
    Grammar,
    Job,
    MayCompile,
    Ready,
    Start,
    ToWorker,
    WorkerSpec,
)
from engine.backends.prepare.preparer import PostponedError, Preparer
from engine.backends.renderer import Renderer
from engine.errors import SchemaTooCostly
from engine.heap import trim_heap

_message = msgspec.msgpack.Decoder[ToWorker](ToWorker)
_UNLIMITED_STACK = 2 * 2**20
"""A thread's stack where `ulimit -s` is unlimited."""
_SPARE_BYTES = 8 * 2**20
_SPARE_SECONDS = 5
"""The engine ends a late worker. If the engine is gone, the worker ends itself this many seconds
later."""


@dataclass(frozen=True, slots=True)
class CompileLimit:
    """Ends this process by SIGPROF if a grammar takes more processor time than it may.

    The library compiles in one call, which neither an exception nor a thread can end. The engine is
    asked before. It reads the signal from the process's exit status and remembers the grammar. It
    also bounds the wall time, which says nothing of a grammar while others take the processor.
    """

    source: BinaryIO
    target: BinaryIO
    seconds: float
    wall_seconds: float

    @contextmanager
    def compiling(self, grammar: Grammar) -> Iterator[None]:
        """Ask the engine, then bound the compilation in the context.

        Raise SchemaTooCostly if the engine knows that the grammar takes too much, and
        PostponedError if it is to be compiled later.
        """
        _write(self.target, grammar)
        answer = _read(self.source)
        if not isinstance(answer, MayCompile):
            raise SystemExit  # the engine is gone
        if answer.verdict == "costly":
            raise SchemaTooCostly(grammar.refusal)
        if answer.verdict == "later":
            raise PostponedError(grammar.digest)
        signal.alarm(int(self.wall_seconds) + _SPARE_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> int:
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    # Prints go to standard error, so that none gets between the answers.
    os.dup2(2, 1)
    # A group by itself keeps a terminal's signals away, because a worker ends with its input. The
    # session stays the engine's, because Linux shares a processor between sessions first and by
    # niceness only within one. uvloop can't start a process in another group.
    os.setpgid(0, 0)
    start = _read(source)
    if not isinstance(start, Start):
        return 1
    limit = CompileLimit(source, target, start.grammar_seconds, start.compile_seconds)
    preparer = Preparer(
        new_renderer(start.spec), start.description, limit.compiling, start.grammar_seconds
    )
    # Frozen objects are not looked through at each full collection, which would take about 30 ms.
    gc.collect()
    gc.freeze()
    statistics = Path("/proc/self/statm")
    heap = Heap(statistics)
    if statistics.exists():  # on other systems than Linux bytes and seconds still bound a request
        # A request that needs more memory than this ends this process alone.
        pages = int(statistics.read_text("ascii").split()[5])  # data and stack
        bound = pages * resource.getpagesize() + start.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    bound_stack()
    _write(target, Ready())
    while isinstance(job := _read(source), Job):
        signal.alarm(int(start.seconds) + _SPARE_SECONDS)
        _write(target, preparer.answer(job))
        signal.alarm(0)
        heap.settle()
    return 0


class Heap:
    """This process's memory. A grammar takes some hundred MB, which are free afterwards."""

    def __init__(self, statistics: Path) -> None:
        self._statistics = statistics
        self._pages = self._resident()

    def settle(self) -> None:
        """Give free memory back to the system if this process has grown. To be called after an
        answer."""
        if self._resident() - self._pages > _SPARE_BYTES // resource.getpagesize():
            trim_heap()
            self._pages = self._resident()

    def _resident(self) -> int:
        """The number of resident pages; 0: the system does not tell."""
        with suppress(OSError):
            return int(self._statistics.read_text("ascii").split()[1])
        return 0


def new_renderer(spec: WorkerSpec) -> Renderer:
    """The renderer of a kind. Only that kind's modules are imported, since imports are half of a
    worker's start."""
    if spec.kind == "synthetic":
        from engine.backends.synthetic_renderer import SyntheticRenderer

        return SyntheticRenderer()
    from engine.backends.prepare.renderers import chat_renderer

    return chat_renderer(spec)


def bound_stack() -> None:
    """Bound the stack, so that a schema whose grammar needs more ends this process alone.

    The engine compiles a grammar after its worker did, on a thread with an eighth more stack. The
    deepest schema that is not refused takes 6 of the usual 8 MiB.
    """
    if sys.platform == "linux":
        # The engine's own limit, which its threads have too.
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        of_thread = _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
        resource.setrlimit(resource.RLIMIT_STACK, (of_thread // 8 * 7, hard))


def _read(source: BinaryIO) -> ToWorker | None:
    """The next message; None at the end of the input."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    body = source.read(length)
    return _message.decode(body) if body and len(body) == length else None


def _write(target: BinaryIO, message: FromWorker) -> None:
    body = msgspec.msgpack.encode(message)
    target.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    target.flush()


if __name__ == "__main__":
    sys.exit(main())
