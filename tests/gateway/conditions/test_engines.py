"""What an engine's own figures say is wrong with it."""

import msgspec
import pytest

from engine.protocol.reports import Stats
from gateway.conditions.engines import Increases, of_stats


@pytest.mark.parametrize(
    ("entries", "leases", "automatic", "is_told"),
    [(10, 10, 0, False), (100, 10, 90, False), (100, 8, 90, True), (10, 5, 0, True)],
)
def test_entries_that_nobody_asked_for_lack_no_lease(
    entries: int, leases: int, automatic: int, is_told: bool
) -> None:
    """The alert HoldfastLeaseBudgetFull leaves them out, too."""
    blocks = {"total": 100, "free": 90, "active": 0, "leased": 10, "best_effort": 0, "cached": 0}
    counters = dict.fromkeys(Stats.__annotations__["counters"].__struct_fields__, 0)
    told = {
        "epoch": "e",
        "uptime_seconds": 1.0,
        "running": 0,
        "waiting": 0,
        "blocks": blocks,
        "counters": counters,
        "num_entries": entries,
        "num_leases": leases,
        "num_automatic": automatic,
    }
    stats = msgspec.convert(told, Stats)
    kinds = {finding.kind for finding in of_stats("engine-0", stats, Increases(), 0.0)}
    assert kinds == ({"leases_full"} if is_told else set())
