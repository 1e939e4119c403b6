"""A generation's frames on their way to one reader, whatever becomes of the reader."""

import asyncio
import gc
from contextlib import suppress

import pytest

from engine.backends.base import Generation

pytestmark = pytest.mark.anyio


class Opened:
    """A generation that is open, and how often it was cancelled."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self.generation = Generation(asyncio.get_running_loop(), self._cancel)
        self.generation.is_open = True

    def _cancel(self) -> None:
        self.num_cancelled += 1


async def test_a_reader_that_closes_or_is_cancelled_cancels_once() -> None:
    opened = Opened()
    opened.generation.close()
    opened.generation.close()
    assert opened.num_cancelled == 1
    assert [frame async for frame in opened.generation] == []
    opened = Opened()
    reader = asyncio.create_task(anext(opened.generation))
    await asyncio.sleep(0)
    reader.cancel()
    with suppress(asyncio.CancelledError):
        await reader
    assert opened.num_cancelled == 1


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_generation_nobody_reads_is_cancelled_unless_refused(is_open: bool) -> None:
    opened = Opened()
    opened.generation.is_open = is_open
    del opened.generation
    gc.collect()
    assert opened.num_cancelled == is_open
