"""The native engine: torch runs a Hugging Face model on our paged blocks."""

from functools import partial
from pathlib import Path

import structlog

from engine.approximate.asking import Approximations
from engine.backends.adapters import AdapterParts
from engine.backends.base import Parts, Progress
from engine.backends.identity import identity_of
from engine.backends.prepare.renderers import capabilities_of, chat_renderer, chat_worker
from engine.backends.sibling import read_sibling, store_facts
from engine.compute.compress import KvCompressor, check_compressible
from engine.compute.errors import ModelRefused
from engine.compute.gate import measure
from engine.compute.graphs.capture import Capture, CudaCapture
from engine.compute.graphs.plan import GraphPlan
from engine.compute.loading import LoadedModel, load_model
from engine.compute.place import find_turns
from engine.compute.runner import TorchRunner
from engine.compute.scorers import REPEAT, REPEAT_PART, Instructions
from engine.compute.speculate import NgramDrafter
from engine.protocol import NATIVE_AND_VLLM, Capability, Message, Prompt, TextPart
from engine.protocol.reports import Description
from engine.schedule.scheduler import most_running
from engine.settings import Settings
from engine.text.files import read_json, recommended
from engine.text.renderer import ChatRenderer
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()

STEP_TOKENS = {"cpu": 256, "cuda": 2048}
MEMORY_SHARE = 0.25
DEFAULT_CONTEXTS = 8
"""Without ENGINE_NUM_BLOCKS the pool has room for this many full contexts. It takes MEMORY_SHARE of
the free memory at most."""
LEAST_BLOCKS = 8
MARKS_A_CONTEXT = 5
"""A recurrent state for each breakpoint of a prompt, and one that goes on."""
SPECULATION_TOKENS = 8
"""The most tokens that are proposed at once."""


def instructions_of(renderer: ChatRenderer) -> Instructions:
    """The tokens that tell the model to repeat its prompt, as its template writes them."""
    text = REPEAT.strip()
    rendered = renderer.render(
        Prompt([Message("user", [TextPart(text)])]), thinking=False, scope=""
    )
    turn = renderer.tokenizer.decode(list(rendered.token_ids), skip_special_tokens=False)

    def encode(part: str) -> list[int]:
        return renderer.tokenizer.encode(part, add_special_tokens=False).ids

    return Instructions(
        encode(REPEAT), encode(REPEAT_PART), encode(turn.rpartition(text)[2] or "\n")
    )


def load_native(settings: Settings, progress: Progress, capture: Capture | None = None) -> Parts:
    """Load the model and size the pool. Raises ModelRefused.

    `capture` is how decode steps are captured where the settings say so; None: on the GPU.
    """
    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        attention=settings.attention,
        kv_dtype=settings.kv_dtype,
        progress=lambda stage, fraction: progress(stage, 0.9 * fraction),
    )
    if loaded.why_no_kernel is not None:
        log.warning("torch's own functions attend, which is slower", why=loaded.why_no_kernel)
    progress("allocating blocks", 0.9)
    state_blocks = loaded.layout.state_blocks(settings.block_size)
    if state_blocks and settings.speculation != "off":
        raise ModelRefused("ENGINE_SPECULATION: a recurrent state takes no proposed token back")
    graphs = _graph_plan(settings, loaded, capture)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        taken = 0 if graphs is None else loaded.graph_bytes(graphs, settings.block_size)
        num_blocks = _fitting_blocks(loaded, settings.block_size, taken)
    runner = _new_runner(settings, loaded, num_blocks, graphs)
    progress("loading tokenizer", 0.95)
    worker = chat_worker(settings)
    renderer = chat_renderer(worker)
    approximate = Approximations()
    if settings.approximate:
        check_compressible(loaded)
        phrases = instructions_of(renderer)
        compressor = KvCompressor(runner, phrases, find_turns(loaded))
        approximate.compressor = compressor
        approximate.gate = measure(loaded, phrases, compressor.turns)
    facts = store_facts(loaded, renderer, settings.block_size) if settings.store else None
    if settings.sibling and facts is not None:
        approximate.sibling, approximate.techniques = read_sibling(settings.sibling, facts)
    return Parts(
        runner=runner,
        renderer=renderer,
        worker=worker,
        facts=facts,
        new_drafter=(
            partial(NgramDrafter, SPECULATION_TOKENS) if settings.speculation != "off" else None
        ),
        step_tokens=STEP_TOKENS[loaded.device.type],
        block_bytes=loaded.layout.bytes_per_block(settings.block_size),
        state_blocks=state_blocks,
        adapters=_adapters(settings, runner, renderer),
        approximate=approximate,
        description=_description(settings, loaded, renderer, num_blocks),
    )


