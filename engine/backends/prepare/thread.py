"""A worker that is a thread: for engines whose renderer exists in their own process only."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from engine.backends.prepare.prepared import GENERATE, Answer, Kind
from engine.backends.prepare.preparer import Preparer
from engine.errors import EngineError
from engine.text.rendered import KnownDays


class WorkerThread:
    """Nothing ends it: a request that takes long is waited for. Benchmarks and scripts use it."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._work: asyncio.Future[Answer] | None = None

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        prepare = self._preparer.generate if kind == GENERATE else self._preparer.count
        loop = asyncio.get_running_loop()
        self._work = loop.run_in_executor(self._thread, prepare, body, days)
        return await asyncio.shield(self._work)

    async def recover(self) -> None:
        if self._work is not None:
            with suppress(EngineError):
                await self._work

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
