"""KV memory that is allocated and not used, and what sharing a prefix saves. No model computes.

Waste: requests of mixed lengths keep the engine full (closed loop), and after every step the
pool is asked how many tokens its referenced blocks have room for and how many they hold. Beside
it, on the same running requests: what would be allocated if each got contiguous memory for the
longest request there may be.
The engine's own cache, scheduler and lifecycle; the synthetic runner stands in for the model, which
decides how long a step takes and nothing else here.

Sharing: 64 requests with one 8k prefix and questions of their own, all decoding; the referenced
blocks with the scope shared, and with a scope each (nothing shared).
"""

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.pool import BlockPool
from engine.sizing import kv_size
from scripts.bench.common import (
    BLOCK_SIZE,
    Sent,
    SteppedEngine,
    new_request,
    synthetic_settings,
)
from scripts.bench.report import machine_line, percentile, table, table_of, verdict
from scripts.setup.options import parse

BATCH = 32
TARGET = 0.04
STEP_TOKENS = {"cpu": 256, "cuda": 2048}
LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output tokens are log-uniform between these bounds, and independent."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def longest(self) -> int:
        return self.prompt[1] + self.output[1]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return _log_uniform(rng, self.prompt), _log_uniform(rng, self.output)


# The first is what the target is for; the others show what it depends on.
LENGTHS = (
    Lengths("mixed", (64, 4096), (16, 512)),
    Lengths("chat", (32, 1024), (32, 1024)),
    Lengths("short", (16, 64), (16, 64)),
)


@dataclass(slots=True)
class Waste:
    """Sums over the counted steps, in tokens. `pending`: allocated for prompt tokens to come."""

    allocated: int = 0
    used: int = 0
    pending: int = 0
    contiguous: int = 0
    contiguous_used: int = 0
    shares: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return 1 - self.used / self.allocated


def main() -> int:
    options = parse(__doc__, steps=(4000, "that are counted, after as many that are not"), seed=0)
    print(f"{machine_line()}\nsynthetic runner: no model computes; blocks of {BLOCK_SIZE} tokens\n")
    wastes = [
        (lengths, device, measure_waste(lengths, STEP_TOKENS[device], options.steps, options.seed))
        for lengths in LENGTHS
        for device in STEP_TOKENS
    ]
    report_waste(wastes, options)
    print()
    report_sharing(requests=64, prefix_tokens=8192)
    is_met = all(waste.share < TARGET for lengths, _, waste in wastes if lengths is LENGTHS[0])
    return 0 if is_met else 1


