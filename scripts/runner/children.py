"""Child processes, each in a process group of its own, with its output in a log file."""

import ctypes
import signal
import socket
import time
from pathlib import Path

from scripts.runner.plan import Program
from scripts.stack import HOST, StartError, insist, start, tail, wait_until_ready

STOP_SECONDS = 8.0
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec, where the function below runs, nothing may be.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel stop this process should the supervisor be killed."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One started program."""

    def __init__(self, program: Program, logs: Path) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        self.process = start(
            program.command,
            {"PYTHONUNBUFFERED": "1"} | program.environment,
            self.log,
            before_exec=die_with_parent,
        )

    def check(self) -> None:
        """Raises StartError where it does not run any more."""
        if self.process.poll() is not None:
            raise StartError(
                f"the {self.program.name} exited with status {self.process.returncode}"
                f"{tail(self.log)}"
            )

    def wait(self, others: list["Child"]) -> None:
        """Wait until it is ready and print its progress. Raises StartError where a child ends."""
        began, name = time.monotonic(), self.program.name
        try:
            wait_until_ready(
                self.program.url,
                self.process,
                self.program.ready,
                self.log,
                others=[child.process for child in others],
                say=lambda stage: print(f"    {name}: {stage}", flush=True),
            )
        except StartError:
            for child in (self, *others):
                child.check()
            raise
        print(f"    {name} is ready ({time.monotonic() - began:.1f} s)", flush=True)

    def stop(self) -> None:
        """Ask, wait, then insist."""
        if not insist(self.process, STOP_SECONDS):
            print(f"    {self.program.name} did not stop and was killed", flush=True)


def busy_ports(programs: list[Program]) -> list[Program]:
    """Find the programs whose port somebody else listens on."""
    busy = []
    for program in programs:
        with socket.socket() as probe:
            # As servers do: a connection in TIME_WAIT from the last run is no reason to refuse.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, program.port))
            except OSError:
                busy.append(program)
    return busy
