"""An engine that computes in vLLM: our server, books and protocol around an embedded AsyncLLM."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import structlog

from engine.backends.adapters import READ_SECONDS, AdapterParts, AdapterShelf
from engine.backends.base import Progress, own_guarantees
from engine.backends.contract import EngineBackend, Loaded
from engine.backends.external import MirrorPool
from engine.backends.identity import identity_of
from engine.backends.prepare.images import Expanded, Widening, image_token_text
from engine.backends.prepare.pool import new_pool
from engine.backends.prepare.prepared import WorkerSpec
from engine.backends.prepare.renderers import capabilities_of, chat_renderer, chat_worker
from engine.backends.vllm.arguments import ArgumentRefused, engine_arguments
from engine.backends.vllm.beside import refusal, sharing
from engine.backends.vllm.core import LOAD_SECONDS, VllmAdapters, VllmCore
from engine.backends.vllm.internals import check_adapters
from engine.backends.vllm.loop import HeldCache, HeldEntries, VllmLoop
from engine.backends.vllm.names import check_names
from engine.cache.digests import ChainHasher
from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.clock import Clock
from engine.errors import EngineError
from engine.protocol import NATIVE_AND_VLLM, Image, Message, Prompt, TextPart
from engine.protocol.reports import Description, LeaseStats, Stats
from engine.refusal import StartRefused
from engine.schedule.accounting import Accounting
from engine.schedule.request import ImagePrompt
from engine.settings import Settings
from engine.sizing import DTYPE_BYTES, NotSizable, kv_size
from engine.supervisor import Supervisor, trace_of
from engine.text.files import recommended
from engine.text.renderer import ChatRenderer
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()
_CACHE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
BIND_SECONDS = 60.0
"""How many seconds a running vLLM has to answer `bind`. It answers between two steps."""
_IMAGE_ERRORS = (AttributeError, ImportError, KeyError, RuntimeError, TypeError)
"""Raised by a vLLM that handles images in another way, or by a model's own processor."""
NOT_SHOWN = "this model is shown no images: each prompt only says where one stood"
TRIAL_SECONDS = 120.0
"""How many seconds the first image may take. A processor may have to be loaded for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmParts:
    """A running vLLM, and what the engine's server needs beside it."""

    core: VllmCore
    renderer: ChatRenderer
    worker: WorkerSpec
    # It lacks only the epoch.
    description: Description
    # Some of vLLM's layers keep a recurrent state, so a read ends where a state was kept.
    has_states: bool = False
    # The names of connectors beside ours that may give one scope another scope's content.
    shared_by: str = ""
    # The adapters' folders by name, as vLLM's own command line gives them.
    adapters: Mapping[str, Path] = field(default_factory=dict)


