"""The process that the processes that run tests are forked from.

Each of them would import torch, transformers, all packages and 400 files of tests, which takes 13
seconds of CPU time, and 24 in a new clone. The zygote collects the tests once. Its children find
all modules imported when they collect.

A child forks the source of its servers (tests/forked.py) before it does anything else. The zygote
ends with who started it, since that held its standard input, and all children die with the zygote.
"""

import contextlib
import gc
import multiprocessing
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NoReturn

import pytest

from scripts.stack import ROOT
from tests import forked

LAUNCHER = ROOT / "tests" / "launcher.py"
STOP_SECONDS = 60.0


class Zygote:
    """The zygote, as the process that shares out the tests sees it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are those of pytest."""
        self._folder = TemporaryDirectory(prefix="zygote-")
        address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(descriptor), *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
            )
        words = [sys.executable, "-S", "-E", str(LAUNCHER), address]
        self.python = shlex.join(words)
        """What execnet is to start in place of Python."""

    def stop(self) -> float:
        """Its own CPU seconds; 0 where it failed."""
        try:
            said, _ = self._process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, _ = self._process.communicate()
        self._folder.cleanup()
        return float(said or 0)


def main(descriptor: int, arguments: Sequence[str]) -> NoReturn:
    """In the zygote: fork a child for each connection until the standard input ends."""
    collect(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its end is that of who started it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how its children ended
    with socket.socket(fileno=descriptor) as listener:
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                os.write(1, b"%.2f" % time.process_time())
                os._exit(0)
            launcher, _ = listener.accept()
            with launcher:
                _, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
                given = (os.getpid(), listener, launcher, descriptors)
                multiprocessing.get_context("fork").Process(target=child, args=given).start()
            for one in descriptors:
                os.close(one)


def collect(arguments: Sequence[str]) -> None:
    """Import what the tests and the servers need. A child that lacks something imports it."""
    # Modules may keep the standard streams that they see: these must be the real ones.
    with what_is_said_is_dropped():
        pytest.main([*arguments, "-n0", "--collect-only", "-p", "no:cacheprovider", "-s"])
    for name in forked.PRELOADED:
        with contextlib.suppress(ImportError):
            import_module(name)
    # What UTF-8 can encode: 1.6 s for each process, where Hypothesis has nothing on disk yet.
    import_module("hypothesis.strategies").text().validate()
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def what_is_said_is_dropped() -> Iterator[None]:
    kept = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, one in enumerate(kept, start=1):
            os.dup2(one, number)
            os.close(one)
        os.close(null)


def child(
    parent: int, listener: socket.socket, launcher: socket.socket, descriptors: Sequence[int]
) -> None:
    """In a child: do what `python -u -c CODE` of execnet does. The launcher sees when it ends."""
    forked.die_with(parent)
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forked.use(forked.Source.forked(launcher.fileno(), *descriptors))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
        os.close(one)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.argv = ["-c"]
    sys.modules["__main__"] = program = ModuleType("__main__")
    launcher.send(b"!")
    exec(eval(sys.stdin.readline()), vars(program))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
