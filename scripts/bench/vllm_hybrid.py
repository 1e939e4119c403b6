"""What vLLM reads of a hybrid's prompts, with our leases and without. Run with vLLM's own Python.

    .venv-vllm/bin/python -m scripts.bench.vllm_hybrid [--requests 8]

Each prompt is one prefix that all share and a long tail that comes once, so that vLLM's own state
at the prompt's last block lies in the tail (its issue 45238). They come one after the other, and
then with prompts of others in between that fill the pool. One vLLM computes a tiny Qwen3-Next in
this process; counted is what its scheduler says that it read.
"""

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.report import machine_line
from scripts.bench.vllm_leases import ENVIRONMENT, TOKEN, draw
from scripts.setup.options import parse

BLOCKS, OTHERS = 32, 8


def start(model: str) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        dtype="bfloat16",  # the only one that vLLM's CPU kernels of these layers take
        enforce_eager=True,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=8192,
        max_num_seqs=2,
        max_num_batched_tokens=8192,
        kv_transfer_config={
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "engine.backends.vllm.connector",
            "kv_role": "kv_producer",
        },
    )


def share_read(
    llm: Any, prefix: list[int], requests: int, *, is_marked: bool, has_others: bool
) -> float:
    """The part of the prompts' tokens that vLLM read; those of others are not counted."""
    from vllm import SamplingParams

    rng, read, total = random.Random(7), 0, 0
    plain = SamplingParams(max_tokens=1, temperature=0)
    for index in range(requests):
        ours = {
            "request_id": f"{is_marked}-{has_others}-{index}",
            "scope": "bench",
            "token": TOKEN,
            "wants": [{"key": "prefix", "tokens": len(prefix), "expires_at": 1.0}],
            "read": "prefix" if index else None,
        }
        params = plain.clone()
        if is_marked:
            params.extra_args = {"kv_transfer_params": {"holdfast": ours}}
        prompt = {"prompt_token_ids": prefix + draw(rng, len(prefix) // 2)}
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        read += output.num_cached_tokens
        total += len(output.prompt_token_ids)
        for _ in range(OTHERS if has_others else 0):
            other = {"prompt_token_ids": draw(rng, len(prefix))}
            llm.generate(other, plain, use_tqdm=False)
    return read / total


def main() -> int:
    arguments = parse(__doc__, requests=(8, "with one prefix and a tail of their own"))
    os.environ.update(ENVIRONMENT)
    from tests.engine.backends.vllm.models import write_qwen3_next

    print(machine_line())
    with tempfile.TemporaryDirectory() as directory:
        llm = start(str(write_qwen3_next(Path(directory) / "model")))
        core = llm.llm_engine.engine_core.engine_core
        core.holdfast_bind(TOKEN)
        block = core.scheduler.block_size
        prefix = draw(random.Random(3), 2 * block + block // 2)
        num, prompt = arguments.requests, len(prefix) + len(prefix) // 2
        most = 2 * block / prompt * (1 - 1 / num)
        print(
            f"{num} prompts of {prompt} tokens, {len(prefix)} of them the same; blocks of {block},"
            f" {BLOCKS} in the pool; {most:.1%} is the most that can be read"
        )
        for has_others in (False, True):
            shares = []
            for is_marked in (False, True):
                shares.append(
                    share_read(llm, prefix, num, is_marked=is_marked, has_others=has_others)
                )
                core.holdfast_release(["prefix"])
                assert llm.reset_prefix_cache()
            between = f"{OTHERS} prompts of others after each" if has_others else "nothing between"
            print(f"{between}: {shares[0]:.1%} read without marks, {shares[1]:.1%} with one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
