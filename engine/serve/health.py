"""One backend's life in a process: its load in the background, its readiness and its end."""

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
    """Whether the error or one of its causes says that a machine or a device has no memory left.

    torch raises a RuntimeError for the machine, and its own OutOfMemoryError for a device.
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
    # The names of loops that fail again and again. The engine is not ready meanwhile.
    failing: list[str] = field(default_factory=list)
    # Why the engine failed, without any content of requests; empty: it has not failed.
    error: str = ""


class ServedEngine:
    """One backend and its readiness. `on_failure` is called when the load or the engine fails.

    If the process is our own (`owns_process`), it must end then. If it is somebody else's, their
    event loop and their garbage collector stay as they are.
    """

    def __init__(
        self,
        on_failure: Callable[[], None],
        supervisor: Supervisor | None = None,
        *,
        owns_process: bool = True,
        load_seconds: float | None = None,
    ) -> None:
        """If a stage of the load makes no step for `load_seconds`, this process ends with SIGKILL.
        None sets no bound."""
        self._load_seconds = load_seconds
        self.supervisor = supervisor or Supervisor()
        self._owns_process = owns_process
        self._readiness = Readiness()
        self._on_failure = on_failure
        self._backend: EngineBackend | None = None

    @asynccontextmanager
    async def running(self, backend: EngineBackend) -> AsyncIterator[None]:
        """Load the backend in the background, and stop it when the context ends."""
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
        """End the streams of events, because the process is about to end. Requests go on."""
        if self._backend is not None:
            self._backend.end_events()

    @property
    def readiness(self) -> Readiness:
        """A copy of the readiness as it is now."""
        readiness = replace(
            self._readiness, failing=[failure.loop for failure in self.supervisor.failing]
        )
        awaited = self._backend.awaited if self._backend and readiness.stage == "ready" else ""
        if awaited:
            readiness.stage = awaited
            readiness.progress = 0.0
        readiness.ready = readiness.ready and not awaited and not readiness.failing
        return readiness

    def crash(self, error: BaseException) -> None:
        """Note an error that ended the engine's thread, or a process that the engine computes with.

        It may be called from any thread. The first call writes one line of the log and calls
        `on_failure`. Later calls have no effect.
        """
        name = type(error).__name__
        message = f"out of memory ({name})" if is_out_of_memory(error) else name
        self._fail(error=message, trace=trace_of(error))

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note an error that no caller handled.

        Without memory the data on its way is lost, such as a worker's answer. The process would
        seem ready and answer nothing, so it fails instead.
        """
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
        """Whether this process is ending because of an error. It answers no further call."""
        return self._owns_process and self._readiness.stage == "failed"

    def end_readiness(self) -> None:
        """Tell gateways to send nothing new, because the server is about to stop."""
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
            # No request was taken yet, so the messages quote none.
            trace = "".join(traceback.format_exception(error))
            message = f"out of memory: {error!r}" if is_out_of_memory(error) else repr(error)
            self._fail(error=message, trace=trace)
        else:
            if self._owns_process:
                # The loaded objects stay. If they were not frozen, each full collection would walk
                # over all of them while requests wait.
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
