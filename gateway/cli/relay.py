"""Passes on to each worker what the others told of engines, every few milliseconds."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from gateway.cli.processes import Worker

_SECONDS = 0.004


class Relay:
    """`workers` gives all of them; those that serve are told."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._told: list[tuple[int, msgspec.Raw]] = []

    def pass_on(self, worker: int, news: msgspec.Raw) -> None:
        """Tell the others soon what one worker told."""
        if not self._told:
            asyncio.get_running_loop().call_later(_SECONDS, self.flush)
        self._told.append((worker, news))

    def tell(self, worker: Worker, news: Sequence[object]) -> None:
        if news and worker.link is not None:
            worker.link.tell("heard", news)

    def flush(self) -> None:
        """Pass on now what was told so far."""
        told, self._told = self._told, []
        for worker in self._workers():
            if worker.has_begun:
                number = worker.number
                self.tell(worker, [news for teller, news in told if teller != number])
