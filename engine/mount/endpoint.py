"""Our engine's server inside a `vllm serve`, as `plugin.py` mounts it.

The composition root of the mounted engine, as `engine/__main__.py` is that of our own process. vLLM
makes the plugin, attaches it, gives it its running engine and starts serving, in this order, once.
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
from pydantic import ValidationError

from engine.backends.base import Progress
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.vllm.arguments import NAME, lease_shares
from engine.backends.vllm.backend import VllmBackend, VllmParts, parts_of, transfer_of
from engine.backends.vllm.beside import refusal
from engine.backends.vllm.internals import VllmChangedError, check_adapters
from engine.backends.vllm.names import vllm_version
from engine.clock import Clock, ManualClock, MonotonicClock
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from engine.settings import Settings, problems_of

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
        self._app: Any = None
        self._llm: Any = None
        self._args = Namespace()

    # What vLLM calls.

    def attach_router(self, app: Any) -> None:
        """Mount our routes and join the server's lifespan. Raises Refused for a wrong setting."""
        send_logs_to_vllm()
        try:
            # Of `ENGINE_*`, those that choose or size a backend have no meaning here.
            self._settings = Settings(backend="vllm")  # type: ignore[call-arg]
        except ValidationError as error:
            raise Refused("holdfast: " + "; ".join(problems_of(error))) from None
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
        check(engine_client, self._settings)
        self._event_loop = asyncio.get_running_loop()
        self._llm = engine_client
        self._args = args
        ours = _our_config(engine_client.vllm_config.kv_transfer_config)
        settings = self._settings.model_copy(update=lease_shares(ours or {}))
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

        def note_end(abandoned: "Future[None]") -> None:
            error = None if abandoned.cancelled() else abandoned.exception()
            if error is not None:
                log.error("the engine could not be ended whole", error=type(error).__name__)

        if self._backend is not None:
            why = self._host.readiness.error
            reason = f"the engine has failed ({why}) and is off until vLLM is started again"
            ending = self._backend.abandon(reason)
            future = asyncio.run_coroutine_threadsafe(ending, self._event_loop)
            future.add_done_callback(note_end)


def _our_config(transfer: Any) -> dict[str, Any] | None:
    """Of our connector, alone or as a MultiConnector's child; None where there is none."""
    if transfer is None:
        return None
    extra: dict[str, Any] = transfer.kv_connector_extra_config or {}
    for child in extra.get("connectors", []):
        if child.get("kv_connector") == NAME:
            return child.get("kv_connector_extra_config") or {}
    return extra if transfer.kv_connector == NAME else None


WANTED = f'--kv-transfer-config \'{{"kv_connector":"{NAME}","kv_role":"kv_producer"}}\''
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"


class Refused(RuntimeError):
    """This vLLM was started in a way in which leases can't be held. The message says why."""


def check(llm: Any, settings: Settings) -> None:
    """Raise Refused, naming everything that is wrong, and the flag to change."""
    wrong = list[str]()
    config = llm.vllm_config
    parallel = config.parallel_config
    cache = config.cache_config
    if getattr(cache, "kv_offloading_size", None):
        wrong.append(
            "--kv-offloading-size puts its own connector in the place of ours: leave it out"
        )
    elif _our_config(config.kv_transfer_config) is None:
        wrong.append(f"vLLM has no {NAME}: add {WANTED}")
    if getattr(parallel, "_api_process_count", 1) > 1:
        wrong.append("several API servers would each keep books of their own: --api-server-count 1")
    if parallel.data_parallel_size > 1 and not getattr(
        parallel, "data_parallel_external_lb", False
    ):
        wrong.append(
            "each data-parallel rank would be an engine of its own: start as many servers without "
            "--data-parallel-size and name each of them in HOLDFAST_ENGINES"
        )
    why = refusal(transfer_of(config.kv_transfer_config))
    if why is not None and not settings.vllm_shares_kv_across_scopes:
        wrong.append(why)
    if config.lora_config is not None:
        # Rows of the base model are wrong as well, so it is not enough that we ask for none.
        try:
            check_adapters(vllm_version(), is_cpu=config.device_config.device_type == "cpu")
        except VllmChangedError as error:
            wrong.append(str(error))
    if not cache.enable_prefix_caching:
        wrong.append("prefix caching is off: leave --no-enable-prefix-caching out")
    elif not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        # Other hashes can be made to collide, and then one prompt would read another's blocks.
        wrong.append("--prefix-caching-hash-algo must be sha256 or sha256_cbor")
    if not llm.log_stats:
        wrong.append("--disable-log-stats hides how long a request waits: leave it out")
    if config.structured_outputs_config.backend != "guidance":
        wrong.append("our grammars need --structured-outputs-config.backend guidance")
    if os.environ.get(RUST_FRONT_END, "0") not in ("", "0"):
        wrong.append(f"the Rust front end has no endpoint plugins: unset {RUST_FRONT_END}")
    if settings.adapters and config.lora_config is None:
        wrong.append("ENGINE_ADAPTERS needs --enable-lora")
    if wrong:
        raise Refused("holdfast: " + "; ".join(wrong))


# What `engine.text.files` reads.
FILES = ["*.json", "*.jinja", "additional_chat_templates/*", "*.model"]
WEIGHTS = ["*.safetensors.index.json", "*.bin.index.json"]


def renderer_of(llm: Any, args: Namespace, settings: Settings) -> WorkerSpec:
    """Of `--tokenizer`, `--tokenizer-revision`, `--revision` and `--chat-template`.

    Raises what the hub's client raises where a hub id's files are neither cached nor reachable.
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
    """Let structlog write to vLLM's logger, one line each, without any values of variables.

    Nothing changes where the process has configured structlog itself: that is its owner's choice.
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
