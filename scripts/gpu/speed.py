"""Speed and memory of the native engine's computation, by its own runner over its own pool."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.cache.ids import BlockId
from engine.compute.errors import ModelRefused
from engine.compute.loading import LoadedModel, prepare_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import SampleParams, Work

GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
BLOCK_SIZE = 16
PREFILL_TOKENS = 2048  # in one step, as the engine does on a GPU


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    config: LlamaConfig
    # The tokens of the prompts.
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
    """For a try without a GPU. Its figures say nothing."""
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
    """Weights made on the device: nothing is read and nothing is copied."""
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
    """From a prompt to its first token: all of it computed, and all but the last block read."""
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
    """Steps of one token a sequence, behind one shared prefix and behind one each."""
    shared = sizes.shared_tokens // BLOCK_SIZE
    own_blocks = sizes.own_tokens // BLOCK_SIZE
    for batch in sizes.batches:
        num_blocks = batch * (shared + own_blocks)
        runner = loaded.runner(num_blocks, BLOCK_SIZE)
        figures = []
        for is_shared in (True, False):
            tables = [
                [
                    *(range(shared) if is_shared else range(i * shared, (i + 1) * shared)),
                    *range(num_blocks - (i + 1) * own_blocks, num_blocks - i * own_blocks),
                ]
                for i in range(batch)
            ]
            steps = min(64, sizes.own_tokens // 2)
            decode(runner, tables, sizes.shared_tokens, 3)
            spent = seconds(partial(decode, runner, tables, sizes.shared_tokens + 3, steps))
            figures.append(f"{batch * steps / spent:,.0f}")
        yield (
            f"decode, {batch} sequences behind {sizes.shared_tokens:,} tokens: shared, own",
            f"{figures[0]}, {figures[1]} tokens/s",
        )
        del runner


def decode(runner: TorchRunner, tables: list[list[int]], start: int, steps: int) -> None:
    for step in range(start, start + steps):
        runner.execute(
            [Work(token_ids=[7], start=step, block_table=table, sample=GREEDY) for table in tables]
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


def seconds(run: Callable[[], object]) -> float:
    """Of one call, to the end of what it started on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
