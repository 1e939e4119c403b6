"""Our engine's server inside a `vllm serve`, as `plugin.py` mounts it.

This is the composition root of the mounted engine, as `engine/__main__.py` is that of our own
process. vLLM makes the plugin, attaches it, gives it the running engine and starts to serve. It
does each of these once, in this order.
"""

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import snapshot_download

from engine.backends.base import Progress
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.vllm.backend import VllmBackend, VllmParts, parts_of, transfer_of
from engine.backends.vllm.names import is_known
from engine.clock import Clock, ManualClock, MonotonicClock
from engine.mount.checks import check, our_shares, read_settings
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from engine.settings import Settings

PATH = "/holdfast"
KEEP_ALIVE_SECONDS = "75"
"""Longer than a gateway keeps idle connections (30 s), because the gateway must close first."""
WATCH_SECONDS = 0.2
"""How often the end of vLLM's server is looked for."""

log = structlog.get_logger()


class MountedEngine:
    """Our engine in a vLLM. Errors that `attach_router` or `init_state` raise end vLLM's start."""

    def __init__(self) -> None:
        self._host = ServedEngine(self._note_failure, owns_process=False)
        self._backend: VllmBackend | None = None
        self._app: Any = None
        self._llm: Any = None
        self._args = Namespace()

    # What vLLM calls.

    def attach_router(self, app: Any) -> None:
        """Mount our routes and join the server's lifespan. Raises Refused for a wrong setting."""
        send_logs_to_vllm()
        self._settings = read_settings()
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
        """Make our engine over vLLM's. Raises Refused if leases can't be held in this vLLM."""
        config = engine_client.vllm_config
        check(config, self._settings, log_stats=engine_client.log_stats)
        self._event_loop = asyncio.get_running_loop()
        self._llm = engine_client
        self._args = args
        # In a vLLM whose names have changed the load fails and says so. vLLM itself goes on.
        shares = our_shares(transfer_of(config.kv_transfer_config)) if is_known("server") else {}
        settings = self._settings.model_copy(update=shares)
        clock: Clock = ManualClock() if settings.clock == "manual" else MonotonicClock()

        def new_backend(host: ServedEngine) -> VllmBackend:
            self._backend = VllmBackend(settings, clock, host.crash, host.supervisor, self._load)
            return self._backend

        self._app = create_app(new_backend, settings.secret.get_secret_value(), self._host)

    # Inside.

    def _load(self, settings: Settings, progress: Progress) -> VllmParts:
        progress("loading tokenizer", 0.5)
        names = self._args.served_model_name or [self._llm.vllm_config.model_config.model]
        worker = renderer_of(self._llm, self._args, settings)
        return parts_of(
            self._llm,
            settings,
            worker,
            os.path.basename(names[0].rstrip("/")),
            is_owner=False,
            adapters={module.name: module.path for module in self._args.lora_modules or ()},
        )

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_below(scope)
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(inner, receive, send)

    async def _watch(self, server: Any) -> None:
        """End event streams when vLLM's server ends. It waits for them, and they never end."""
        while not (server.should_exit or self._llm.errored):
            await asyncio.sleep(WATCH_SECONDS)
        self._host.end_readiness()
        self._host.end_events()

    def _note_failure(self) -> None:
        """Note that our part failed. Gateways see it, and vLLM's own users don't.

        May be called in any thread.
        """

        def note_end(abandoned: "Future[None]") -> None:
            error = None if abandoned.cancelled() else abandoned.exception()
            if error is not None:
                log.error("the engine did not end completely", error=type(error).__name__)

        if self._backend is not None:
            failure = self._host.readiness.error
            reason = f"the engine has failed ({failure}) and is off until vLLM is started again"
            ending = self._backend.abandon(reason)
            future = asyncio.run_coroutine_threadsafe(ending, self._event_loop)
            future.add_done_callback(note_end)


def path_below(scope: Any) -> str:
    """The part of a call's path that lies below PATH.

    Starlette leaves `path` whole. `root_path` is what it must begin with: PATH, behind the server's
    own prefix if there is a `--root-path` (`app_root_path`). Proxies may leave the prefix in the
    path or take it out. vLLM's routes answer at both paths, and so do ours.
    """
    path: str = scope["path"]
    root_path = scope.get("root_path", "")
    mount_path = root_path.removeprefix(scope.get("app_root_path", ""))
    for prefix in (root_path, mount_path):
        if path == prefix or path.startswith(f"{prefix}/"):
            return path[len(prefix) :] or "/"
    return path


# What `engine.text.files` reads.
FILES = ["*.json", "*.jinja", "additional_chat_templates/*", "*.model"]
WEIGHTS = ["*.safetensors.index.json", "*.bin.index.json"]


def renderer_of(llm: Any, args: Namespace, settings: Settings) -> WorkerSpec:
    """The renderer, by `--tokenizer`, `--tokenizer-revision`, `--revision` and `--chat-template`.

    If a hub id's files are neither cached nor reachable, the errors of the hub's client are raised.
    """
    model = llm.vllm_config.model_config
    directory = model.tokenizer or model.model
    if not Path(directory).is_dir():
        directory = snapshot_download(
            directory,
            revision=model.tokenizer_revision or model.revision,
            cache_dir=llm.vllm_config.load_config.download_dir,
            allow_patterns=FILES,
            ignore_patterns=WEIGHTS,
        )
    # A file's path, or the template itself.
    template: str | None = getattr(args, "chat_template", None)
    if template is not None and "\n" not in template and Path(template).is_file():
        template = Path(template).read_text(encoding="utf-8")
    ends: Any = model.try_get_generation_config().get("eos_token_id")
    return WorkerSpec(
        kind="chat",
        model=directory,
        template=template,
        # A tokenizer of another directory need not know how the model ends its turns.
        end_token_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )


def send_logs_to_vllm() -> None:
    """Have structlog write lines to vLLM's logger, without any values of variables.

    If the process has configured structlog itself, nothing changes.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=lambda *_: logging.getLogger("vllm.holdfast"),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
