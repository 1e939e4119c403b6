"""What `GET /v1/memory` tells of an engine: a map that adds up to its counts, and lifetimes."""

from dataclasses import dataclass

import pytest

from engine.protocol import MAX_CELLS
from engine.protocol.reports import Histogram, Memory
from tests.conformance.engines import Engine, prompt

CLASSES = ("free", "active", "leased", "best_effort", "cached", "shared")


@dataclass
class Lives:
    """How many values each histogram has so far."""

    expired: int
    reuse_gaps: int


def memory_of(engine: Engine) -> Memory:
    return engine.get("memory", Memory)


def lives(engine: Engine) -> Lives:
    lifetimes = memory_of(engine).lifetimes
    return Lives(sum(lifetimes.expired.counts), sum(lifetimes.reuse_gaps.counts))


def test_the_cells_add_up_to_the_counts(engine: Engine) -> None:
    """At rest; an engine without a map says so in what it declares, and has none."""
    scope = engine.scope()
    text = engine.text(90)
    engine.ask(prompt(text, engine.text(5)), scope, 0)
    engine.wait_until_idle()
    memory = memory_of(engine)
    stats = engine.stats()
    assert (memory.epoch, memory.block_size) == (stats.epoch, engine.description.block_size)
    if not engine.has("block_map"):
        assert (memory.cells, memory.blocks_per_cell) == ([], 0)
        assert memory.referenced_blocks is memory.unused_tokens is memory.host is None
        return
    sums = {name: sum(getattr(cell, name) for cell in memory.cells) for name in CLASSES}
    assert sums == {name: getattr(stats.blocks, name) for name in CLASSES}
    assert sums["leased"] > 0, "the prompt's lease is in the map"
    assert 0 < len(memory.cells) <= MAX_CELLS
    sizes = [sum(getattr(cell, name) for name in CLASSES[:5]) for cell in memory.cells]
    assert all(size == memory.blocks_per_cell for size in sizes[:-1])
    assert memory.referenced_blocks == stats.blocks.leased
    assert memory.unused_tokens is not None
    assert 0 <= memory.unused_tokens < memory.referenced_blocks * memory.block_size


def test_a_read_is_a_reuse_and_an_end_a_lifetime(engine: Engine) -> None:
    scope = engine.scope()
    text = engine.text(60)
    engine.advance(3600)  # nothing of other tests ends meanwhile
    before = lives(engine)
    engine.ask(prompt(text, engine.text(5)), scope, 0)
    engine.advance(30)
    engine.ask(prompt(text, engine.text(5)), scope, 0)
    assert lives(engine) == Lives(before.expired, before.reuse_gaps + 1)
    engine.advance(300)
    assert lives(engine) == Lives(before.expired + 1, before.reuse_gaps + 1)


@pytest.mark.parametrize("name", ["expired", "evicted", "idle_before_eviction", "reuse_gaps"])
def test_a_histogram_has_a_count_for_each_edge_and_one_above(engine: Engine, name: str) -> None:
    histogram: Histogram = getattr(memory_of(engine).lifetimes, name)
    assert histogram.edges_seconds == sorted(set(histogram.edges_seconds))
    assert len(histogram.counts) == len(histogram.edges_seconds) + 1
