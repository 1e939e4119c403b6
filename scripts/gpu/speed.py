"""Speed and memory of the native engine's computation, by its own runner over its own pool."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.cache.ids import BlockId
from engine.compute.errors import ModelRefused
from engine.compute.graphs.capture import CudaCapture, PlainCapture
from engine.compute.graphs.plan import GraphPlan
from engine.compute.loading import LoadedModel, prepare_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import SampleParams, Work

GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
BLOCK_SIZE = 16
COMPARED_STEPS = 8
PREFILL_TOKENS = 2048  # in one step, as the engine does on a GPU


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that are measured."""

    config: LlamaConfig
    # The prompts' numbers of tokens.
    contexts: tuple[int, ...]
    # The numbers of decoding sequences.
    batches: tuple[int, ...]
    shared_tokens: int
    own_tokens: int
    host_blocks: int


def llama_8b() -> Sizes:
    """The shape of Llama 3 8B (its published config.json), with room for 131,072 tokens."""
    return Sizes(
        _config(128_256, 4096, 14_336, 32, 32, 131_072),
        *((8192, 32_768, 100_000), (1, 32, 128), 2048, 256, 1024),
    )


def small() -> Sizes:
    """A small shape to try the script without a GPU. Its figures say nothing."""
    return Sizes(_config(512, 64, 128, 2, 4, 4096), (256, 3000), (1, 4), 256, 32, 16)


def _config(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 2),
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


Rows = Iterator[tuple[str, str]]


