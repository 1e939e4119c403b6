"""Servers of tests are forked from a process that has imported them: multiprocessing's forkserver.

A server on a real model takes five seconds of CPU time to import torch and transformers, and
hundreds are started here. What a child does is what `python -m engine` and `python -m gateway` do;
tests/scripts start those commands themselves.
"""

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import IO, Any
from unittest.mock import patch

from scripts.stack import ROOT

PROGRAMS = ("engine", "gateway")
# Libraries read other names when they are imported: a server that differs in one starts anew.
OWN_NAMES = ("ENGINE_", "HOLDFAST_", "GATEWAY_", "OTEL_BSP_", "OTEL_EXPORTER_OTLP_",
             "OTEL_RESOURCE_ATTRIBUTES", "PYTEST_CURRENT_TEST")  # fmt: skip
# Torch computes in as many threads as this said when it was imported.
THREADS = "OMP_NUM_THREADS"
ONE = "1"
Output = IO[bytes] | int | None
_PR_SET_PDEATHSIG = 1


@cache
def _context() -> Any:
    """Of a forkserver that has begun, with one thread for torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with patch.dict(os.environ, {THREADS: ONE}):
        multiprocessing.forkserver.ensure_running()
    return context


@cache
def first_environment() -> dict[str, str]:
    """The environment when the session began, with which the forkserver imports."""
    return dict(os.environ)


class ForkedServer(subprocess.Popen[bytes]):
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
        self._process: Any = None
        changed = {name for name, _ in set(env.items()) ^ set(first_environment().items())}
        changed.discard(THREADS)
        is_ours = list(args[:2]) == [sys.executable, "-m"] and args[2] in PROGRAMS
        is_ours = is_ours and env.get(THREADS, ONE) == ONE
        is_plain = more.get("preexec_fn") is None and subprocess.PIPE not in (stdout, stderr)
        if not (is_ours and is_plain and all(name.startswith(OWN_NAMES) for name in changed)):
            super().__init__(args, env=env, stdout=stdout, stderr=stderr, **more)
            return
        self._child_created = False  # for Popen.__del__: there is nothing to reap
        self._mutex = threading.Lock()
        self.args = args
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        out = _path_of(stdout, 1)
        err = out if stderr == subprocess.STDOUT else _path_of(stderr, 2)
        arguments = (args[2], tuple(args[3:]), dict(env), (out, err))
        self._process = _context().Process(target=_be, args=arguments)
        # A child would run this process's main module anew. Streamlit's AppTest leaves the
        # dashboard there, which takes seconds to import.
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main_module
        self.pid = self._process.pid

    def poll(self) -> int | None:
        if self._process is None:
            return super().poll()
        with self._mutex:
            if self.returncode is None:
                self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._process is None:
            return super().wait(timeout)
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status


def _path_of(output: Output, ours: int) -> str:
    """Where the child opens what it is to write to."""
    if output == subprocess.DEVNULL:
        return os.devnull
    number = ours if output is None else output if isinstance(output, int) else output.fileno()
    ours_now = f"/proc/{os.getpid()}/fd/{number}"
    path = os.path.realpath(ours_now)
    # pytest captures in files without a name, which can be opened by their descriptor alone.
    return path if os.path.exists(path) else ours_now


def _be(module: str, words: Sequence[str], env: Mapping[str, str], outputs: Sequence[str]) -> None:
    """Be `python -m MODULE WORDS`. This process dies with the forkserver, which dies with ours."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(outputs, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [module, *words]
    if module == "engine":
        from tests.forked_workers import fork_workers

        fork_workers()
    sys.modules.pop(f"{module}.__main__", None)  # runpy warns of a module that runs twice
    runpy.run_module(module, run_name="__main__", alter_sys=True)
