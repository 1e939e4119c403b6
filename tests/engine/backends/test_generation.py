"""A generation's frames on their way to one reader, whatever becomes of the reader."""

import asyncio
import gc

import pytest

from engine.backends.looped import QueuedGeneration
from engine.protocol import Done, Failed, Frame, TextDelta

pytestmark = pytest.mark.anyio


class Opened:
    """A generation that is open, and how often it was cancelled."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self.generation = QueuedGeneration(asyncio.get_running_loop(), self._cancel)
        self.generation.is_open = True

    def _cancel(self) -> None:
        self.num_cancelled += 1


async def test_frames_come_in_order_and_the_last_one_ends_it() -> None:
    opened = Opened()
    frames: list[Frame] = [TextDelta("a"), TextDelta("b"), Done(request_id="r", output_tokens=2)]
    for frame in frames:
        opened.generation.emit(frame)
    assert [frame async for frame in opened.generation] == frames
    opened.generation.close()
    assert opened.num_cancelled == 0, "it ended by itself"


async def test_a_failure_is_the_last_frame() -> None:
    opened = Opened()
    opened.generation.emit(Failed(code="cancelled", message=""))
    opened.generation.emit(TextDelta("never"))
    assert len([frame async for frame in opened.generation]) == 1


async def test_closing_cancels_once() -> None:
    opened = Opened()
    opened.generation.close()
    opened.generation.close()
    assert opened.num_cancelled == 1
    assert [frame async for frame in opened.generation] == []


async def test_a_reader_that_is_cancelled_cancels_the_request() -> None:
    opened = Opened()
    reader = asyncio.create_task(anext(opened.generation))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert opened.num_cancelled == 1


async def test_a_generation_that_nobody_ever_reads_is_cancelled() -> None:
    opened = Opened()
    del opened.generation
    gc.collect()
    assert opened.num_cancelled == 1


async def test_a_refused_request_is_not_cancelled() -> None:
    opened = Opened()
    opened.generation.is_open = False
    del opened.generation
    gc.collect()
    assert opened.num_cancelled == 0