def measure_waste(lengths: Lengths, step_tokens: int, steps: int, seed: int) -> Waste:
    """There is always one more request waiting, so the batch is full."""
    rng = random.Random(seed)
    engine = new_engine(BATCH * lengths.longest // BLOCK_SIZE, BATCH, step_tokens)
    waste, running = Waste(), list[Sent]()
    num_sent = 0
    for step in range(2 * steps):
        running = [sent for sent in running if not sent.is_over]
        while len(running) <= BATCH:
            num_sent += 1
            prompt, output = lengths.draw(rng)
            # Four bytes are a token here, and four tokens are the scaffold's.
            text = f"{num_sent:08d}".ljust(4 * max(prompt - 4 - 1, 2), "x")
            request = new_request(f"r{num_sent}", text, "?", max_tokens=output, is_marked=False)
            running.append(engine.submit(request))
        engine.loop.step()
        if step >= steps:
            count(waste, engine, lengths)
    return waste


def count(waste: Waste, engine: SteppedEngine, lengths: Lengths) -> None:
    allocated, used = pool_tokens(engine.pool)
    if not allocated:
        return
    waste.allocated += allocated
    waste.used += used
    waste.shares.append(1 - used / allocated)
    for sequence in engine.scheduler.running:
        held = sequence.table.num_tokens
        waste.pending += max(len(sequence.request.query.tokens) - held, 0)
        waste.contiguous_used += held
        waste.contiguous += lengths.longest


def pool_tokens(pool: BlockPool) -> tuple[int, int]:
    """What the referenced blocks have room for, and what they hold; shared ones count once."""
    referenced = [block for block in pool.blocks if block.ref_count]
    return len(referenced) * pool.block_size, sum(map(pool.num_tokens, referenced))


def new_engine(num_blocks: int, max_running: int, step_tokens: int) -> SteppedEngine:
    settings = synthetic_settings(num_blocks, max_running=max_running)
    return SteppedEngine(settings, step_tokens=step_tokens)


def report_waste(wastes: list[tuple[Lengths, str, Waste]], options: argparse.Namespace) -> None:
    print(f"allocated but unused, {BATCH} running, {options.steps:,} steps, seed {options.seed}")
    columns: dict[str, str | Callable[[tuple[Lengths, str, Waste]], str]] = {
        "load": "{0[0].name}",
        "prompt": "{0[0].prompt[0]}-{0[0].prompt[1]}",
        "output": "{0[0].output[0]}-{0[0].output[1]}",
        "tokens a step": lambda row: str(STEP_TOKENS[row[1]]),
        "held": lambda row: f"{row[2].used / len(row[2].shares):,.0f}",
        "unused": "{0[2].share:.2%}",
        "in last blocks": lambda row: f"{row[2].share - row[2].pending / row[2].allocated:.2%}",
        "prompt to come": lambda row: f"{row[2].pending / row[2].allocated:.2%}",
        "p99 step": lambda row: f"{percentile(row[2].shares, 0.99):.2%}",
        "contiguous": lambda row: f"{1 - row[2].contiguous_used / row[2].contiguous:.1%}",
    }
    print(table_of(wastes, columns))
    worst = max(waste.share for lengths, _, waste in wastes if lengths is LENGTHS[0])
    told = verdict(worst < TARGET)
    print(f"\ntarget under {TARGET:.0%} at the mixed load: {worst:.2%} at most, {told}")


def report_sharing(requests: int, prefix_tokens: int) -> None:
    shared = blocks_in_use(requests, prefix_tokens, is_shared=True)
    apart = blocks_in_use(requests, prefix_tokens, is_shared=False)
    block_bytes = BLOCK_SIZE * kv_size(LLAMA_3_8B, "float16").bytes_per_token
    print(f"{requests} requests decoding, one prefix of {prefix_tokens:,} tokens, own questions")
    rows = [
        (name, f"{blocks:,}", f"{blocks * BLOCK_SIZE:,}", f"{blocks * block_bytes / 2**30:.2f}")
        for name, blocks in (("shared", shared), ("nothing shared", apart))
    ]
    print(table(("", "blocks", "tokens", "GiB were it Llama-3-8B in float16"), rows))
    print(f"{apart / shared:.1f} times less memory")


def blocks_in_use(requests: int, prefix_tokens: int, *, is_shared: bool) -> int:
    """Referenced blocks when all of them have answered their first tokens."""
    blocks_each = -(-(prefix_tokens + 256) // BLOCK_SIZE)
    engine = new_engine(requests * blocks_each, requests, 2048)
    prefix = "A prefix that all share.".ljust(4 * prefix_tokens, "p")
    sent = []
    for index in range(requests):
        question = f"Question {index:06d}: ".ljust(128, "q")
        scope = "all" if is_shared else f"tenant {index}"
        request = new_request(f"r{index}", prefix, question, max_tokens=100_000, scope=scope)
        sent.append(engine.submit(request))
    for _ in range(requests * math.ceil(prefix_tokens / 2048) + 64):
        engine.loop.step()
        if all(one.state.started_at is not None for one in sent):
            break
    engine.loop.step()
    assert len(engine.scheduler.running) == requests
    engine.pool.check()
    return sum(block.ref_count > 0 for block in engine.pool.blocks)


def _log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    return round(math.exp(rng.uniform(*map(math.log, bounds))))


if __name__ == "__main__":
    sys.exit(main())