def _graph_plan(
    settings: Settings, loaded: LoadedModel, capture: Capture | None
) -> GraphPlan | None:
    """None where the settings want no graphs. Raises ModelRefused where there is no GPU."""
    if not settings.cuda_graphs:
        return None
    if capture is None:
        if loaded.device.type != "cuda":
            raise ModelRefused(f"ENGINE_CUDA_GRAPHS: needs a GPU, not {loaded.device.type}")
        capture = CudaCapture(loaded.device)
    return GraphPlan(capture, most_running(settings.max_running))


def _new_runner(
    settings: Settings, loaded: LoadedModel, num_blocks: int, graphs: GraphPlan | None
) -> TorchRunner:
    """Allocate the memory of the pool and of the graphs. Log how much the graphs take."""
    if graphs is None:
        return loaded.runner(num_blocks, settings.block_size, settings.host_blocks)
    block_bytes = loaded.layout.bytes_per_block(settings.block_size)
    free_bytes = loaded.free_bytes()
    runner = loaded.runner(num_blocks, settings.block_size, settings.host_blocks, graphs)
    log.info(
        "decode steps are captured",
        counted_bytes=loaded.graph_bytes(graphs, settings.block_size),
        taken_bytes=free_bytes - loaded.free_bytes() - num_blocks * block_bytes,
    )
    return runner


def _fitting_blocks(loaded: LoadedModel, block_size: int, taken: int) -> int:
    """The number of blocks for DEFAULT_CONTEXTS full contexts.

    They take at most MEMORY_SHARE of the free memory that is left beside `taken` bytes for other
    things.
    """
    state_blocks = loaded.layout.state_blocks(block_size)
    context_blocks = loaded.max_context_tokens // block_size
    wanted = DEFAULT_CONTEXTS * (context_blocks + MARKS_A_CONTEXT * state_blocks)
    block_bytes = loaded.layout.bytes_per_block(block_size)
    most = int(max(loaded.free_bytes() - taken, 0) * MEMORY_SHARE) // block_bytes
    return max(min(most, wanted), LEAST_BLOCKS)


def _adapters(
    settings: Settings, runner: TorchRunner, renderer: ChatRenderer
) -> AdapterParts | None:
    if not settings.adapters:
        return None
    return AdapterParts(
        Path(settings.adapters),
        runner.adapters,
        lambda ids: renderer.tokenizer.decode(list(ids), skip_special_tokens=False),
        settings.adapter_bytes,
    )


def _description(
    settings: Settings,
    loaded: LoadedModel,
    renderer: ChatRenderer,
    num_blocks: int,
) -> Description:
    layout = loaded.layout
    more: dict[Capability, bool] = {
        "copy_on_write": True,
        "block_map": True,
        "multiple_choices": True,
        "own_template": True,
        **dict.fromkeys(NATIVE_AND_VLLM, True),
        "logprobs": True,
        "service_class": True,
        "strict_tools": renderer.tool_format is not None and renderer.can_trigger,
    }
    plain_dtype = str(layout.dtype).removeprefix("torch.")
    return Description(
        backend="native",
        model=Path(settings.model).name,
        epoch="",
        max_context_tokens=loaded.max_context_tokens,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        granularity=1,
        min_cache_tokens=settings.min_cache_tokens,
        capabilities=capabilities_of(renderer, more),
        prefix_order=renderer.prefix_order,
        tool_format=renderer.tool_format,
        reasoning_format=renderer.reasoning_format,
        kv_bytes_per_token=layout.bytes_per_token,
        state_blocks=layout.state_blocks(settings.block_size),
        kv_dtype=plain_dtype if layout.codec is None else layout.kv_dtype,
        attention=loaded.attention,
        device=loaded.device_name,
        default_sampling=recommended(read_json(settings.model, "generation_config.json")),
        max_running=settings.max_running,
        longest_token_bytes=longest_token_bytes(renderer.tokenizer),
        identity=identity_of(settings.model, renderer),
    )
