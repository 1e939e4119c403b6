"""vLLM's decoding of the same shape, if vLLM is installed, to compare the native engine with."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from scripts.gpu.speed import BLOCK_SIZE, Sizes, seconds

STEPS = 64
MEMORY_SHARE = 0.8
"""The share of the device's memory that vLLM gets. The native engine has given it back."""


def vllm_decoding(sizes: Sizes) -> Iterator[tuple[str, str]]:
    """Tokens a second of as many sequences, each behind a prefix of its own that is cached.

    The time is that of answers with STEPS more tokens, less that of answers with one token.
    """
    if find_spec("vllm") is None:
        yield "vLLM's decoding", "skipped: no vLLM"
        return
    import vllm

    batch = sizes.batches[-1]
    length = sizes.shared_tokens + BLOCK_SIZE
    with TemporaryDirectory() as folder:
        sizes.config.architectures = ["LlamaForCausalLM"]
        sizes.config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="auto",
            max_model_len=math.ceil((length + STEPS + 1) / BLOCK_SIZE) * BLOCK_SIZE,
            max_num_seqs=batch,
            enable_prefix_caching=True,
            gpu_memory_utilization=MEMORY_SHARE,
        )
    prompts: list[Any] = [
        {"prompt_token_ids": [(31 * row + place) % 500 for place in range(length)]}
        for row in range(batch)
    ]

    def generate(num_tokens: int) -> None:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        llm.generate(prompts, sampling, use_tqdm=False)

    generate(1 + STEPS)
    short = seconds(lambda: generate(1))
    spent = seconds(lambda: generate(1 + STEPS)) - short
    yield (
        f"vLLM {vllm.__version__}, {batch} sequences behind {length:,} tokens: own",
        f"{batch * STEPS / spent:,.0f} tokens/s",
    )
