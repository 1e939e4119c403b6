"""What our connector costs vLLM. Run with the Python of a vLLM environment.

    .venv-vllm/bin/python -m scripts.bench.vllm_leases [--requests 48]

One vLLM with a tiny model, in this process. Measured is the processor time inside the connector's
hooks, and what our wraps of its cache manager add, as shares of the time of vLLM's steps.
"""

import functools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.report import machine_line
from scripts.setup.options import parse

BLOCKS = 512
BLOCK_TOKENS = 32
PREFIX_TOKENS = 640
TAIL_TOKENS = 100
OUTPUT_TOKENS = 48
TOKEN = "the secret that our directives carry"
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "get_kv_connector_stats",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Stopwatch:
    """Processor time of this thread inside some callables.

    The model is computed in the same thread, so other programs' turns on the processor do not
    count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)  # the connector's start looks at signatures
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


class VllmWorker:
    """One vLLM with our connector, and the rounds it is asked for."""

    def __init__(self, model: str) -> None:
        from vllm import LLM
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.steps = Stopwatch()
        self.hooks = Stopwatch()
        self.inner = Stopwatch()
        self.outer = Stopwatch()
        KVCacheManager.allocate_slots = self.inner.wrap(KVCacheManager.allocate_slots)
        self._llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=BLOCKS,
            max_model_len=4096,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "HoldfastConnector",
                "kv_connector_module_path": "engine.backends.vllm.connector",
                "kv_role": "kv_producer",
            },
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._core.holdfast_bind(TOKEN)
        self._num = 0
        scheduler = self._core.scheduler
        self._core.step_fn = self.steps.wrap(self._core.step_fn)
        for name in HOOKS:
            setattr(scheduler.connector, name, self.hooks.wrap(getattr(scheduler.connector, name)))
        cache = scheduler.kv_cache_manager
        cache.allocate_slots = self.outer.wrap(cache.allocate_slots)

    def round(self, seed: int, requests: int) -> None:
        """The requests of eight conversations, each with a marked prefix."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        prefixes = [draw(rng, PREFIX_TOKENS) for _ in range(8)]
        inputs = []
        params = []
        for index in range(requests):
            self._num += 1
            conversation = index % len(prefixes)
            key = f"{seed}-{conversation}"
            directive = {
                "request_id": str(self._num),
                "scope": "bench",
                "token": TOKEN,
                "wants": [{"key": key, "tokens": PREFIX_TOKENS, "expires_at": float(seed)}],
                "read": key if index >= len(prefixes) else None,
            }
            inputs.append({"prompt_token_ids": prefixes[conversation] + draw(rng, TAIL_TOKENS)})
            params.append(
                SamplingParams(
                    max_tokens=OUTPUT_TOKENS,
                    temperature=0,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": {"holdfast": directive}},
                )
            )
        self._llm.generate(inputs, params, use_tqdm=False)
        self._core.holdfast_release([f"{seed}-{number}" for number in range(len(prefixes))])

    def share(self, requests: int) -> dict[str, float]:
        """Time inside hooks and wraps, as shares of the steps' time, over one round."""
        for watch in (self.steps, self.hooks, self.inner, self.outer):
            watch.seconds = 0.0
        self.round(0, requests)
        wraps = self.outer.seconds - self.inner.seconds
        steps = self.steps.seconds
        return {"hooks": self.hooks.seconds / steps, "wraps": wraps / steps}


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 4000) for _ in range(length)]


def main() -> int:
    arguments = parse(__doc__, requests=(48, "of one round"))
    os.environ.update(ENVIRONMENT)
    from tests.engine.backends.vllm.models import write_llama

    print(machine_line())
    with tempfile.TemporaryDirectory() as directory:
        worker = VllmWorker(str(write_llama(Path(directory) / "model")))
        worker.round(1, arguments.requests)
        shares = [worker.share(arguments.requests) for _ in range(9)]
    sums = sorted(share["hooks"] + share["wraps"] for share in shares)
    hooks = statistics.median(share["hooks"] for share in shares)
    wraps = statistics.median(share["wraps"] for share in shares)
    print(
        f"of the time of steps (median of 9): hooks {hooks:.3%}, wraps {wraps:.3%};"
        f" both {sums[4]:.3%} ({sums[0]:.3%} to {sums[-1]:.3%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
