"""`scripts/run` and `scripts/demo` as processes, for their tests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.runner.options import DASHBOARD_ABOVE, ENGINES_ABOVE, SAMPLE_ENGINES
from scripts.setup import reserved_ports
from scripts.stack import ROOT

# Starts take seconds on an idle machine, minutes on a busy one.
PATIENCE_SECONDS = 300.0
MARK = "RUN_TEST_MARK"
USERS_OWN = ("HOLDFAST_API_KEY", "HOLDFAST_ADMIN_KEY", "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE")


# Ports that a `scripts/run` of these tests listens on, above its `--port`.
LISTENED = (0, 1, *range(ENGINES_ABOVE, ENGINES_ABOVE + SAMPLE_ENGINES), DASHBOARD_ABOVE)


def free_base() -> int:
    """A `--port` whose ports nobody gets while this process runs."""
    return reserved_ports.of_this_process().take(LISTENED)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in USERS_OWN}
    return kept | {"RUN_FROM": "/", "PYTHONUNBUFFERED": "1"} | dict(changes)


def ended(*arguments: str | Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end."""
    return subprocess.run(
        [sys.executable, "-m", "scripts.runner", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
        env=environment(changes),
    )


def only_line(process: "subprocess.CompletedProcess[str]", name: str = "run") -> str:
    """The one line of an error; nothing else may be said."""
    assert process.returncode in (1, 2), process.stderr + process.stdout
    assert "Traceback" not in process.stdout + process.stderr
    lines = process.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{name}: "), process.stderr
    return lines[0]


@dataclass
class Run:
    """A `scripts/run` that goes on. `base` is its `--port`, `log` what it prints."""

    process: "subprocess.Popen[bytes]"
    base: int
    data: Path
    log: Path
    mark: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.base}"

    @property
    def engine_port(self) -> int:
        return self.base + ENGINES_ABOVE

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8")

    def wait_said(self, pattern: str, times: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(re.findall(pattern, self.said)) < times:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def pid_of(self, module: str) -> int:
        """The process of one of its programs that was started last."""
        ours = psutil.Process(self.process.pid).children()
        (pid,) = [process.pid for process in ours if f"-m {module}" in " ".join(process.cmdline())]
        return pid

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signal it, wait for it and for all that it started; return its status."""
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_SECONDS)
        wait_gone(self.mark)
        return status


def marked(mark: str) -> dict[int, psutil.Process]:
    """All processes with this mark in their environment."""
    processes = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                processes[process.pid] = process
    return processes


def wait_gone(mark: str) -> None:
    """Processes that were killed with their parent take a moment to be gone."""
    deadline = time.monotonic() + 300
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@contextmanager
def started(
    folder: Path, *arguments: str, base: int | None = None, **changes: str
) -> Iterator[Run]:
    """Start it with a data directory in `folder`; whatever happens, nothing of it is left."""
    base = base or free_base()
    data = folder / "data"
    log = folder / "said"
    folder.mkdir(parents=True, exist_ok=True)
    mark = f"{folder}-{base}"
    command = ["scripts/run", "--port", str(base), "--data", str(data)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=environment({MARK: mark, **changes}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Run(process, base, data, log, mark)
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            with suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
