"""Keeps started programs running: one that ends is started again, unless it ends again and again.

The pause before a start doubles with each end in a row. A program that ends for the LIMIT-th time
without having run for STEADY_SECONDS in between ends all of them, with the reason.
"""

import time
from collections.abc import Callable
from pathlib import Path

from scripts.runner.children import Child
from scripts.stack import POLL_SECONDS, StartError, probe

FIRST_PAUSE_SECONDS = 1.0
STEADY_SECONDS = 60.0
LIMIT = 5

Say = Callable[[str], None]


class Restarts:
    """When one program is started again. Times are seconds of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._started = now
        self.num_ends = 0

    def note_start(self, now: float) -> None:
        self._started = now

    def note_end(self, now: float) -> float | None:
        """The pause in seconds; None where it ended too often."""
        self.num_ends = 1 if now - self._started >= STEADY_SECONDS else self.num_ends + 1
        if self.num_ends >= LIMIT:
            return None
        pause: float = FIRST_PAUSE_SECONDS * 2 ** (self.num_ends - 1)
        return pause


class Kept:
    """A program and its present life. `due` is when it is started again, if it does not run."""

    def __init__(self, child: Child, logs: Path, say: Say) -> None:
        self.child = child
        self._logs, self._say = logs, say
        self._restarts = Restarts(time.monotonic())
        self._due: float | None = None
        self._is_awaited = False

    def look(self) -> None:
        """See how it is, and do what is due. Raises StartError where it ended too often."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self._start(now)
        elif self.child.has_ended:
            self._take_end(now)
        elif self._is_awaited and probe(self.child.program.url + self.child.program.ready).ready:
            self._is_awaited = False
            self._say(f"    the {self.child.program.name} is ready again")

    def _take_end(self, now: float) -> None:
        program, pause = self.child.program, self._restarts.note_end(now)
        if pause is None:
            raise StartError(
                f"the {program.name} ended {LIMIT} times in a row; at last it "
                f"{self.child.epitaph()} (its log: {self.child.log})"
            )
        self._due = now + pause
        self._say(
            f"    the {program.name} {self.child.epitaph()}; started again in {pause:.0f} s"
            f"{program.loss}"
        )

    def _start(self, now: float) -> None:
        self.child.ask_to_stop()  # helpers of its last life may hold its port
        self.child = Child(self.child.program, self._logs, again=True)
        self._restarts.note_start(now)
        self._due, self._is_awaited = None, True


class Keeper:
    """All programs of one `scripts/run`, in the order in which they became ready."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._kept: list[Kept] = []

    @property
    def children(self) -> list[Child]:
        return [kept.child for kept in self._kept]

    def add(self, child: Child, logs: Path) -> None:
        self._kept.append(Kept(child, logs, self._say))

    def watch(self) -> None:
        """Return never: until a signal comes, or a program ends too often."""
        while True:
            for kept in self._kept:
                kept.look()
            time.sleep(POLL_SECONDS)

    def stop(self, is_urgent: Callable[[], bool]) -> None:
        """Stop in reverse: nobody loses what it still needs to finish its own work."""
        for child in reversed(self.children):
            child.ask_to_stop()
            child.wait_stopped(is_urgent, self._say)
