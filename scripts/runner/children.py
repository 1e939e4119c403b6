"""Child processes, each in a process group of its own, with its output in a log file."""

import ctypes
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from scripts.runner.plan import MARGIN_SECONDS, Program
from scripts.stack import StartError, signal_group, start, wait_until_ready

MOST_REASON_CHARS = 300
PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec, where the function below runs, nothing may be.
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel stop this process should the supervisor be killed."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One started program. Its log goes on where an earlier life of it ended, if `again`."""

    def __init__(self, program: Program, logs: Path, *, again: bool = False) -> None:
        self.program = program
        self.log = logs / f"{program.name}.log"
        self._log_begins = self.log.stat().st_size if again and self.log.exists() else 0
        self.process = start(
            program.command,
            {"PYTHONUNBUFFERED": "1"} | program.environment,
            self.log,
            before_exec=die_with_parent,
            append=again,
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def epitaph(self) -> str:
        """How it ended, and why by its own words."""
        how = ended_how(self.process.returncode)
        said = last_words(self.log, self._log_begins)
        return f"{how}: {said}" if said else how

    def check(self) -> None:
        """Raises StartError where it does not run any more."""
        if self.has_ended:
            raise StartError(f"the {self.program.name} {self.epitaph()} (its log: {self.log})")

    def wait(self, others: list["Child"], say: Callable[[str], None]) -> None:
        """Wait until it is ready and tell its progress. Raises StartError where a child ends."""
        began, name = time.monotonic(), self.program.name
        try:
            wait_until_ready(
                self.program.url,
                self.process,
                self.program.ready,
                self.log,
                others=[child.process for child in others],
                say=lambda stage: say(f"    {name}: {stage}"),
            )
        except StartError:
            for child in (self, *others):
                child.check()
            raise
        say(f"    {name} is ready ({time.monotonic() - began:.1f} s)")

    def ask_to_stop(self) -> None:
        signal_group(self.process, signal.SIGTERM)

    def wait_stopped(self, is_urgent: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Wait for its own grace and a margin, then kill what is left of its group.

        Where it takes long, say what for; where it gets urgent, kill at once.
        """
        limit = self.program.grace_seconds + MARGIN_SECONDS
        began, is_told = time.monotonic(), False
        while self.process.poll() is None and not is_urgent():
            spent = time.monotonic() - began
            if spent > limit:
                say(f"    the {self.program.name} did not stop in {limit:.0f} s and was killed")
                break
            if spent > 2 and not is_told:
                is_told = True
                say(
                    f"    the {self.program.name} lets its running requests end, for "
                    f"{self.program.grace_seconds:.0f} s at most; Ctrl-C again cuts them off"
                )
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def ended_how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed ({name}{', as when memory runs out' if name == 'SIGKILL' else ''})"


def last_words(log: Path, begins: int = 0) -> str:
    """One line that says why a program ended, from its log behind `begins`; "" where none does.

    It is the error of the last JSON line that has one, all lines of a list of wrong settings, or
    the last line.
    """
    if not log.exists():
        return ""
    text = log.read_bytes()[begins:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("error"), str):
            return shortened(told["error"])
    settings = [line for line in lines if re.match(r"[A-Z]+_[A-Z_]+: ", line)]
    # Behind a JSON line that tells no error, such as "ready", nothing was said.
    plain = [line for line in lines[-1:] if not line.startswith("{")]
    return shortened("; ".join(settings or plain))


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_REASON_CHARS else line[:MOST_REASON_CHARS] + " …"
