"""A prefix of 10k tokens and then other traffic of ten times the pool: what is left of it?

Three runs, each in a fresh engine with the same pool, the same prefix and the same flood:
`leased` (marked, leases may hold half of the pool), `best-effort` (marked, leases may hold
nothing, so the entry is readable only while its blocks happen to be in memory) and `unmarked` (no
breakpoint: least recently used goes first). Before the flood the prefix is sent once; after it,
again with another question, and the usage says what was read. The flood's prompts share nothing
with each other. They answer long enough to be in memory together, and together they want more than
the pool has beside the prefix, so that every block is taken that may be taken.

`synthetic` has the real pool, entries and scheduler and no model; `native` computes.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.backends.looped import LoopedBackend
from engine.protocol import CountRequest, GenerateRequest, Message, Prompt, Stats, TextPart
from scripts.bench.common import (
    BLOCK_SIZE,
    EngineAnswer,
    ask,
    new_request,
    new_settings,
    numbered_text,
    running_backend,
    text_of_tokens,
)
from scripts.bench.report import machine_line, table_of
from scripts.setup.options import parse

# Name -> is the prefix marked, and the part of the pool that leases may hold.
KINDS = {"leased": (True, 0.5), "best-effort": (True, 0.0), "unmarked": (False, 0.5)}


@dataclass(frozen=True, slots=True)
class Flooded:
    """`prefix_tokens`: where the system block ends. `before`, `after`: the two answers."""

    kind: str
    prefix_tokens: int
    before: EngineAnswer
    after: EngineAnswer
    flood_tokens: int
    seconds: float
    stats: Stats

    @property
    def kept(self) -> float:
        usage = self.after.usage
        return min((usage.cache_read_tokens + usage.automatic_tokens) / self.prefix_tokens, 1)


def main() -> int:
    options = parse(
        __doc__,
        backend=("both", None, ["native", "synthetic", "both"]),
        prefix=10_000,
        pool=(24_000, "tokens in the pool"),
        times=(10, "flood in sizes of the pool"),
        request=(2_000, "tokens of a flood request"),
        at_once=(8, "flood requests at the same time"),
        output=(64, "tokens that each of them answers"),
    )
    print(machine_line())
    backends = ["synthetic", "native"] if options.backend == "both" else [options.backend]
    is_kept = True
    for backend in backends:
        outcomes = [asyncio.run(run(backend, kind, options)) for kind in KINDS]
        report(backend, outcomes, options)
        leased = outcomes[0]
        is_kept &= leased.after.usage.cache_read_tokens == leased.prefix_tokens
    print("\nthe leased prefix was read in full" if is_kept else "\nLOST: a leased prefix")
    return 0 if is_kept else 1


async def run(backend: str, kind: str, options: argparse.Namespace) -> Flooded:
    is_marked, lease_share = KINDS[kind]
    settings = new_settings(
        backend=backend,
        num_blocks=options.pool // BLOCK_SIZE,
        lease_share=lease_share,
        synthetic_prefill_us=0,
        synthetic_decode_ms=0,
    )
    async with running_backend(settings) as engine:
        prefix = await text_of(engine, "The prefix that matters", options.prefix)
        first = new_request("before", prefix, "First?", max_tokens=1, is_marked=is_marked)
        again = new_request("after", prefix, "And now?", max_tokens=1, is_marked=is_marked)
        prefix_tokens = await end_of_system(engine, first)
        before = await ask(engine, first)
        begun = time.perf_counter()
        flood_tokens = await flood(engine, options)
        seconds = time.perf_counter() - begun
        after = await ask(engine, again)
        stats = await engine.stats()
    return Flooded(kind, prefix_tokens, before, after, flood_tokens, seconds, stats)


async def flood(engine: LoopedBackend, options: argparse.Namespace) -> int:
    """Unmarked prompts of equal length, `--at-once` of them at any time; the tokens of all."""
    lines = (await text_of(engine, "Flood 100000", options.request)).count("\n")
    wanted = options.times * options.pool
    tokens, index = 0, 100_000

    async def client() -> None:
        nonlocal tokens, index
        while tokens < wanted:
            index += 1
            text = numbered_text(f"Flood {index}", lines)
            name = f"f{index}"
            request = new_request(name, text, "?", max_tokens=options.output, is_marked=False)
            answer = await ask(engine, request)
            await engine.acknowledge([name])
            assert answer.usage.computed_tokens > 0.9 * answer.usage.prompt_tokens
            tokens += answer.usage.prompt_tokens

    await asyncio.gather(*(client() for _ in range(options.at_once)))
    return tokens


async def text_of(engine: LoopedBackend, label: str, num_tokens: int) -> str:
    """A text of at least so many tokens, counted by the engine itself."""
    described = CountRequest("bench", Prompt([Message("user", [TextPart("?")])]))
    scaffold = (await engine.count(described)).input_tokens
    loop = asyncio.get_running_loop()

    def count(text: str) -> int:
        prompt = Prompt([Message("user", [TextPart("?")])], system=[TextPart(text)])
        counting = engine.count(CountRequest("bench", prompt))
        return asyncio.run_coroutine_threadsafe(counting, loop).result().input_tokens - scaffold

    return await asyncio.to_thread(partial(text_of_tokens, count, label, num_tokens))


async def end_of_system(engine: LoopedBackend, request: GenerateRequest) -> int:
    reply = await engine.count(CountRequest(request.scope, request.prompt))
    end = reply.segment_tokens[0]
    assert end is not None
    return end


def report(backend: str, outcomes: list[Flooded], options: argparse.Namespace) -> None:
    note = "no model, no time" if backend == "synthetic" else "the demo model computes"
    print(
        f"\n{backend} ({note}): pool {options.pool:,} tokens in blocks of {BLOCK_SIZE}, flood in"
        f" prompts of {options.request:,}, {options.at_once} at once"
    )
    columns: dict[str, str | Callable[[Flooded], str]] = {
        "prefix": "{.kind}",
        "tokens": "{.prefix_tokens:,}",
        "flood": "{.flood_tokens:,}",
        "flood s": "{.seconds:.1f}",
        "evicted blocks": "{.stats.counters.evicted_blocks:,}",
        "read": "{.after.usage.cache_read_tokens:,}",
        "automatic": "{.after.usage.automatic_tokens:,}",
        "computed": "{.after.usage.computed_tokens:,}",
        "kept": "{.kept:.1%}",
        "ms before": lambda one: f"{one.before.first_seconds * 1e3:.0f}",
        "ms after": lambda one: f"{one.after.first_seconds * 1e3:.0f}",
    }
    print(table_of(outcomes, columns))


if __name__ == "__main__":
    sys.exit(main())
