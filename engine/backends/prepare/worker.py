"""A worker process: `python -m engine.backends.prepare.worker`, messages on its standard pipes.

It prepares one request at a time, so that none holds a lock that the engine needs. It ends with its
input.
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
"""The engine ends a late worker. A worker whose engine is gone ends itself so many seconds
later."""


@dataclass(frozen=True, slots=True)
class CompileLimit:
    """Ends this process by SIGPROF where a grammar takes more processor time than it may.

    The library compiles in one call, which neither an exception nor a thread can end. The engine,
    which is asked first, reads the signal from the process's status and remembers the grammar. The
    time on the wall is the engine's matter: where others take the processor it says nothing.
    """

    source: BinaryIO
    target: BinaryIO
    seconds: float
    wall_seconds: float

    @contextmanager
    def compiling(self, grammar: Grammar) -> Iterator[None]:
        """Raise SchemaTooCostly where the engine knows that the grammar takes too much, and
        PostponedError where it is to be compiled later."""
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
    # Whatever prints must not get between the answers.
    os.dup2(2, 1)
    # Signals of a terminal are the engine's: a worker ends with its input. It stays in the engine's
    # session: Linux shares a processor between sessions first, and only then by niceness. uvloop
    # can't start a process in a group of its own.
    os.setpgid(0, 0)
    start = _read(source)
    if not isinstance(start, Start):
        return 1
    limit = CompileLimit(source, target, start.grammar_seconds, start.compile_seconds)
    preparer = Preparer(
        new_renderer(start.spec), start.description, limit.compiling, start.grammar_seconds
    )
    # What stays until the end is not looked through at every full collection (about 30 ms).
    gc.collect()
    gc.freeze()
    statistics = Path("/proc/self/statm")
    heap = Heap(statistics)
    if statistics.exists():  # elsewhere than on Linux bytes and seconds still bound it
        # So many bytes beyond what is allocated now: what needs more ends this process alone.
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
    """This process's memory. A grammar takes some hundred MB, which are free after it."""

    def __init__(self, statistics: Path) -> None:
        self._statistics = statistics
        self._pages = self._resident()

    def settle(self) -> None:
        """Give back what is free if this process has grown. The answer has been sent."""
        if self._resident() - self._pages > _SPARE_BYTES // resource.getpagesize():
            trim_heap()
            self._pages = self._resident()

    def _resident(self) -> int:
        """The resident pages. 0: the system does not tell."""
        with suppress(OSError):
            return int(self._statistics.read_text("ascii").split()[1])
        return 0


def new_renderer(spec: WorkerSpec) -> Renderer:
    """Each kind's modules are imported here, because importing is half of a worker's start."""
    if spec.kind == "synthetic":
        from engine.backends.synthetic_renderer import SyntheticRenderer

        return SyntheticRenderer()
    from engine.backends.prepare.renderers import chat_renderer

    return chat_renderer(spec)


def bound_stack() -> None:
    """A schema whose grammar needs more stack ends this process alone.

    The engine compiles it behind this, on a thread with an eighth more. Of the usual 8 MiB the
    deepest schema that is not refused takes 6.
    """
    if sys.platform == "linux":
        # The engine's own limit, which its threads have too.
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        of_thread = _UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
        resource.setrlimit(resource.RLIMIT_STACK, (of_thread // 8 * 7, hard))


def _read(source: BinaryIO) -> ToWorker | None:
    """The next message, None at the end."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    body = source.read(length)
    return _message.decode(body) if body and len(body) == length else None


def _write(target: BinaryIO, message: FromWorker) -> None:
    body = msgspec.msgpack.encode(message)
    target.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    target.flush()


if __name__ == "__main__":
    sys.exit(main())
