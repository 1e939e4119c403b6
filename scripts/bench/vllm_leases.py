"""What our connector costs vLLM, and what it keeps. Run with the Python of a vLLM environment.

    .venv-vllm/bin/python -m scripts.bench.vllm_leases [--requests 48]

One vLLM with a tiny model, in this process. Measured is the processor time inside the connector's
hooks, and what our wraps of its cache manager add, as shares of the time of vLLM's steps. Then the
pool is flooded ten times over with a marked prefix in it; printed is also the longest time without
a scheduled step while a request waited. Ends with 1 where the marked prefix was not read in full
after the flood.
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

BLOCKS, BLOCK_TOKENS = 512, 32
FULL = 0.8
PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 640, 100, 48
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
    """Processor time of this thread inside callables, nested ones counted once per watch.

    The model is computed in the same thread, so another program's turns are in neither.
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

        self.steps, self.hooks, self.inner, self.outer = (Stopwatch() for _ in range(4))
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
        self._watch()

    def _watch(self) -> None:
        scheduler = self._core.scheduler
        self._core.step_fn = self.steps.wrap(self._core.step_fn)
        for name in HOOKS:
            setattr(scheduler.connector, name, self.hooks.wrap(getattr(scheduler.connector, name)))
        cache = scheduler.kv_cache_manager
        cache.allocate_slots = self.outer.wrap(cache.allocate_slots)

    def _params(self, tokens: int, directive: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        self._num += 1
        ours = {"request_id": str(self._num), "scope": "bench", "token": TOKEN, "wants": []}
        extra = {"kv_transfer_params": {"holdfast": ours | directive}}
        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=extra)

    def _generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self._llm.generate(inputs, params, use_tqdm=False))

    def round(self, seed: int, requests: int) -> None:
        """Requests of eight conversations, each with a marked prefix."""
        rng = random.Random(seed)
        prefixes = [draw(rng, PREFIX_TOKENS) for _ in range(8)]
        prompts, params = [], []
        for index in range(requests):
            which = index % len(prefixes)
            key = f"{seed}-{which}"
            want = {"key": key, "tokens": PREFIX_TOKENS, "expires_at": float(seed)}
            read = {"read": key, "read_tokens": PREFIX_TOKENS} if index >= len(prefixes) else {}
            prompts.append(prefixes[which] + draw(rng, TAIL_TOKENS))
            params.append(self._params(OUTPUT_TOKENS, {"wants": [want], **read}))
        self._generate(prompts, params)
        self._core.holdfast_release([f"{seed}-{which}" for which in range(len(prefixes))])

    def share(self, requests: int) -> dict[str, float]:
        """Time inside hooks and wraps, as shares of the steps' time, over one round."""
        return self._shares(lambda: self.round(0, requests))

    def foreign(self, requests: int, *, is_full: bool) -> dict[str, float]:
        """The same for requests without a directive, with leases empty or full."""
        rng = random.Random(requests)
        stats, keys = self._core.holdfast_stats(), []
        while is_full and stats["leased_blocks"] < FULL * stats["max_leased_blocks"]:
            keys.append(f"full-{self._num}")
            want = {"key": keys[-1], "tokens": PREFIX_TOKENS, "expires_at": 9e9}
            marked = self._params(1, {"wants": [want]})
            self._generate([draw(rng, PREFIX_TOKENS + TAIL_TOKENS)], [marked])
            stats = self._core.holdfast_stats()
        from vllm import SamplingParams

        plain = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
        prompts = [draw(rng, PREFIX_TOKENS // 4 + TAIL_TOKENS) for _ in range(requests)]
        found = self._shares(lambda: self._generate(prompts, [plain] * requests))
        self._core.holdfast_release(keys)
        return {**found, "leased_blocks": stats["leased_blocks"]}

    def _shares(self, work: Callable[[], object]) -> dict[str, float]:
        for watch in (self.steps, self.hooks, self.inner, self.outer):
            watch.seconds = 0.0
        work()
        wraps = self.outer.seconds - self.inner.seconds
        steps = self.steps.seconds
        return {"steps_s": steps, "hooks": self.hooks.seconds / steps, "wraps": wraps / steps}

    def flood(self) -> dict[str, float]:
        """A marked prefix under ten pools of other traffic, then one that needs leases' room."""
        rng = random.Random(7)
        prefix = draw(rng, 4 * PREFIX_TOKENS)
        gap = LongestGap(self._core.scheduler)
        want = {"key": "kept", "tokens": len(prefix), "expires_at": 300.0}
        self._generate([[*prefix, 5]], [self._params(8, {"wants": [want]})])
        length = 1000
        num = 10 * BLOCKS * BLOCK_TOKENS // length + 1
        flood = [draw(rng, length) for _ in range(num)]
        self._generate(flood, [self._params(8, {}) for _ in flood])
        read = self._params(8, {"read": "kept", "read_tokens": len(prefix)})
        hit = self._generate([[*prefix, 5]], [read])[0].num_cached_tokens
        # Now leases over half the pool, and more at once than the rest can hold.
        for index in range(3):
            want = {"key": f"more{index}", "tokens": 1920, "expires_at": 200.0 + index}
            self._generate([draw(rng, 1930)], [self._params(2, {"wants": [want]})])
        leased = self._core.holdfast_stats()["leased_blocks"]
        self._generate([draw(rng, 4000) for _ in range(16)], [self._params(90, {})] * 16)
        stats = self._core.holdfast_stats()
        return {
            "flood_tokens": num * length,
            "pool_tokens": (BLOCKS - 1) * BLOCK_TOKENS,
            "prefix_tokens": len(prefix),
            "hit_tokens": hit,
            "leased_blocks": leased,
            "sacrificed": stats["sacrificed"],
            "longest_gap_s": gap.seconds,
            "steps": gap.steps,
            "empty_steps_in_a_row": gap.empty_in_a_row,
        }


class LongestGap:
    """The longest time between two steps with work while there was a request to serve."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds, self.steps, self.empty_in_a_row = 0.0, 0, 0
        self._since: float | None = None
        self._empty = 0
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            now = time.perf_counter()
            if output.total_num_scheduled_tokens:
                self.steps += 1
                self._empty = 0
                if self._since is not None:
                    self.seconds = max(self.seconds, now - self._since)
                self._since = now
            elif scheduler.get_num_unfinished_requests():
                self._empty += 1
                self.empty_in_a_row = max(self.empty_in_a_row, self._empty)
            else:
                self._since = None  # no request is there
            return output

        scheduler.schedule = watched


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 4000) for _ in range(length)]


def measure(model: Path, requests: int) -> bool:
    """Print the shares and the flood; whether the marked prefix was read in full after it."""
    worker = VllmWorker(str(model))
    worker.round(1, requests)
    print("inside hooks and wraps, of the time of steps (median of 9, and their range):")
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "requests with directives": lambda: worker.share(requests),
        "others', leases empty": lambda: worker.foreign(requests, is_full=False),
        "others', leases full": lambda: worker.foreign(requests, is_full=True),
    }
    for what, share in kinds.items():
        shares = [share() for _ in range(9)]
        sums = sorted(share["hooks"] + share["wraps"] for share in shares)
        told = [statistics.median(share[key] for share in shares) for key in ("hooks", "wraps")]
        print(
            f"  {what}: hooks {told[0]:.3%}, wraps {told[1]:.3%}; both {sums[4]:.3%}"
            f" ({sums[0]:.3%} to {sums[-1]:.3%});"
            f" {shares[-1].get('leased_blocks', 0)} blocks leased"
        )
    flood = worker.flood()
    print(
        f"marked prefix of {flood['prefix_tokens']} tokens, then {flood['flood_tokens']} others "
        f"through a pool of {flood['pool_tokens']}: {flood['hit_tokens']} tokens hit"
    )
    print(
        f"{flood['leased_blocks']} of {BLOCKS - 1} blocks leased, {flood['sacrificed']} leases "
        f"sacrificed; longest time without a scheduled step {flood['longest_gap_s']:.3f} s in "
        f"{flood['steps']} steps, {flood['empty_steps_in_a_row']} empty ones in a row at most"
    )
    return bool(flood["hit_tokens"] == flood["prefix_tokens"])


def main() -> int:
    arguments = parse(__doc__, requests=(48, "of one round"))
    os.environ.update(ENVIRONMENT)
    from tests.engine.backends.vllm.models import write_llama

    print(machine_line())
    with tempfile.TemporaryDirectory() as directory:
        model = write_llama(Path(directory) / "model")
        is_kept = measure(model, arguments.requests)
    print("the marked prefix was read in full" if is_kept else "LOST: the marked prefix")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