class VllmBackend(EngineBackend):
    """`load_parts` starts vLLM and makes its parts. It is called once, in a thread."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        supervisor: Supervisor,
        load_parts: "Callable[[Settings, Progress], VllmParts] | None" = None,
    ) -> None:
        super().__init__(settings, clock, on_crash)
        self._supervisor = supervisor
        self._load_vllm = load_parts or load_vllm
        self._parts: VllmParts | None = None
        self._closing = ExitStack()

    unpurged = (
        "blocks of vLLM's own cache and tiers: no entry leads to them any more, and vLLM reuses"
        " them in its own order; a restart of vLLM lets go of them",
    )

    def load(self, progress: Progress) -> None:
        parts = self._load_vllm(self._settings, progress)
        # The connector knows our directives by a token, so it gets the token before any directive.
        binding = asyncio.run_coroutine_threadsafe(parts.core.bind(), self._event_loop)
        bound = binding.result(BIND_SECONDS)
        description = parts.description
        if parts.renderer.image_text:
            if asyncio.run_coroutine_threadsafe(sees_images(parts), self._event_loop).result():
                capabilities = [*description.capabilities, "images"]
                description = msgspec.structs.replace(description, capabilities=capabilities)
        self._parts = parts
        if self._settings.adapters or parts.adapters:
            folder = Path(self._settings.adapters) if self._settings.adapters else None
            adapters = VllmAdapters(parts.core, self._event_loop)
            decode = parts.renderer.tokenizer.decode
            room = self._settings.adapter_bytes
            seconds = READ_SECONDS + LOAD_SECONDS
            shelf_parts = AdapterParts(folder, adapters, decode, room, parts.adapters, seconds)
            self._adapters = AdapterShelf(shelf_parts)
            self._closing.callback(adapters.close)
        settings = self._settings
        if parts.shared_by:
            log.warning("SCOPES ARE NOT KEPT APART by a connector beside ours", by=parts.shared_by)
            guarantees = own_guarantees(description.capabilities, shared_by=parts.shared_by)
            description = msgspec.structs.replace(description, guarantees=guarantees)
        description = self._whole(description)
        # Room for blocks that vLLM has evicted without having told so yet.
        num_spare = 2 * description.max_context_tokens // description.block_size
        num_blocks = description.num_blocks + bound.max_blocks + num_spare
        pool = MirrorPool(num_blocks, description.block_size)
        entries = HeldEntries(
            pool, grace_seconds=ARRIVAL_GRACE_SECONDS, is_recorded=bound.max_blocks > 0
        )
        hasher = ChainHasher(bound.chain or os.urandom(32), description.block_size)
        cache = HeldCache(pool, entries, hasher, has_states=parts.has_states)
        cache.restore(bound.entries, self._clock.now(), time.time())
        accounting = Accounting(
            cache,
            self._clock,
            self._events.publish,
            epoch=description.epoch,
            max_context_tokens=description.max_context_tokens,
            counts_prefill=False,
        )
        loop = VllmLoop(
            parts.core,
            accounting,
            cache,
            self._event_loop,
            self._supervisor,
            max_waiting=settings.max_waiting,
            max_leased_blocks=int(description.num_blocks * settings.lease_share),
            max_context_tokens=description.max_context_tokens,
        )
        workers = new_pool(parts.renderer, parts.worker, description, settings, self._days)
        self._begin(Loaded(description, parts.renderer, workers, cache, accounting, loop))

    async def _expand(self, image_prompt: ImagePrompt) -> Expanded:
        assert self._parts is not None
        return await self._parts.core.expand(image_prompt)

    async def stop(self) -> None:
        with self._closing:
            await super().stop()

    async def abandon(self, reason: str) -> None:
        """End our part in a vLLM that is not ours: requests fail, holds end, calls are refused."""
        loaded = self._loaded
        self._loaded = None
        self._why_ended = reason
        if loaded is not None:
            assert isinstance(loaded.loop, VllmLoop)
            self._events.close()
            await loaded.preparation.close()
            await loaded.loop.abandon(reason)

    async def stats(self) -> Stats:
        loaded = self._ready()
        parts = self._parts
        assert parts is not None
        core = await parts.core.stats()
        counters = {
            "preempted_requests": core.preempted,
            "evicted_blocks": core.evicted_blocks,
            "leases_lowered": core.leases_lowered,
        }
        return self._report(
            loaded,
            counters,
            running=core.running,
            waiting=core.waiting,
            foreign_running=core.foreign_running,
            blocks=core.blocks,
            leases=LeaseStats(blocks=core.leased_blocks, max_blocks=core.max_leased_blocks),
            num_leases=loaded.cache.entries.num_leases,
            store=core.store,
        )


def load_vllm(settings: Settings, progress: Progress) -> VllmParts:
    """Start vLLM with our connector.

    Raises ArgumentRefused. Raises StartRefused if vLLM's own processes did not start. Raises what
    vLLM itself raises.
    """
    from vllm import AsyncEngineArgs, __version__
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    progress("starting vLLM", 0.1)
    is_cpu = current_platform.is_cpu()
    if settings.adapters:
        check_adapters(__version__, is_cpu=is_cpu)
    arguments = engine_arguments(settings, is_cpu=is_cpu)
    problem = refusal(arguments["kv_transfer_config"])
    if problem is not None and not settings.vllm_shares_kv_across_scopes:
        raise ArgumentRefused(f"ENGINE_VLLM_ARGS: {problem}")
    config = AsyncEngineArgs(**arguments).create_engine_config()
    try:
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[])
    except RuntimeError as error:
        # The process that failed has printed the cause. A trace of our own process lacks it.
        if "See root cause above" not in str(error):
            raise
        raise StartRefused("vLLM did not start; its own lines above say why") from error
    progress("loading tokenizer", 0.95)
    return parts_of(llm, settings, chat_worker(settings), Path(settings.model).name, is_owner=True)


def image_text(model: Any) -> str:
    """The text that stands for an image in vLLM's prompts. Empty for a model that sees no images.

    A model that numbers its images (`<|image_1|>`) counts as one that sees none. If vLLM names no
    text, as for Pixtral, the text is that of the image token in the model's config.json.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls

    if not model.is_multimodal_model or not model.multimodal_config.get_limit_per_prompt("image"):
        return ""
    kind = get_model_cls(model)
    try:
        first, second = (kind.get_placeholder_str("image", number) for number in (1, 2))
    except (NotImplementedError, ValueError):
        first = ""
        second = ""
    text = image_token_text(model.model) if first is None else first
    if not text or first != second:
        log.warning(NOT_SHOWN, why="no text is known that stands for an image in its prompts")
        return ""
    return str(text)


