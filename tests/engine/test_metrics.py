"""What an engine's /metrics say of its leases."""

from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import render
from engine.protocol.reports import BlockStats, Counters, LeaseStats, Stats

NAMES = {
    "holdfast_engine_leased_blocks": 3,
    "holdfast_engine_max_leased_blocks": 4,
    "holdfast_engine_idle_leases_yielded_total": 5,
}
IDLE = {"holdfast_engine_idle_leased_blocks": 1, "holdfast_engine_max_idle_leased_blocks": 2}


def samples(leases: LeaseStats) -> dict[str, float]:
    """Those of the lease budget, and what yielded."""
    blocks = BlockStats(total=8, free=8, active=0, leased=0, best_effort=0, cached=0)
    counters = Counters(leases_yielded_idle=5)
    told = Stats(
        epoch="e",
        uptime_seconds=1,
        running=0,
        waiting=0,
        blocks=blocks,
        counters=counters,
        leases=leases,
    )
    text = render(told, {}).decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "leased_blocks" in sample.name or sample.name in NAMES
    }


def test_the_budget_what_is_leased_of_it_and_what_of_that_is_idle() -> None:
    """A bound that an engine has not is not exposed."""
    assert samples(LeaseStats(blocks=3, max_blocks=4)) == NAMES
    bound = LeaseStats(blocks=3, max_blocks=4, idle_blocks=1, max_idle_blocks=2)
    assert samples(bound) == NAMES | IDLE
