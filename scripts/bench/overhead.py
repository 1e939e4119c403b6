"""What the engine itself costs, without a model: look-up, leases, scheduler, each by itself.

No model computes here. The prefix cache, the entries and the scheduler are the engine's own and run
in this thread; the synthetic runner behind the scheduler answers at once. Token ids are random
(seeded), so rendering and tokenizing are measured apart, on text, with the demo model's template
and tokenizer. CPU time stands beside the clock's: they differ where something else has the CPU.
`--profile` says which lines the time goes to.
"""

import argparse
import cProfile
import gc
import pstats
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import TokenId
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, CacheResult, PrefixCache
from engine.cache.table import BlockTable
from engine.protocol import MAX_NAMES, Breakpoint, HeldName, Message, Prompt, TextPart
from engine.schedule.scheduler import PrefillChunk
from engine.text.renderer import ChatRenderer
from scripts.bench.common import (
    DEMO_MODEL,
    SteppedEngine,
    Times,
    load_synthetic,
    new_request,
    new_settings,
    numbered_text,
    text_of_tokens,
)
from scripts.bench.report import machine_line, table

BLOCK_SIZE = 16
LEASE_TOKENS = 16_000
BATCH = 32
VOCABULARY = 32_000
NUM_SEGMENTS = 40

Row = tuple[str, Times, float | None]
"""What was measured and the median's target in seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="profile what is timed (slower)")
    options = parser.parse_args()
    print(machine_line())
    print(f"blocks of {BLOCK_SIZE} tokens, {options.repeats} repeats; no model computes\n")
    profile = cProfile.Profile() if options.profile else None
    rows = [
        *measure_warm_prompt(options.tokens, options.repeats, profile),
        *measure_leases(options.repeats, profile),
        *measure_steps(2_000, options.repeats, profile),
        *measure_steps(8_000, options.repeats, profile),
        *measure_rendering(options.tokens, max(options.repeats // 20, 3)),
    ]
    print(
        table(
            ("operation", "median ms", "p99 ms", "median CPU ms", "target ms", ""),
            [cells(*row) for row in rows],
        )
    )
    if profile is not None:
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(25)
    return 0


def cells(name: str, times: Times, target: float | None) -> Sequence[str]:
    verdict = "" if target is None else "met" if times.median <= target else "MISSED"
    return (
        name,
        f"{times.median * 1e3:.3f}",
        f"{times.p99 * 1e3:.3f}",
        f"{times.cpu_median * 1e3:.3f}",
        "" if target is None else f"{target * 1e3:g}",
        verdict,
    )


def profiled(profile: cProfile.Profile | None) -> AbstractContextManager[object]:
    return nullcontext() if profile is None else profile


# A long prompt whose prefix is in memory.


def measure_warm_prompt(
    num_tokens: int, repeats: int, profile: cProfile.Profile | None
) -> list[Row]:
    """The same prefix again and again, each time with another question of 100 tokens behind it."""
    num_blocks = 2 * num_tokens // BLOCK_SIZE + 64
    cache = new_cache(num_blocks)
    rng = random.Random(0)
    prefix = [rng.randrange(VOCABULARY) for _ in range(num_tokens - 100)]
    write_prefix(cache, prefix)
    gc.collect()
    gc.freeze()  # as the engine does once it has loaded
    whole, digesting, matching, holding, writing, ending = (Times() for _ in range(6))
    for index in range(repeats):
        tokens = prefix + [rng.randrange(VOCABULARY) for _ in range(100)]
        names = new_names(len(prefix), index)
        with profiled(profile), whole.measure():
            with digesting.measure():
                query = new_query(cache, tokens, len(prefix), names, now=1.0 + index / 1e3)
            with matching.measure():
                found = cache.look_up(query)
            with holding.measure():
                block_table = cache.new_table(query)
                cache.begin(query, found, block_table)
                block_ids = block_table.block_ids
        assert found.reused == len(prefix) and len(block_ids) == -(-num_tokens // BLOCK_SIZE)
        block_table.commit(tokens[len(prefix) :])
        with writing.measure():
            cache.write(query, found, block_table, query.arrived_at)
        with ending.measure():
            block_table.release()
    label = f"{num_tokens:,}-token prompt, warm"
    return [
        (f"{label}: match + hold + table", whole, 0.020),
        ("  of that: pack and chain digests", digesting, None),
        ("  of that: match, verify, hold (look_up)", matching, None),
        ("  of that: reuse, allocate, table (begin)", holding, None),
        (f"  afterwards: entries and {MAX_NAMES} names (write)", writing, None),
        ("  afterwards: release", ending, None),
    ]


def new_cache(num_blocks: int) -> PrefixCache:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    hasher = ChainHasher(b"a fixed key makes runs alike", BLOCK_SIZE)
    return PrefixCache(pool, Entries(pool, lease_share=0.9), hasher)


def write_prefix(cache: PrefixCache, prefix: Sequence[TokenId]) -> CacheResult:
    """One request computes it, marked at its end, and is over."""
    query = new_query(cache, [*prefix, 7], len(prefix), [], now=0.0)
    found = cache.look_up(query)
    block_table = cache.new_table(query)
    cache.begin(query, found, block_table)
    block_table.commit(query.tokens)
    written = cache.write(query, found, block_table, 0.0)
    block_table.release()
    return written


def new_query(
    cache: PrefixCache,
    tokens: Sequence[TokenId],
    marked: int,
    names: Sequence[HeldName],
    *,
    now: float,
) -> CacheQuery:
    """Segments of equal length up to the mark, one behind it."""
    ends = [marked * (i + 1) // NUM_SEGMENTS for i in range(NUM_SEGMENTS)] + [len(tokens)]
    return CacheQuery(
        scope="bench",
        tokens=tokens,
        digests=cache.digests("bench", tokens),
        segments=[Segment("text", end) for end in ends],
        breakpoints=[Breakpoint(NUM_SEGMENTS - 1)],
        names=names,
        min_tokens=1024,
        arrived_at=now,
    )


def new_names(num_tokens: int, seed: int) -> list[HeldName]:
    """As many as a request may carry; all but the last are those of the prefix."""
    names = [HeldName(f"{i:016x}", num_tokens * (i + 1) // MAX_NAMES) for i in range(MAX_NAMES - 1)]
    return [*names, HeldName(f"{seed:08x}ffffffff", num_tokens)]


# Leases.


def measure_leases(repeats: int, profile: cProfile.Profile | None) -> list[Row]:
    """Created while the writer holds the blocks, dropped when it is gone; as it happens in use."""
    cache = new_cache(2 * LEASE_TOKENS // BLOCK_SIZE)
    rng = random.Random(1)
    created, dropped, taken_again = Times(), Times(), Times()
    for _ in range(repeats):
        tokens = [rng.randrange(VOCABULARY) for _ in range(LEASE_TOKENS)]
        digests = cache.digests("bench", tokens)
        block_table = BlockTable(cache.pool, cache._hasher, digests.root)
        block_table.prepare(len(tokens))
        block_table.commit(tokens)
        with profiled(profile), created.measure():
            entry = cache.entries.write(
                "bench",
                digests.at(LEASE_TOKENS),
                block_table.blocks,
                tokens=LEASE_TOKENS,
                ttl="5m",
                arrived_at=0.0,
                now=0.0,
            )
        assert entry is not None and entry.is_leased
        block_table.release()
        with taken_again.measure():
            cache.entries.refresh(entry, 1.0)
        with profiled(profile), dropped.measure():
            count = cache.entries.drop("bench")
        assert count == 1
        cache.entries.leases.take_ended()
    return [
        (f"lease of {LEASE_TOKENS:,} tokens created", created, 0.001),
        (f"lease of {LEASE_TOKENS:,} tokens dropped", dropped, 0.001),
        ("  a live lease refreshed", taken_again, None),
    ]


# Steps.


def measure_steps(context: int, repeats: int, profile: cProfile.Profile | None) -> list[Row]:
    """32 sequences decode; every step is timed whole, and the scheduler's part of it."""
    settings = new_settings(
        num_blocks=BATCH * (context + repeats + 64) // BLOCK_SIZE + 64,
        synthetic_prefill_us=0,
        synthetic_decode_ms=0,
    )
    parts = load_synthetic(settings, lambda _stage, _fraction: None)
    engine = SteppedEngine(parts, settings, step_tokens=8192)
    text = numbered_text(f"context {context}", 4 * context // 60)[: 4 * context]
    for index in range(BATCH):
        scope = f"tenant {index}"  # nothing shared: the tables are as long as they get
        engine.submit(new_request(f"r{index}", text, "?", max_tokens=repeats + 100, scope=scope))
    while any(sequence.num_pending > 1 for sequence in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.loop.step()
    scheduling, whole = Times(), Times()
    # Only this benchmark looks into a step: the seam is not worth a hook in the engine.
    engine.scheduler.schedule = timed(engine.scheduler.schedule, scheduling)  # type: ignore
    for _ in range(repeats):
        with profiled(profile), whole.measure():
            engine.loop.step()
    assert len(engine.scheduler.running) == BATCH
    label = f"batch {BATCH}, {context:,}-token contexts"
    return [
        (f"{label}: scheduler per decode step", scheduling, 0.0005),
        ("  the whole step without the model", whole, None),
    ]


def timed(
    schedule: Callable[[float], list[PrefillChunk]], times: Times
) -> Callable[[float], list[PrefillChunk]]:
    def run(now: float) -> list[PrefillChunk]:
        with times.measure():
            return schedule(now)

    return run


# Rendering.


def measure_rendering(num_tokens: int, repeats: int) -> list[Row]:
    """The demo model's template and tokenizer: a new text, and the same with another question."""
    renderer = ChatRenderer.from_model(str(DEMO_MODEL))

    def count(text: str) -> int:
        return len(renderer.tokenizer.encode(text, add_special_tokens=False).ids)

    cold, warm = Times(), Times()
    for index in range(repeats):
        text = text_of_tokens(count, f"Render {index}", num_tokens)
        for question, times in (("What is a lease?", cold), ("What is an entry?", warm)):
            prompt = Prompt([Message("user", [TextPart(question)])], system=[TextPart(text)])
            with times.measure():
                rendered = renderer.render(prompt, thinking=False, scope="bench")
            assert len(rendered.token_ids) >= num_tokens
    return [
        (f"render and tokenize {num_tokens:,} tokens, new text", cold, None),
        ("  the same prefix, another question", warm, None),
    ]


if __name__ == "__main__":
    sys.exit(main())
