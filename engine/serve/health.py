"""One backend and its life in a process: load in the background, readiness, the end."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from engine.backends.base import Backend

log = structlog.get_logger()


@dataclass(slots=True)
class Readiness:
    """`progress` is the fraction of the load that is done, 0 to 1."""

    stage: str = "starting"
    progress: float = 0.0
    ready: bool = False


class ServedEngine:
    """`on_failure` is called when the load or the engine thread fails: the process must end."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.readiness = Readiness()
        self._on_failure = on_failure
        self._backend: Backend | None = None

    @asynccontextmanager
    async def running(self, backend: Backend) -> AsyncIterator[None]:
        self._backend = backend
        loading = asyncio.create_task(self._load(backend))
        try:
            yield
        finally:
            self.readiness.ready = False
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            await backend.stop()

    def end_events(self) -> None:
        """The process is about to end: streams of events end now, what runs goes on."""
        if self._backend is not None:
            self._backend.end_events()

    def crash(self, error: Exception) -> None:
        """The engine's thread ended: called from it."""
        log.error("engine failed", error=repr(error), exc_info=error)
        self.readiness.ready = False
        self.readiness.stage = "failed"
        self._on_failure()

    async def _load(self, backend: Backend) -> None:
        try:
            await asyncio.to_thread(backend.load, self._progress)
        except Exception as error:  # noqa: BLE001 - the process edge: say why and end
            self.crash(error)
        else:
            # What loading made stays: without this each full collection walks over all of it and
            # every request of that moment waits.
            gc.collect()
            gc.freeze()
            self.readiness.stage, self.readiness.progress = "ready", 1.0
            self.readiness.ready = True
            log.info("ready", **_summary(backend))

    def _progress(self, stage: str, fraction: float) -> None:
        self.readiness.stage, self.readiness.progress = stage, fraction


def _summary(backend: Backend) -> dict[str, object]:
    described = backend.describe()
    return {
        "backend": described.backend,
        "model": described.model,
        "blocks": described.num_blocks,
        "block_size": described.block_size,
        "context": described.max_context_tokens,
    }
