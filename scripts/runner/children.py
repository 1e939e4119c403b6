"""Child processes, each in a process group of its own, with its output in a log file."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from scripts.runner.plan import HOST, Program

STOP_SECONDS = 8.0
POLL_SECONDS = 0.2
PROBE_SECONDS = 2.0
TAIL_LINES = 15
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec, where the function below runs, nothing may be.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel stop this process should the supervisor be killed."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a readiness probe answered; `ready` False with an empty stage: nothing answers yet."""

    ready: bool
    stage: str = ""
    progress: float | None = None

    def __str__(self) -> str:
        if self.progress is None:
            return self.stage
        return f"{self.stage} {self.progress:.0%}"


class Child:
    """One started program."""

    def __init__(self, program: Program, logs: Path, root: Path) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                program.command,
                cwd=root,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | program.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def probe(self) -> Readiness:
        try:
            with urllib.request.urlopen(self.program.ready, timeout=PROBE_SECONDS):
                return Readiness(True)
        except urllib.error.HTTPError as refusal:
            return read_progress(refusal.read())
        except OSError:
            return Readiness(False)

    def tail(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group: a program may have started helpers."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """Ask, wait, then insist."""
        if self.exit_code is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"    {self.program.name} does not stop; killing it", flush=True)
        self.signal(signal.SIGKILL)
        self._process.wait()


def read_progress(body: bytes) -> Readiness:
    """Read the body of a 503: JSON with `stage` and `progress`, or anything else."""
    try:
        answer = json.loads(body)
    except ValueError:
        return Readiness(False, "starting")
    if not isinstance(answer, dict):
        return Readiness(False, "starting")
    progress = answer.get("progress")
    return Readiness(
        False,
        str(answer.get("stage", "starting")),
        float(progress) if isinstance(progress, int | float) else None,
    )


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


def wait_until_ready(child: Child, others: list[Child]) -> Child | None:
    """Wait for one child and print its progress; return any child that died meanwhile."""
    shown = ""
    started = time.monotonic()
    while True:
        dead = next((c for c in others if c.exit_code is not None), None)
        if dead is not None:
            return dead
        state = child.probe()
        if state.ready:
            waited = time.monotonic() - started
            print(f"    {child.program.name} is ready ({waited:.1f} s)", flush=True)
            return None
        if str(state) and str(state) != shown:
            shown = str(state)
            print(f"    {child.program.name}: {shown}", flush=True)
        time.sleep(POLL_SECONDS)
