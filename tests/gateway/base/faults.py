"""A supervisor whose loops can be killed: the seam through which tests put faults into loops."""

import asyncio
from collections.abc import Callable
from typing import Any

from engine.supervisor import CountEnds, Loop, Supervisor


class InjectedError(Exception):
    """What a killed loop ends with; no loop expects it."""


class FaultySupervisor(Supervisor):
    """Runs every loop as it is, until `kill` is called for it."""

    def __init__(self, monotonic: Callable[[], float], count_ends: CountEnds) -> None:
        super().__init__(monotonic, count_ends)
        self.names: list[str] = []
        self._event_loop = asyncio.get_running_loop()
        self._kills: dict[str, asyncio.Event] = {}
        self._broken: set[str] = set()

    def start(self, name: str, loop: Loop, kind: str | None = None) -> None:
        self.names.append(name)
        killed = self._kills[name] = asyncio.Event()

        async def run(stopping: asyncio.Event) -> None:
            if name in self._broken:
                raise InjectedError
            running = asyncio.ensure_future(loop(stopping))
            dying = asyncio.ensure_future(killed.wait())
            both: set[asyncio.Future[Any]] = {running, dying}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                dying.cancel()
                if not running.done():
                    running.cancel()
            if killed.is_set():
                killed.clear()
                await asyncio.gather(running, return_exceptions=True)
                raise InjectedError
            await running

        super().start(name, run, kind)

    def kill(self, name: str, *, for_good: bool = False) -> None:
        """From any thread: end the loop now; `for_good` each time that it is started again."""
        if for_good:
            self._broken.add(name)
        self._event_loop.call_soon_threadsafe(self._kills[name].set)

    def heal(self) -> None:
        self._broken.clear()
