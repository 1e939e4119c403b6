"""A generation's frames on their way from the engine's thread to one reader."""

import asyncio
from collections.abc import Callable

from engine.protocol import Done, Failed, Frame

HEARTBEAT_SECONDS = 5.0


class QueuedGeneration:
    """An async iterator of frames, None for a heartbeat.

    `max_tokens` or the context bounds the number of frames, so the queue has no bound of its own.
    When the reader goes away (cancelled, closed, or without reading a frame), the request is
    cancelled.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self._event_loop = event_loop
        self._cancel = cancel
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.is_open = False

    def emit(self, frame: Frame) -> None:
        """Called from the engine's thread."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._frames.put_nowait, frame)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._cancel()

    def __aiter__(self) -> "QueuedGeneration":
        return self

    async def __anext__(self) -> Frame | None:
        if not self.is_open:
            raise StopAsyncIteration
        try:
            frame = await asyncio.wait_for(self._frames.get(), HEARTBEAT_SECONDS)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(frame, Done | Failed):
            self.is_open = False
        return frame

    def __del__(self) -> None:
        self.close()
