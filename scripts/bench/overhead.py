"""What the engine itself costs, without a model: look-up, leases, scheduler, each by itself.

No model computes here. The prefix cache, the entries and the scheduler are the engine's own and run
in this thread. The synthetic runner behind the scheduler answers at once. Token ids are random
(seeded); `python -m scripts.docs.templates --cost` measures rendering and tokenizing. CPU time
stands beside the clock's: they differ where something else has the CPU.
"""

import gc
import random
import sys
from collections.abc import Callable, Sequence

from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import TokenId
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.cache.table import BlockTable
from engine.protocol import MAX_NAMES, Breakpoint, HeldName
from engine.schedule.chunks import PrefillChunk
from scripts.bench.common import (
    BLOCK_SIZE,
    SteppedEngine,
    Timings,
    new_request,
    numbered_text,
    synthetic_settings,
)
from scripts.bench.report import machine_line, table_of, verdict
from scripts.setup.options import parse

LEASE_TOKENS = 16_000
BATCH = 32
VOCABULARY = 32_000
NUM_SEGMENTS = 40
SPARE_TOKENS = 512
"""Room for what a sequence of the batch answers while the last prompts are still computed."""


class Operations:
    """The timings of every operation by its name, in the order of the table."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.timings: dict[str, Timings] = {}

    def named(self, name: str, target: float | None = None) -> Timings:
        return self.timings.setdefault(name, Timings(target))


def main() -> int:
    options = parse(__doc__, tokens=(100_000, "length of the prompt"), repeats=200)
    print(machine_line())
    print(f"blocks of {BLOCK_SIZE} tokens, {options.repeats} repeats; no model computes\n")
    operations = Operations(options.repeats)
    measure_warm_prompt(options.tokens, operations)
    measure_leases(operations)
    measure_steps(2_000, operations)
    measure_steps(8_000, operations)
    columns: dict[str, str | Callable[[tuple[str, Timings]], str]] = {
        "operation": "{0[0]}",
        "median ms": lambda row: f"{row[1].median * 1e3:.3f}",
        "p99 ms": lambda row: f"{row[1].p99 * 1e3:.3f}",
        "median CPU ms": lambda row: f"{row[1].cpu_median * 1e3:.3f}",
        "target ms": lambda row: "" if row[1].target is None else f"{row[1].target * 1e3:g}",
        "": lambda row: "" if row[1].target is None else verdict(row[1].median <= row[1].target),
    }
    print(table_of(operations.timings.items(), columns))
    return 0


# A long prompt whose prefix is in memory.


def measure_warm_prompt(num_tokens: int, operations: Operations) -> None:
    """The same prefix again and again, each time with another question of 100 tokens behind it."""
    cache = new_cache(2 * num_tokens // BLOCK_SIZE + 64)
    rng = random.Random(0)
    prefix = [rng.randrange(VOCABULARY) for _ in range(num_tokens - 100)]
    write_prefix(cache, prefix)
    gc.collect()
    gc.freeze()  # as the engine does once it has loaded
    label = f"{num_tokens:,}-token prompt, warm: match + hold + table"
    whole = operations.named(label, 0.020)
    digesting = operations.named("  of that: pack and chain digests")
    matching = operations.named("  of that: match, verify, hold (look_up)")
    holding = operations.named("  of that: reuse, allocate, table (begin)")
    writing = operations.named(f"  afterwards: entries and {MAX_NAMES} names (write)")
    ending = operations.named("  afterwards: release")
    for index in range(operations.repeats):
        tokens = prefix + [rng.randrange(VOCABULARY) for _ in range(100)]
        names = new_names(len(prefix), index)
        with whole.measure():
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


def new_cache(num_blocks: int) -> PrefixCache:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    hasher = ChainHasher(b"a fixed key makes runs alike", BLOCK_SIZE)
    return PrefixCache(pool, Entries(pool, lease_share=0.9), hasher)


def write_prefix(cache: PrefixCache, prefix: Sequence[TokenId]) -> None:
    """One request computes it, marked at its end, and is over."""
    query = new_query(cache, [*prefix, 7], len(prefix), [], now=0.0)
    found = cache.look_up(query)
    block_table = cache.new_table(query)
    cache.begin(query, found, block_table)
    block_table.commit(query.tokens)
    cache.write(query, found, block_table, 0.0)
    block_table.release()


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


def measure_leases(operations: Operations) -> None:
    """Created while the writer holds the blocks, dropped when it is gone; as it happens in use."""
    cache = new_cache(2 * LEASE_TOKENS // BLOCK_SIZE)
    rng = random.Random(1)
    created = operations.named(f"lease of {LEASE_TOKENS:,} tokens created", 0.001)
    dropped = operations.named(f"lease of {LEASE_TOKENS:,} tokens dropped", 0.001)
    refreshed = operations.named("  a live lease refreshed")
    for _ in range(operations.repeats):
        tokens = [rng.randrange(VOCABULARY) for _ in range(LEASE_TOKENS)]
        digests = cache.digests("bench", tokens)
        block_table = BlockTable(cache.pool, cache._hasher, digests.root)
        block_table.prepare(len(tokens))
        block_table.commit(tokens)
        with created.measure():
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
        with refreshed.measure():
            cache.entries.refresh(entry, 1.0)
        with dropped.measure():
            count = cache.entries.drop("bench")
        assert count == 1
        cache.entries.leases.take_ended()


# Steps.


def measure_steps(context: int, operations: Operations) -> None:
    """32 sequences decode; every step is timed whole, and the scheduler's part of it."""
    repeats = operations.repeats
    settings = synthetic_settings(BATCH * (context + repeats + SPARE_TOKENS) // BLOCK_SIZE)
    engine = SteppedEngine(settings, step_tokens=8192)
    text = numbered_text(f"context {context}", 4 * context // 60)[: 4 * context]
    for index in range(BATCH):
        scope = f"tenant {index}"  # nothing shared: the tables are as long as they get
        engine.submit(new_request(f"r{index}", text, "?", max_tokens=100_000, scope=scope))
    while any(sequence.num_pending > 1 for sequence in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.loop.step()
    label = f"batch {BATCH}, {context:,}-token contexts"
    scheduling = operations.named(f"{label}: scheduler per decode step", 0.0005)
    whole = operations.named(f"  the whole step without the model, {context:,}")
    # Only this benchmark looks into a step: the seam is not worth a hook in the engine.
    engine.scheduler.schedule = timed(engine.scheduler.schedule, scheduling)  # type: ignore
    for _ in range(repeats):
        with whole.measure():
            engine.loop.step()
    assert len(engine.scheduler.running) == BATCH


def timed(
    schedule: Callable[[float], list[PrefillChunk]], timings: Timings
) -> Callable[[float], list[PrefillChunk]]:
    def run(now: float) -> list[PrefillChunk]:
        with timings.measure():
            return schedule(now)

    return run


if __name__ == "__main__":
    sys.exit(main())