async def sees_images(parts: VllmParts) -> bool:
    """Whether vLLM takes a prompt with an image, and leaves the text's tokens in their places."""
    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.new("RGB", (64, 64)).save(file, "PNG")
    image = Image("0" * 64, "image/png", file.getvalue(), 64, 64)
    texts = [TextPart(text) for text in ("See", image.reference, "here.")]
    prompt = Prompt([Message("user", [*texts])], images=[image])
    rendered = parts.renderer.render(prompt, thinking=False)
    image_prompt = ImagePrompt(rendered.token_ids, [image])
    text = parts.renderer.image_text
    marks = parts.renderer.tokenizer.encode(text, add_special_tokens=False).ids
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            Widening(image_prompt.token_ids, await parts.core.show_first(image_prompt, marks))
    except (EngineError, TimeoutError, *_IMAGE_ERRORS) as error:
        log.warning(NOT_SHOWN, why=trace_of(error))
        return False
    return True


def parts_of(
    llm: Any,
    settings: Settings,
    worker: WorkerSpec,
    model_name: str,
    *,
    is_owner: bool,
    adapters: Mapping[str, str] | None = None,
) -> VllmParts:
    """The parts over a running AsyncLLM that has our connector.

    `worker` says which template and tokenizer render. With `is_owner` vLLM ends when the backend
    ends. `adapters` are paths or hub ids by name. Raises TemplateRefused. Raises VllmChangedError
    for a vLLM whose names have changed, or whose adapters are not known.
    """
    from vllm import __version__
    from vllm.lora.utils import get_adapter_absolute_path
    from vllm.platforms import current_platform

    check_names("server")
    config = llm.vllm_config
    if settings.adapters or adapters:
        check_adapters(__version__, is_cpu=current_platform.is_cpu())
    model = config.model_config
    worker = msgspec.structs.replace(worker, image_text=image_text(model))
    renderer = chat_renderer(worker)
    return VllmParts(
        core=VllmCore(
            llm,
            model.get_vocab_size(),
            takes_seeds=not current_platform.is_cpu(),
            is_owner=is_owner,
        ),
        renderer=renderer,
        worker=worker,
        description=_description(config, settings, model_name, renderer),
        has_states=config.cache_config.mamba_cache_mode != "none",
        shared_by=", ".join(sharing(transfer_of(config.kv_transfer_config))),
        adapters={
            name: Path(get_adapter_absolute_path(path)) for name, path in (adapters or {}).items()
        },
    )


def transfer_of(config: Any) -> Mapping[str, Any] | None:
    """The fields of vLLM's KVTransferConfig that tell of connectors. None without a config."""
    if config is None:
        return None
    names = ("kv_connector", "kv_role", "kv_connector_module_path", "kv_connector_extra_config")
    return {name: getattr(config, name) for name in names}


def _description(
    config: Any, settings: Settings, model_name: str, renderer: ChatRenderer
) -> Description:
    """The description of an engine over a vLLM of this configuration, without the epoch."""
    model = config.model_config
    cache = config.cache_config
    sampling: dict[str, Any] = model.get_diff_sampling_param()
    if model.try_get_generation_config().get("do_sample") is False:
        sampling |= {"temperature": 0.0, **model.override_generation_config}
    # Unlike the native engine vLLM shares whole blocks only, so `copy_on_write` is not among them.
    capabilities = capabilities_of(
        renderer,
        {
            "multiple_choices": True,
            "own_template": True,
            **dict.fromkeys(NATIVE_AND_VLLM, True),
            "service_class": config.scheduler_config.policy == "priority",
        },
    )
    return Description(
        backend="vllm",
        model=model_name,
        epoch="",
        max_context_tokens=model.max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1,
        granularity=cache.block_size,
        min_cache_tokens=settings.min_cache_tokens,
        capabilities=capabilities,
        prefix_order=renderer.prefix_order,
        tool_format=renderer.tool_format,
        reasoning_format=renderer.reasoning_format,
        kv_bytes_per_token=kv_bytes(
            json.loads(model.hf_config.to_json_string(use_diff=False)),
            str(model.dtype).removeprefix("torch."),
            cache.cache_dtype,
        ),
        device=str(config.device_config.device_type),
        # Only fields that vLLM honours.
        default_sampling=recommended(sampling).within(capabilities),
        max_running=config.scheduler_config.max_num_seqs,
        longest_token_bytes=longest_token_bytes(renderer.tokenizer),
        identity=identity_of(model.model, renderer),
    )


def kv_bytes(config: Mapping[str, Any], model_dtype: str, cache_dtype: str) -> int:
    """Bytes of one token's keys and values. 0 if they are not known.

    `config` is the model's config.json. `cache_dtype` is vLLM's `kv_cache_dtype`, where `auto` is
    the model's own dtype.
    """
    number_bytes = _CACHE_BYTES.get(model_dtype if cache_dtype == "auto" else cache_dtype)
    if number_bytes is None or model_dtype not in DTYPE_BYTES:
        return 0
    try:
        size = kv_size(config, model_dtype)
    except NotSizable:
        return 0
    return size.bytes_per_token // size.head_bytes * size.head_dim * number_bytes
