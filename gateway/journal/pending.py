"""A turn's record on its way to the disk, while something else goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.base.errors import JournalFull, JournalUnavailable
from gateway.journal.book import Refused

FAILURES = (OSError, Refused, ValueError)
"""Why a change of the journal fails. A wait that is too long is a TimeoutError."""


class PendingOpen:
    """The opening of one turn, which was handed over. Any number of tasks may wait for it."""

    __slots__ = ("_future", "_has_room")

    def __init__(self, future: asyncio.Future[Any], has_room: Callable[[], bool]) -> None:
        self._future = future
        self._has_room = has_room
        # Nobody may ask. The loop would log the exception then.
        future.add_done_callback(_retrieve)

    @property
    def is_decided(self) -> bool:
        return self._future.done()

    @property
    def has_failed(self) -> bool:
        """Whether the write failed, or took too long. Then it may be on disk all the same."""
        future = self._future
        return future.done() and (future.cancelled() or future.exception() is not None)

    async def wait(self) -> None:
        """Return when the record is on disk.

        Raise JournalUnavailable where it is not; JournalFull where its disk is full.
        """
        try:
            # One who is cancelled does not cancel it for the others.
            await asyncio.shield(self._future)
        except FAILURES:
            # Full disks have more than one error.
            raise (JournalUnavailable if self._has_room() else JournalFull) from None


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
