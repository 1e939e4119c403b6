"""A prefix of 10k tokens, and then other traffic of ten times the pool: how much of it stays?

Three runs, each in a fresh engine with the same pool, the same prefix and the same flood:

- `leased`: marked, and leases may hold half of the pool.
- `best-effort`: marked, and leases may hold nothing. The entry is readable only while its blocks
  happen to be in memory.
- `unmarked`: no breakpoint, so the least recently used content goes first.

The prefix is sent once before the flood. After it the prefix is sent again with another question,
and the usage says what was read. The flood's prompts share nothing with each other. They answer for
long enough to be in memory together, and together they need more than the pool has beside the
prefix. So the flood takes every block that it may take.

`synthetic` has the real pool, entries and scheduler, but no model. `native` computes.
"""

import argparse
import asyncio
import sys
import time

from engine.backends.local import LocalBackend
from scripts.bench.common import (
    BLOCK_SIZE,
    DEMO_MODEL,
    Render,
    ask,
    new_request,
    new_settings,
    renderer_of,
    running_backend,
    text_of_tokens,
)
from scripts.bench.report import machine_line, table
from scripts.setup.options import parse

KINDS = {"leased": (True, 0.5), "best-effort": (True, 0.0), "unmarked": (False, 0.5)}
"""Whether the prefix is marked, and the part of the pool that leases may hold."""
HEADINGS = (
    "prefix",
    "prompt",
    "flood",
    "flood s",
    "evicted blocks",
    "read",
    "automatic",
    "computed",
    "ms before",
    "ms after",
)


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
    is_kept = True
    for backend in ["synthetic", "native"] if options.backend == "both" else [options.backend]:
        rows = []
        for kind in KINDS:
            row, is_read = asyncio.run(run(backend, kind, options))
            rows.append(row)
            is_kept &= is_read or kind != "leased"
        note = "no model, no time" if backend == "synthetic" else "the demo model computes"
        print(
            f"\n{backend} ({note}): pool {options.pool:,} tokens in blocks of {BLOCK_SIZE}, flood"
            f" in prompts of {options.request:,}, {options.at_once} at once"
        )
        print(table(HEADINGS, rows))
    print("\nthe leased prefix was read in full" if is_kept else "\nLOST: a leased prefix")
    return 0 if is_kept else 1


async def run(backend: str, kind: str, options: argparse.Namespace) -> tuple[list[str], bool]:
    """A row of figures, and whether all written tokens were read."""
    is_marked, lease_share = KINDS[kind]
    settings = new_settings(
        backend=backend,
        num_blocks=options.pool // BLOCK_SIZE,
        lease_share=lease_share,
        synthetic_prefill_us=0,
        synthetic_decode_ms=0,
    )
    render = renderer_of(None if backend == "synthetic" else DEMO_MODEL)
    prefix = text_of_tokens(render, "The prefix that matters", options.prefix)
    request = new_request("before", prefix, "First?", max_tokens=1, is_marked=is_marked)
    again = new_request("after", prefix, "And now?", max_tokens=1, is_marked=is_marked)
    async with running_backend(settings) as engine:
        before = await ask(engine, request)
        begun = time.perf_counter()
        flood_tokens = await flood(engine, render, options)
        seconds = time.perf_counter() - begun
        after = await ask(engine, again)
        stats = await engine.stats()
    usage = after.usage
    written_tokens = before.usage.prompt_tokens - before.usage.input_tokens
    counts = usage.cache_read_tokens, usage.automatic_tokens, usage.computed_tokens
    times = before.first_seconds, after.first_seconds
    row = [kind, f"{before.usage.prompt_tokens:,}", f"{flood_tokens:,}", f"{seconds:.1f}"]
    row += [f"{number:,}" for number in (stats.counters.evicted_blocks, *counts)]
    return [
        *row,
        *(f"{time * 1e3:.0f}" for time in times),
    ], usage.cache_read_tokens == written_tokens > 0


async def flood(engine: LocalBackend, render: Render, options: argparse.Namespace) -> int:
    """Send unmarked prompts of equal length, `--at-once` of them at any time. Return how many
    tokens they had together."""
    model = "Flood 100000"
    tokens = 0
    index = 100_000
    text = text_of_tokens(render, model, options.request)

    async def client() -> None:
        nonlocal tokens, index
        while tokens < options.times * options.pool:
            index += 1
            name = f"f{index}"
            flood_text = text.replace(model, f"Flood {index}")
            request = new_request(name, flood_text, "?", max_tokens=options.output, is_marked=False)
            answer = await ask(engine, request)
            await engine.acknowledge([name])
            assert answer.usage.computed_tokens > 0.9 * answer.usage.prompt_tokens
            tokens += answer.usage.prompt_tokens

    await asyncio.gather(*(client() for _ in range(options.at_once)))
    return tokens


if __name__ == "__main__":
    sys.exit(main())
