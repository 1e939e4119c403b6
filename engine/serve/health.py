"""One backend's life in a process: loading in the background, readiness, the end."""

import asyncio
import gc
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from engine.backends.contract import EngineBackend
from engine.deadline import StartDeadline
from engine.refusal import StartRefused
from engine.supervisor import MAX_CAUSES, Supervisor, trace_of

log = structlog.get_logger()

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was missing, the machine's or a device's, by the error or by what caused it.

    torch raises a RuntimeError where the machine has none left, and its own OutOfMemoryError for a
    device.
    """
    current: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if current is None:
            break
        if isinstance(current, MemoryError) or "OutOfMemory" in type(current).__name__:
            return True
        if isinstance(current, OSError | RuntimeError):
            message = str(current).lower()
            if any(words in message for words in _NO_MEMORY):
                return True
        current = current.__cause__ or current.__context__
    return False


@dataclass(slots=True)
class Readiness:
    """How far the engine is from serving."""

    stage: str = "starting"
    # The fraction of the load that is done, 0 to 1.
    progress: float = 0.0
    ready: bool = False
    # The loops that end again and again. The engine is not ready meanwhile.
    failing: list[str] = field(default_factory=list)
    # Why the engine failed, without what requests said. Empty while it did not.
    error: str = ""


class ServedEngine:
    """`on_failure` is called when the load or the engine thread fails.

    A process of our own (`owns_process`) must end then. In somebody else's, their event loop and
    their garbage collector stay as they are.
    """

    def __init__(
        self,
        on_failure: Callable[[], None],
        supervisor: Supervisor | None = None,
        *,
        owns_process: bool = True,
        load_seconds: float | None = None,
    ) -> None:
        """Where a stage of the load takes longer than `load_seconds` without a step, this process
        ends with SIGKILL."""
        self._load_seconds = load_seconds
        self.supervisor = supervisor or Supervisor()
        self._owns_process = owns_process
        self._readiness = Readiness()
        self._on_failure = on_failure
        self._backend: EngineBackend | None = None

    @asynccontextmanager
    async def running(self, backend: EngineBackend) -> AsyncIterator[None]:
        self._backend = backend
        if self._owns_process:
            asyncio.get_running_loop().set_exception_handler(self._note_unhandled)
        loading = asyncio.create_task(self._load(backend))
        try:
            yield
        finally:
            self._readiness.ready = False
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            await self.supervisor.close()
            await backend.stop()

    def note_loaded(self) -> None:
        self._readiness.stage = "ready"
        self._readiness.progress = 1.0
        self._readiness.ready = True

    def end_events(self) -> None:
        """The process is about to end. Streams of events end now; running requests go on."""
        if self._backend is not None:
            self._backend.end_events()

    @property
    def readiness(self) -> Readiness:
        """Of this moment."""
        failing = [failure.loop for failure in self.supervisor.failing]
        is_ready = self._readiness.ready and not failing
        return replace(self._readiness, ready=is_ready, failing=failing)

    def crash(self, error: BaseException) -> None:
        """The engine's thread, or what it computes with, ended. Called from any thread.

        The first call is logged, in one line, and calls `on_failure`. Others have no effect.
        """
        name = type(error).__name__
        message = f"out of memory ({name})" if is_out_of_memory(error) else name
        self._fail(error=message, trace=trace_of(error))

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note an error that no caller took. Where memory is missing, what was on its way is lost,
        such as a worker's answer, and a process that seemed ready would answer nothing."""
        self.supervisor.note_unhandled(loop, context)
        error = context.get("exception")
        if error is not None and is_out_of_memory(error):
            self.crash(error)

    def _fail(self, **facts: str) -> None:
        if self._readiness.stage != "failed":
            self._readiness.ready = False
            self._readiness.stage = "failed"
            self._readiness.error = facts["error"]
            log.error("engine failed", **facts)
            self._on_failure()

    @property
    def is_ending(self) -> bool:
        """Whether this process ends by an error. Nothing that it is asked now will be answered."""
        return self._owns_process and self._readiness.stage == "failed"

    def end_readiness(self) -> None:
        """Nothing new should come: the server is about to stop."""
        self._readiness.ready = False

    async def _load(self, backend: EngineBackend) -> None:
        deadline = None if self._load_seconds is None else StartDeadline(self._load_seconds)

        def note(stage: str, fraction: float) -> None:
            self._readiness.stage = stage
            self._readiness.progress = fraction
            if deadline is not None:
                deadline.note(stage)

        try:
            with deadline or nullcontext():
                await asyncio.to_thread(backend.load, note)
        except StartRefused as refusal:
            self._fail(error=str(refusal))
        except Exception as error:  # noqa: BLE001 - the process edge: say why and end
            # No request was taken yet, so the messages may be told.
            trace = "".join(traceback.format_exception(error))
            message = f"out of memory: {error!r}" if is_out_of_memory(error) else repr(error)
            self._fail(error=message, trace=trace)
        else:
            if self._owns_process:
                # The loaded objects stay. Without this each full collection would walk over all of
                # them while requests wait.
                gc.collect()
                gc.freeze()
            self.note_loaded()
            description = backend.describe()
            log.info(
                "ready",
                backend=description.backend,
                model=description.model,
                blocks=description.num_blocks,
                block_size=description.block_size,
                context=description.max_context_tokens,
                **({"attention": description.attention} if description.attention else {}),
            )
