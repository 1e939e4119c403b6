"""Servers of tests are forked from a process that has imported them already: their source.

A server on a real model takes five seconds of CPU time to import torch and transformers, and a
gateway takes one. Hundreds are started here. What a child does from then on is what
`python -m engine` and `python -m gateway` do; tests/scripts start those commands themselves.

A process that runs tests has one source of its own. The processes that tests/zygote.py forks come
with one; any other process starts one.

Whoever is forked dies with whom it was forked from, so that a run that is killed leaves nothing.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkProcess
from typing import IO, Any, NoReturn

from scripts.stack import ROOT

Output = IO[bytes] | int | None

# What imports most is named first; the extras may be missing, and then are not imported. The last
# are what servers import when they start: 0.1 s of CPU time, 0.15 s with the demo model's class.
PRELOADED = (
    "tests.unneeded",
    "engine.backends.native",
    "engine.__main__",
    "gateway.__main__",
    "gateway.cli.serve",
    "transformers.models.llama.modeling_llama",
    "litestar.plugins.pydantic",
    "anyio._backends._asyncio",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
PROGRAMS = ("engine", "gateway")
# Libraries read other names when they are imported: a server that differs in one starts anew.
# OpenTelemetry reads its last ones when it makes exporters and resources.
OWN_NAMES = (
    *("ENGINE_", "HOLDFAST_", "GATEWAY_"),
    *("OTEL_BSP_", "OTEL_EXPORTER_OTLP_", "OTEL_RESOURCE_ATTRIBUTES"),
)
# A request is one packet. A process's environment is most of it.
PACKET_BYTES = 1 << 20
CAN_FORK = hasattr(os, "pidfd_open")  # Linux
_PR_SET_PDEATHSIG = 1
END_SECONDS = 300.0


class Source:
    """The process that servers are forked from, as the process that runs tests sees it.

    The two have the ends of one socket. The source ends when the other end is closed.
    """

    def __init__(self, ours: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = ours
        self._process = process
        self._mutex = threading.Lock()

    @classmethod
    def forked(cls, *unneeded: int) -> "Source":
        """Fork it from this process, which has imported what servers need.

        The source closes the descriptors that it does not need.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            die_with(parent)
            ours.close()
            for descriptor in unneeded:
                os.close(descriptor)
            serve(theirs)
        theirs.close()
        return cls(ours)

    @classmethod
    def started(cls) -> "Source":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
            process = subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()])
        return cls(ours, process)

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def fork(
        self, module: str, words: Sequence[str], env: Mapping[str, str], outputs: tuple[int, int]
    ) -> tuple[int, int]:
        """The id of a new `python -m MODULE WORDS`, and a descriptor that polls as its end.

        `outputs` become its descriptors 1 and 2.
        """
        with self._mutex:  # the id stays the process's until the source is asked again
            pid = int(self._ask((module, tuple(words), dict(env)), outputs))
            return pid, os.pidfd_open(pid)

    def status(self, pid: int) -> int:
        """The exit status of a process that it forked and that has ended."""
        with self._mutex:
            return int(self._ask(pid, ()))

    def end(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait(END_SECONDS)

    def _ask(self, question: object, descriptors: Sequence[int]) -> Any:
        socket.send_fds(self._socket, [pickle.dumps(question)], descriptors)
        answer = self._socket.recv(PACKET_BYTES)
        if not answer:
            raise ConnectionError("the process that servers are forked from has ended")
        return pickle.loads(answer)


def serve(theirs: socket.socket) -> NoReturn:
    """In the source: fork, and tell how processes ended, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its end is that of who asks
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    started: dict[int, ForkProcess] = {}
    while True:
        packet, descriptors, _, _ = socket.recv_fds(theirs, PACKET_BYTES, 2)
        if not packet:
            os._exit(0)
        question = pickle.loads(packet)
        if isinstance(question, int):
            process = started.pop(question)
            process.join()
            answer = process.exitcode
        else:
            arguments = (os.getpid(), theirs, *question, descriptors)
            process = multiprocessing.get_context("fork").Process(target=child, args=arguments)
            process.start()
            answer = process.pid
            assert answer is not None
            started[answer] = process
        for descriptor in descriptors:
            os.close(descriptor)
        theirs.send(pickle.dumps(answer))


def child(
    parent: int,
    theirs: socket.socket,
    module: str,
    words: Sequence[str],
    env: Mapping[str, str],
    outputs: Sequence[int],
) -> None:
    """In the child: be `python -m MODULE WORDS`."""
    die_with(parent)
    theirs.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what is imported stays: the collector need not look through it
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [module, *words]
    sys.modules.pop(f"{module}.__main__", None)  # runpy warns of a module that runs twice
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends: that of `parent`."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


@cache
def _sources() -> list[Source]:
    """The source of this process, once there is one."""
    return []


def use(source: Source) -> None:
    _sources()[:] = [source]


def source() -> Source:
    if not _sources():
        use(Source.started())
    return _sources()[0]


def end() -> None:
    """End a source that was started for this session. A forked one ends with this process."""
    if _sources() and _sources()[0].is_started:
        _sources().pop().end()


class ForkingPopen(subprocess.Popen[bytes]):
    """`subprocess.Popen`, whose process is forked where the command is one of `PROGRAMS`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Output = None,
        stderr: Output = None,
        **more: Any,
    ) -> None:
        self._end: int | None = None
        if not can_be_forked(args, env, (stdout, stderr), more):
            super().__init__(args, env=env, stdout=stdout, stderr=stderr, **more)
            return
        self._child_created = False  # for Popen.__del__: there is nothing to reap
        with open(os.devnull, "wb") as null:
            out = descriptor_of(stdout, 1, null)
            err = out if stderr == subprocess.STDOUT else descriptor_of(stderr, 2, null)
            self.pid, self._end = source().fork(args[2], args[3:], env, (out, err))
        weakref.finalize(self, os.close, self._end)
        self._reaping = threading.Lock()
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None

    @property
    def is_forked(self) -> bool:
        return self._end is not None

    def poll(self) -> int | None:
        return super().poll() if self._end is None else self._status_within(self._end, 0)

    def wait(self, timeout: float | None = None) -> int:
        if self._end is None:
            return super().wait(timeout)
        if (status := self._status_within(self._end, timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _status_within(self, end: int, seconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            ended = poll.poll(None if seconds is None else seconds * 1000)
            with self._reaping:
                if ended and self.returncode is None:
                    self.returncode = source().status(self.pid)
        return self.returncode


def can_be_forked(
    args: Sequence[str],
    env: Mapping[str, str],
    outputs: tuple[Output, Output],
    more: Mapping[str, Any],
) -> bool:
    """Whether a process that runs already can become what was asked for."""
    if list(args[:2]) != [sys.executable, "-m"] or args[2] not in PROGRAMS:
        return False
    if not CAN_FORK or subprocess.PIPE in outputs:
        return False
    differing = {name for name, _ in set(env.items()) ^ set(first_environment().items())}
    return more.get("preexec_fn") is None and all(
        name.startswith(OWN_NAMES) or name == "PYTEST_CURRENT_TEST" for name in differing
    )


@cache
def first_environment() -> dict[str, str]:
    """The environment when the session began: the process to be forked has imported with it."""
    return dict(os.environ)


def descriptor_of(output: Output, ours: int, null: IO[bytes]) -> int:
    """Where a child is to write. `ours` is the descriptor of this process that None stands for."""
    if output is None:
        return ours
    if output == subprocess.DEVNULL:
        return null.fileno()
    return output if isinstance(output, int) else output.fileno()


if __name__ == "__main__":
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
