"""Servers of tests are forked from a process that has imported them already.

A server on a real model takes five seconds of CPU time to import torch and transformers, and a
gateway takes one. Hundreds are started here. What a child does from then on is what
`python -m engine` and `python -m gateway` do; tests/scripts start those commands themselves.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

from scripts.stack import ROOT

Output = IO[bytes] | int | None

# What imports most is named first; the extras may be missing, and then are not imported.
PRELOADED = (
    "tests.unneeded",
    "engine.backends.native",
    "engine.__main__",
    "gateway.__main__",
    "gateway.cli.serve",
    "tests.forked",
)
PROGRAMS = ("engine", "gateway")
# Libraries read other names when they are imported: a server that differs in one starts anew.
OWN_NAMES = ("ENGINE_", "HOLDFAST_", "GATEWAY_")


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
        self._forked = None
        if not can_be_forked(args, env, more):
            super().__init__(args, env=env, stdout=stdout, stderr=stderr, **more)
            return
        self._child_created = False  # for Popen.__del__: there is nothing to reap
        self._forked = context().Process(
            target=run_program,
            args=(args[2], args[3:], dict(env), path_of(stdout, 1), path_of(stderr, 2)),
        )
        self._forked.start()
        assert self._forked.pid is not None
        self.args, self.pid, self.returncode = args, self._forked.pid, None

    @property
    def is_forked(self) -> bool:
        return self._forked is not None

    def poll(self) -> int | None:
        if self._forked is None:
            return super().poll()
        self.returncode = self._forked.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._forked is None:
            return super().wait(timeout)
        self._forked.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status


def can_be_forked(args: Sequence[str], env: Mapping[str, str], more: Mapping[str, Any]) -> bool:
    """Whether a process that runs already can become what was asked for."""
    if list(args[:2]) != [sys.executable, "-m"] or args[2] not in PROGRAMS:
        return False
    differing = {name for name, _ in set(env.items()) ^ set(first_environment().items())}
    if not Path("/proc/self/fd").exists():
        return False
    return more.get("preexec_fn") is None and all(
        name.startswith(OWN_NAMES) or name == "PYTEST_CURRENT_TEST" for name in differing
    )


@cache
def first_environment() -> dict[str, str]:
    """The environment when the session began: the process to be forked has imported with it."""
    return dict(os.environ)


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(PRELOADED))
    return made


def path_of(output: Output, ours: int) -> str | None:
    """Where a child writes to, None for where its own standard output goes.

    `ours` is the descriptor of this process that is meant by None. The child inherits those of the
    process that it is forked from.
    """
    if output == subprocess.STDOUT:
        return None
    if output == subprocess.DEVNULL:
        return os.devnull
    if output is None or isinstance(output, int):
        return f"/proc/{os.getpid()}/fd/{output or ours}"
    return str(output.name)


def run_program(
    module: str, words: list[str], env: dict[str, str], output: str | None, errors: str | None
) -> None:
    """In the child: be `python -m MODULE WORDS`."""
    gc.freeze()  # what is imported stays: the collector need not look through it
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, output), (2, errors)):
        descriptor = os.dup(1) if path is None else os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [module, *words]
    sys.modules.pop(f"{module}.__main__", None)  # runpy warns of a module that runs twice
    runpy.run_module(module, run_name="__main__", alter_sys=True)
