"""Whole transactions on an SQLite file, in a thread of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import Connection, Engine

from gateway.ledger.patience import PatientTimer

Work = Callable[[Connection], None]


@dataclass(slots=True)
class _Call:
    """`is_late`: nobody waits for it any more."""

    work: Work
    is_late: bool = False


class WritingThread:
    """Runs one transaction at a time. `make` makes the engine when the first one comes."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def commit(self, work: Work, seconds: float) -> None:
        """Run `work` in a transaction, and commit it.

        Raise what the work raises, and TimeoutError after `seconds` in which this process ran. Then
        the transaction is rolled back, unless its commit has begun.
        """
        loop = asyncio.get_running_loop()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        call, is_done = _Call(work), False
        try:
            async with asyncio.timeout(None) as scope:
                timer = PatientTimer(seconds, lambda: scope.reschedule(loop.time()))
                try:
                    await loop.run_in_executor(self._thread, self._run, call)
                    is_done = True
                finally:
                    timer.cancel()
        finally:
            call.is_late = not is_done

    def _run(self, call: _Call) -> None:
        """Runs in the thread. A connection that was not left in order is thrown away."""
        if call.is_late:
            return
        self._engine = self._engine or self._make()
        with self._engine.connect() as connection:
            is_committed = False
            try:
                call.work(connection)
                if not call.is_late:
                    connection.commit()
                    is_committed = True
            finally:
                if not is_committed:
                    connection.invalidate()

    async def close(self) -> None:
        """Wait for the transaction that runs, and close the file."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
        if self._engine is not None:
            self._engine.dispose()
