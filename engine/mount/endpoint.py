"""Our engine's server inside a `vllm serve`, as `plugin.py` mounts it.

The composition root of the mounted engine, as `engine/__main__.py` is that of our own process. vLLM
makes the plugin, attaches it, gives it its running engine and starts serving, in this order, once.
"""

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from pydantic import ValidationError

from engine.backends.base import Progress
from engine.backends.vllm.backend import VllmBackend, VllmParts, parts_of
from engine.backends.vllm.names import NAME
from engine.backends.vllm.shares import lease_shares
from engine.clock import Clock, ManualClock, MonotonicClock
from engine.mount.logs import send_logs_to_vllm
from engine.mount.model_files import renderer_of
from engine.mount.refusals import Refused, check
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from engine.settings import Settings
from engine.traces import Traces, TracesError, open_traces

PATH = "/holdfast"
KEEP_ALIVE_SECONDS = "75"
"""Longer than a gateway keeps idle connections (30 s): it must close first."""
WATCH_SECONDS = 0.2

log = structlog.get_logger()


class MountedEngine:
    """What is wrong is raised by `attach_router` or `init_state`, which ends vLLM's start."""

    def __init__(self) -> None:
        self._host = ServedEngine(self._note_failure, owns_process=False)
        self._backend: VllmBackend | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._app: Any = None
        self._llm: Any = None
        self._args = Namespace()

    # What vLLM calls.

    def attach_router(self, app: Any) -> None:
        """Mount our routes and join the server's lifespan. Raises Refused for a wrong setting."""
        send_logs_to_vllm()
        self._settings = _settings()
        os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", KEEP_ALIVE_SECONDS)
        app.mount(PATH, self._serve, name="holdfast")
        theirs = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(owner: Any) -> AsyncIterator[Any]:
            async with theirs(owner) as state, self._app.lifespan():
                watching = asyncio.create_task(self._watch(owner.state.server))
                try:
                    yield state
                finally:
                    watching.cancel()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, args: Namespace) -> None:
        """Raises Refused where leases can't be held in this vLLM."""
        check(engine_client, args)
        self._event_loop = asyncio.get_running_loop()
        self._llm, self._args = engine_client, args
        transfer = engine_client.vllm_config.kv_transfer_config
        shares = lease_shares(_extra_config(transfer))
        settings = self._settings.model_copy(update=shares)
        clock: Clock = ManualClock() if settings.clock == "manual" else MonotonicClock()

        def new_backend(host: ServedEngine) -> VllmBackend:
            self._backend = VllmBackend(settings, clock, host.crash, host.supervisor, self._load)
            return self._backend

        self._app = create_app(
            new_backend, settings.secret.get_secret_value(), self._host, _traces(settings)
        )

    # Inside.

    def _load(self, settings: Settings, progress: Progress) -> VllmParts:
        progress("loading tokenizer", 0.5)
        names = self._args.served_model_name or [self._llm.vllm_config.model_config.model]
        worker = renderer_of(self._llm, self._args, settings)
        return parts_of(
            self._llm, settings, worker, os.path.basename(names[0].rstrip("/")), is_owner=False
        )

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Starlette leaves `path` whole and tells of the prefix in `root_path`."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(inner, receive, send)

    async def _watch(self, server: Any) -> None:
        """Event streams never end by themselves, and the server waits for them at its end."""
        while not (server.should_exit or self._llm.errored):
            await asyncio.sleep(WATCH_SECONDS)
        self._host.end_readiness()
        self._host.end_events()

    def _note_failure(self) -> None:
        """Our part failed, maybe in another thread: gateways see it, vLLM's own users don't."""
        backend = self._backend
        if backend is not None:
            self._event_loop.call_soon_threadsafe(self._abandon, backend)

    def _abandon(self, backend: VllmBackend) -> None:
        task = asyncio.create_task(backend.abandon("the engine server failed"))
        self._tasks.add(task)
        task.add_done_callback(self._note_abandoned)

    def _note_abandoned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the engine could not be ended whole", error=type(error).__name__)


def _settings() -> Settings:
    """`ENGINE_*`, of which those that choose or size a backend have no meaning here."""
    try:
        return Settings(backend="vllm")  # type: ignore[call-arg]
    except ValidationError as error:
        problems = [
            "ENGINE_" + "_".join(map(str, problem["loc"])).upper() + ": " + problem["msg"]
            for problem in error.errors(include_input=False, include_url=False)
        ]
        raise Refused("holdfast: " + "; ".join(problems)) from None


def _traces(settings: Settings) -> Traces | None:
    try:
        return open_traces("holdfast-engine") if settings.traces else None
    except TracesError as error:
        raise Refused(f"holdfast: ENGINE_TRACES: {error}") from None


def _extra_config(transfer: Any) -> dict[str, Any]:
    """Of our connector, alone or as a MultiConnector's child."""
    extra: dict[str, Any] = transfer.kv_connector_extra_config or {}
    for child in extra.get("connectors", []):
        if child.get("kv_connector") == NAME:
            return child.get("kv_connector_extra_config") or {}
    return extra
