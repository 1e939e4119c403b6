"""The native engine: torch runs a Hugging Face model on our paged blocks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from engine.backends.base import Parts, Progress
from engine.backends.prepare.renderers import capabilities_of, chat_renderer, chat_worker
from engine.compute.loading import LoadedModel, load_model, model_facts
from engine.compute.speculate import NgramDrafter
from engine.protocol import Capability, Description
from engine.schedule.request import Drafter
from engine.settings import Settings
from engine.text.renderer import ChatRenderer
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()

STEP_TOKENS = {"cpu": 256, "cuda": 2048}
MEMORY_SHARE = 0.25
DEFAULT_CONTEXTS = 8
SPECULATION_TOKENS = 8
"""Tokens that are proposed at once at most."""
"""Without ENGINE_NUM_BLOCKS the pool has room for this many full contexts. It takes MEMORY_SHARE of
the free memory at most."""


def load_native(settings: Settings, progress: Progress) -> Parts:
    """Load the model and size the pool. Raises ModelRefused."""
    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        attention=settings.attention,
        kv_dtype=settings.kv_dtype,
        threads=settings.threads,
        progress=lambda stage, fraction: progress(stage, 0.9 * fraction),
    )
    if loaded.why_no_kernel is not None:
        log.warning("torch's own functions attend, which is slower", why=loaded.why_no_kernel)
    progress("allocating blocks", 0.9)
    num_blocks = settings.num_blocks or _affordable_blocks(loaded, settings.block_size)
    runner = loaded.runner(num_blocks, settings.block_size, settings.host_blocks)
    progress("loading tokenizer", 0.95)
    worker = chat_worker(settings)
    renderer = chat_renderer(worker)
    return Parts(
        runner=runner,
        renderer=renderer,
        worker=worker,
        facts=_facts(loaded, renderer, settings) if settings.store else None,
        new_drafter=_new_drafter(settings),
        step_tokens=STEP_TOKENS[loaded.device.type],
        block_bytes=loaded.layout.bytes_per_block(settings.block_size),
        description=Description(
            backend="native",
            model=Path(settings.model).name,
            epoch="",
            max_context_tokens=loaded.max_context_tokens,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            granularity=1,
            min_cache_tokens=settings.min_cache_tokens,
            capabilities=capabilities_of(renderer, _capabilities(renderer)),
            prefix_order=renderer.prefix_order,
            tool_format=renderer.tool_format,
            reasoning_format=renderer.reasoning_format,
            kv_bytes_per_token=loaded.layout.bytes_per_token,
            kv_dtype=_kv_dtype(loaded),
            attention=loaded.attention,
            default_temperature=loaded.sampling.temperature,
            default_top_p=loaded.sampling.top_p,
            default_top_k=loaded.sampling.top_k,
            ttl_scale=settings.ttl_scale,
            max_running=settings.max_running,
            longest_token_bytes=longest_token_bytes(renderer.tokenizer),
        ),
    )


def _new_drafter(settings: Settings) -> Callable[[], Drafter] | None:
    if settings.speculation == "off":
        return None
    return partial(NgramDrafter, SPECULATION_TOKENS)


def _kv_dtype(loaded: LoadedModel) -> str:
    layout = loaded.layout
    return str(layout.dtype).removeprefix("torch.") if layout.codec is None else layout.kv_dtype


def _facts(loaded: LoadedModel, renderer: ChatRenderer, settings: Settings) -> dict[str, str]:
    """What a stored block depends on: the model as it computes, its template and tokenizer."""
    return {
        **model_facts(loaded, settings.block_size),
        "template": renderer.template_source,
        "tokenizer": renderer.tokenizer.to_str(),
    }


def _capabilities(renderer: ChatRenderer) -> dict[Capability, bool]:
    return {
        "copy_on_write": True,
        "block_map": True,
        "multiple_choices": True,
        "own_template": True,
        "penalties": True,
        "logprobs": True,
        "service_class": True,
        "strict_tools": renderer.tool_format is not None and renderer.can_trigger,
    }


def _affordable_blocks(loaded: LoadedModel, block_size: int) -> int:
    """Room for some contexts, within a share of the device's free memory."""
    affordable = int(loaded.free_bytes() * MEMORY_SHARE) // loaded.layout.bytes_per_block(
        block_size
    )
    return max(min(affordable, DEFAULT_CONTEXTS * loaded.max_context_tokens // block_size), 8)
