"""What an engine's /metrics say of its leases, as it really holds them."""

import math

from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import render
from engine.protocol import BlockStats, Counters, EntryInfo, LeaseStats, Stats
from tests.conformance.engines import Engine, prompt, running_engine

NUM_BLOCKS = 64
BLOCK_SIZE = 16
SETTINGS = {
    "CLOCK": "manual",
    "NUM_BLOCKS": NUM_BLOCKS,
    "BLOCK_SIZE": BLOCK_SIZE,
    "LEASE_SHARE": 0.5,
    "IDLE_LEASE_SHARE": 0.25,
    "SYNTHETIC_PREFILL_US": 0,
    "SYNTHETIC_DECODE_MS": 0,
}
BUDGET = {"holdfast_engine_max_leased_blocks": 32, "holdfast_engine_max_idle_leased_blocks": 8}


def samples(text: str) -> dict[str, float]:
    """Those of the lease budget, and what yielded."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "leased_blocks" in sample.name
        or sample.name == "holdfast_engine_idle_leases_yielded_total"
    }


def told(engine: Engine) -> dict[str, float]:
    return samples(engine.client.get("/metrics").text)


def lease(engine: Engine) -> int:
    """Write a prefix for an hour; the blocks that it takes."""
    scope = engine.scope()
    engine.ask(prompt(engine.text(80)), scope, (0, "1h"))
    (entry,) = engine.entries(scope)
    assert entry.state == "leased"
    assert entry.blocks == math.ceil(entry.tokens / BLOCK_SIZE) > 4
    return entry.blocks


def fill(engine: Engine) -> None:
    """Plain content takes every empty block, so that others need the room."""
    for _ in range(NUM_BLOCKS):
        if not engine.stats().blocks.free:
            return
        engine.ask(prompt(engine.text(15)), engine.scope())
    raise AssertionError("the pool has empty blocks")


def test_the_budget_what_is_leased_of_it_and_what_of_that_is_idle() -> None:
    with running_engine("synthetic", SETTINGS) as engine:
        empty = {"holdfast_engine_leased_blocks": 0, "holdfast_engine_idle_leased_blocks": 0}
        empty["holdfast_engine_idle_leases_yielded_total"] = 0
        assert told(engine) == {**BUDGET, **empty}
        first, second = lease(engine), lease(engine)
        assert told(engine) == {**BUDGET, **empty, "holdfast_engine_leased_blocks": first + second}
        fill(engine)
        engine.advance(300)  # both are idle, which is more than may be: one yields
        (kept,) = [e for e in engine.get("entries", list[EntryInfo]) if e.state == "leased"]
        assert told(engine) == {
            **BUDGET,
            "holdfast_engine_leased_blocks": kept.blocks,
            "holdfast_engine_idle_leased_blocks": kept.blocks,
            "holdfast_engine_idle_leases_yielded_total": 1,
        }
        counters = engine.stats().counters
        assert (counters.leases_yielded, counters.leases_yielded_idle) == (1, 1)
        third = lease(engine)
        assert told(engine)["holdfast_engine_leased_blocks"] == kept.blocks + third
        assert told(engine)["holdfast_engine_idle_leased_blocks"] == kept.blocks


def test_a_bound_that_an_engine_has_not_is_not_exposed() -> None:
    blocks = BlockStats(total=8, free=8, active=0, leased=0, best_effort=0, cached=0)
    stats = Stats(
        epoch="e",
        uptime_seconds=1,
        running=0,
        waiting=0,
        blocks=blocks,
        counters=Counters(),
        leases=LeaseStats(blocks=3, max_blocks=4),
    )
    assert samples(render(stats, {}).decode()) == {
        "holdfast_engine_leased_blocks": 3,
        "holdfast_engine_max_leased_blocks": 4,
        "holdfast_engine_idle_leases_yielded_total": 0,
    }