def load(sizes: Sizes, device: torch.device, loaded: list[LoadedModel]) -> Rows:
    """A model of random weights into `loaded`, by torch's own attention where the kernel is not
    exact."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(sizes.config, device, dtype)
    refused: ModelRefused | None = None
    try:
        loaded.append(prepare_model(model))
    except ModelRefused as error:  # the load's check refuses the paged kernel
        refused = error
        loaded.append(prepare_model(model, "sdpa"))
    yield "attention", loaded[0].why_no_kernel or loaded[0].attention
    if refused is not None:
        raise refused


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


new_model: Callable[[LlamaConfig], PreTrainedModel] = AutoModelForCausalLM.from_config


def random_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Make weights on the device, so that nothing is read or copied."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = new_model(config)
    finally:
        torch.set_default_dtype(before)
    model.train(mode=False)
    return model


def first_tokens(loaded: LoadedModel, sizes: Sizes) -> Rows:
    """The time from a prompt to its first token: with all of it computed, and with all but the last
    block read."""
    for tokens in sizes.contexts:
        runner = loaded.runner(math.ceil(tokens / BLOCK_SIZE), BLOCK_SIZE)
        if tokens == sizes.contexts[0]:
            prefill(runner, tokens, 0)  # compiles
        cold = seconds(partial(prefill, runner, tokens, 0))
        warm = seconds(partial(prefill, runner, tokens, tokens - BLOCK_SIZE))
        yield (
            f"first token of {tokens:,} tokens: cold, cached",
            f"{cold:.3f} s ({tokens / cold:,.0f} tokens/s), {warm * 1000:.1f} ms",
        )
        del runner  # before the next one's memory is taken


def prefill(runner: TorchRunner, tokens: int, start: int) -> None:
    table = [BlockId(block) for block in range(math.ceil(tokens / BLOCK_SIZE))]
    while start < tokens:
        count = min(PREFILL_TOKENS, tokens - start)
        is_last = start + count == tokens
        ids = [(31 * place) % 500 for place in range(start, start + count)]
        sample = GREEDY if is_last else None
        work = Work(token_ids=ids, start=start, block_table=table, sample=sample)
        runner.execute([work])
        start += count


def decoding(loaded: LoadedModel, sizes: Sizes) -> Rows:
    """Steps of one token a sequence, launch by launch."""
    for batch in sizes.batches:
        runner = loaded.runner(_num_blocks(sizes, batch), BLOCK_SIZE)
        yield _decoded(loaded, sizes, batch, runner, "decode")
        del runner


def graphs(loaded: LoadedModel, sizes: Sizes) -> Rows:
    """The same steps as CUDA graphs. Without a GPU each step runs again as it is."""
    if loaded.kernel is None:
        yield "CUDA graphs", f"not run: {loaded.why_no_kernel or 'no paged kernel'}"
        return
    for batch in sizes.batches:
        is_gpu = loaded.device.type == "cuda"
        plan = GraphPlan(CudaCapture(loaded.device) if is_gpu else PlainCapture(), batch)
        num_blocks = _num_blocks(sizes, batch)
        counted = loaded.graph_bytes(plan, BLOCK_SIZE)
        free_memory()
        before = loaded.free_bytes() - num_blocks * loaded.layout.bytes_per_block(BLOCK_SIZE)
        begun = time.perf_counter()
        runner = loaded.runner(num_blocks, BLOCK_SIZE, graphs=plan)
        spent = time.perf_counter() - begun
        taken_bytes = before - loaded.free_bytes()
        yield (
            f"CUDA graphs for {batch} sequences: captured in; taken, counted",
            f"{spent:.1f} s; {taken_bytes / 2**30:.2f}, {counted / 2**30:.2f} GiB",
        )
        yield _decoded(loaded, sizes, batch, runner, "decode by CUDA graphs")
        yield _compared(runner, sizes, batch)
        del runner


def _num_blocks(sizes: Sizes, batch: int) -> int:
    return batch * (sizes.shared_tokens + sizes.own_tokens) // BLOCK_SIZE


def _tables(sizes: Sizes, batch: int, *, is_shared: bool) -> list[list[int]]:
    """Measure decoding of sequences behind one shared prefix, or each behind its own prefix."""
    shared = sizes.shared_tokens // BLOCK_SIZE
    num_own = sizes.own_tokens // BLOCK_SIZE
    num_blocks = _num_blocks(sizes, batch)
    return [
        [
            *(range(shared) if is_shared else range(i * shared, (i + 1) * shared)),
            *range(num_blocks - (i + 1) * num_own, num_blocks - i * num_own),
        ]
        for i in range(batch)
    ]


def _decoded(
    loaded: LoadedModel, sizes: Sizes, batch: int, runner: TorchRunner, what: str
) -> tuple[str, str]:
    """Tokens a second, and what share that is of what the memory's bandwidth allows."""
    figures: list[str] = []
    bandwidth = memory_bandwidth(loaded.device)
    for is_shared in (True, False):
        tables = _tables(sizes, batch, is_shared=is_shared)
        steps = min(64, sizes.own_tokens // 2)
        decode(runner, tables, sizes.shared_tokens, 3)
        spent = seconds(partial(decode, runner, tables, sizes.shared_tokens + 3, steps))
        rate = batch * steps / spent
        figure = f"{rate:,.0f}"
        if bandwidth is not None:
            num_prefixes = 1 if is_shared else batch
            kept_tokens = num_prefixes * sizes.shared_tokens + batch * (3 + steps // 2)
            step_bytes = weight_bytes(loaded) + kept_tokens * loaded.layout.bytes_per_token
            figure += f" ({rate * step_bytes / batch / bandwidth:.0%})"
        figures.append(figure)
    limit = "" if bandwidth is None else f" (of what {bandwidth / 1e12:.2f} TB/s allow)"
    return (
        f"{what}, {batch} sequences behind {sizes.shared_tokens:,} tokens: shared, own",
        f"{figures[0]}, {figures[1]} tokens/s{limit}",
    )


def decode(runner: TorchRunner, tables: list[list[int]], start: int, steps: int) -> None:
    for step in range(start, start + steps):
        runner.execute(
            [Work(token_ids=[7], start=step, block_table=table, sample=GREEDY) for table in tables]
        )


def memory_bandwidth(device: torch.device) -> float | None:
    """The chip's own figure in bytes a second: two transfers a clock over the width of its bus.

    None without a GPU, or where torch does not tell. An H100's (SXM5) is 3.35e12, an H200's 4.8e12.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return 2.0 * kilohertz * 1000 * bits / 8 or None


def weight_bytes(loaded: LoadedModel) -> int:
    """The bytes of weights that a step reads: all but the table of input embeddings, unless the
    head is the same table."""
    model: Any = loaded.model
    table: torch.Tensor = model.get_input_embeddings().weight
    head: torch.Tensor = model.get_output_embeddings().weight
    whole = sum(weight.nbytes for weight in loaded.model.parameters())
    return whole if table is head else whole - table.nbytes


def _compared(runner: TorchRunner, sizes: Sizes, batch: int) -> tuple[str, str]:
    """How many tokens graphs draw as the plain way does behind equal tokens, greedy and seeded.

    The runner has no graphs any more afterwards.
    """
    tables = _tables(sizes, batch, is_shared=False)
    seeded = SampleParams(temperature=0.8, top_p=0.95, top_k=40, seed=1)
    by_graphs = [*_drawn(runner, tables, GREEDY), *_drawn(runner, tables, seeded)]
    runner.graphs = None
    plain = [*_drawn(runner, tables, GREEDY), *_drawn(runner, tables, seeded)]
    num_same = sum(token == expected for token, expected in zip(by_graphs, plain, strict=True))
    return (
        f"the same tokens as without graphs, {batch} sequences, greedy and seeded",
        f"{num_same} of {len(plain)}",
    )


def _drawn(
    runner: TorchRunner, tables: list[list[int]], sample: SampleParams
) -> Iterator[int | None]:
    """The tokens that are drawn behind a prompt that is the same at each call."""
    for row, table in enumerate(tables):
        prompt = [(31 * row + 17 * place) % 500 for place in range(BLOCK_SIZE)]
        runner.execute([Work(token_ids=prompt, start=0, block_table=table)])
    for start in range(BLOCK_SIZE, BLOCK_SIZE + COMPARED_STEPS):
        yield from runner.execute(
            [
                Work(
                    token_ids=[(7 * start + row) % 500],
                    start=start,
                    block_table=table,
                    sample=sample,
                )
                for row, table in enumerate(tables)
            ]
        )


def host_tier(loaded: LoadedModel, sizes: Sizes) -> Rows:
    """Copies of whole blocks between the device and the host, as the engine makes them."""
    count = sizes.host_blocks
    runner = loaded.runner(count, BLOCK_SIZE, count)
    pairs = [(BlockId(block), BlockId(block)) for block in range(count)]
    size = runner.host.num_bytes / 1e9
    runner.demote(pairs)
    down = seconds(lambda: runner.demote(pairs))
    up = seconds(lambda: runner.promote(pairs))
    yield "host tier: to the host, back", f"{size / down:.1f} GB/s, {size / up:.1f} GB/s"


def seconds(work: Callable[[], object]) -> float:
    """The seconds of one call, to the end of the work that it started on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
