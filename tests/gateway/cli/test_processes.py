"""Worker processes that end again and again, or stop answering: the parent's part, over real ones.

The workers here are small programs that begin as a gateway's do, and serve nothing.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable

import pytest

from gateway.cli import processes
from gateway.cli.processes import Processes, Worker
from tests.gateway.serving import WAIT_SECONDS

BEGINS = """
import asyncio, os, signal, socket, sys
from gateway.base.link import Link

async def main():
    here = socket.socket(fileno=int(sys.argv[4]))
    link = await Link.over(here, {"alive": lambda _: None})
    await link.ask("begun", [], type(None), 600)
    %s
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def run(then: str, is_over: Callable[[Processes], bool]) -> Processes:
    """Keep two workers that do `then` once they have begun, until `is_over`."""

    async def keep() -> Processes:
        with socket.socket() as listening:
            kept = Processes(
                2, listening, begins, lambda _: None, (sys.executable, "-c", BEGINS % then)
            )
            running = asyncio.create_task(kept.run())
            async with asyncio.timeout(WAIT_SECONDS):
                while not is_over(kept):
                    await asyncio.sleep(0.01)
            kept.signal(signal.SIGKILL)
            await running
            return kept

    return asyncio.run(keep())


def begins(worker: Worker) -> dict[str, Callable[[bytes], None]]:
    def begun(_: bytes) -> None:
        worker.has_begun = True

    return {"begun": begun}


def test_a_worker_that_ends_again_and_again_is_started_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: dict[float, int] = {}
    pause = processes.pause

    async def noted(stopping: asyncio.Event, seconds: float) -> None:
        if seconds != processes._LAST_WORDS_SECONDS:
            pauses[seconds] = pauses.get(seconds, 0) + 1
            await pause(stopping, 0.0)
        else:
            await pause(stopping, seconds)

    monkeypatch.setattr(processes, "pause", noted)
    monkeypatch.setattr(processes, "STEADY_SECONDS", float("inf"))
    monkeypatch.setattr(processes, "MAX_PAUSE_SECONDS", 0.35)
    kept = run("return", lambda kept: min(each.num_ends for each in kept.workers) >= 4)
    assert sorted(pauses) == [0.1, 0.2, 0.35]
    assert pauses[0.1] == pauses[0.2] == 2 and pauses[0.35] >= 4
    assert kept.exit_status is None, "they had served"


def test_a_worker_that_answers_no_more_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOOK_SECONDS", "ANSWER_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(processes, name, 0.2)
    stops = "int(sys.argv[1]) == 1 and os.kill(os.getpid(), signal.SIGSTOP)"
    kept = run(stops, lambda kept: kept.workers[0].num_started >= 3)
    assert kept.workers[0].num_started >= 3


def test_a_worker_that_answers_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.01)
    looked = 0

    def is_over(kept: Processes) -> bool:
        nonlocal looked
        looked += all(each.has_begun and not each.is_silent for each in kept.workers)
        return looked > 20

    kept = run("pass", is_over)
    assert [each.num_started for each in kept.workers] == [1, 1]


def test_a_worker_that_never_served_ends_all() -> None:
    async def keep() -> int | None:
        with socket.socket() as listening:
            command = (sys.executable, "-c", "raise SystemExit(3)")
            kept = Processes(2, listening, begins, lambda _: None, command)
            async with asyncio.timeout(WAIT_SECONDS):
                await kept.run()
            return kept.exit_status

    assert asyncio.run(keep()) == 3
