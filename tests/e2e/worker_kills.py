"""`kill -9` of a gateway with several workers: of one worker, and of the parent, by turns."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from gateway.http.machine import journal_of
from gateway.journal.store import OPEN, rows_in
from scripts.stack import wait_until_ready
from tests.e2e.kills import BOUND_SECONDS, Killed


class KilledWorkers(Killed):
    """Each second kill is the parent's, with which all workers end; the others are a worker's."""

    def __init__(self, data: Path, settings: Mapping[str, str], url: str) -> None:
        self._num_workers = int(settings["HOLDFAST_WORKERS"])
        self._journals = {n: journal_of(data, n) for n in range(1, self._num_workers + 1)}
        self._num_kills = 0
        super().__init__(data, settings, url)
        self._pids = self._running()

    def kill(self) -> set[str]:
        """Return the turns that those left open that were killed."""
        self._num_kills += 1
        if self._num_kills % 2 == 0:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            _until(lambda: not any(map(_lives, self._pids.values())))
            return self.open_turns()
        number = 1 + self._num_kills // 2 % self._num_workers
        os.kill(self._pids[number], signal.SIGKILL)
        return _open_in(self._journals[number])

    def start(self) -> None:
        """Start what was killed; a worker is started again by its parent."""
        if self.process.poll() is not None:
            super().start()
        before, self._pids = self._pids, self._running(self._pids)
        assert before != self._pids
        wait_until_ready(self.url, self.process)

    def open_turns(self) -> set[str]:
        return {turn for path in self._journals.values() for turn in _open_in(path)}

    def _running(self, before: Mapping[int, int] | None = None) -> dict[int, int]:
        """The pids of all workers by number, once they run and not all are as before."""
        found: dict[int, int] = {}

        def run() -> bool:
            try:
                reply = httpx.get(f"{self.url}/readyz", timeout=BOUND_SECONDS, trust_env=False)
            except httpx.TransportError:
                return False  # it was in the queue of the worker that was killed
            answer = reply.json()
            states = [one for one in answer.get("workers", []) if one["is_running"]]
            found.update({one["worker"]: one["pid"] for one in states})
            return len(states) == self._num_workers and found != before

        _until(run)
        return found


def _open_in(journal: Path) -> set[str]:
    return {row.id for row in rows_in(journal) if row.state == OPEN}


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not happen within {BOUND_SECONDS} s")
        time.sleep(0.05)
