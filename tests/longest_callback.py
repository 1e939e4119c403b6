"""The longest callback of an event loop, in CPU time of the loop's thread.

What a busy machine adds to the clock does not count. Loops of uvloop are not seen, so a test runs
the server that it is about on asyncio's own loop.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LONGEST_SECONDS = 0.05
"""No callback may take more: others wait for it."""


class Longest:
    """The longest callback since `reset`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.name = ""

    def reset(self) -> None:
        self.seconds = 0.0
        self.name = ""

    def see(self, handle: asyncio.Handle, seconds: float) -> None:
        if seconds > self.seconds:
            self.seconds = seconds
            self.name = repr(handle)


@contextmanager
def longest_callback() -> Iterator[Longest]:
    longest = Longest()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> Any:
        begun = time.thread_time()
        try:
            return run(handle)
        finally:
            longest.see(handle, time.thread_time() - begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest
