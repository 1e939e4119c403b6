"""Counts of refusals: bounded in memory, and written as they stand, by any number of gateways."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from gateway.base.clock import Clock
from gateway.base.errors import LedgerUnavailable
from gateway.ledger.database import Ledger
from gateway.ledger.refusals import (
    MAX_COUNTS,
    MINUTE_MS,
    OTHERS,
    Place,
    RefusalCounter,
    RefusalsTable,
)
from gateway.ledger.upkeep import retain

START = datetime(2026, 3, 2, 12, 0, 30, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)
DAY_MS = 86_400_000


@dataclass
class Watch:
    """A clock that stands until the test moves it."""

    now: datetime = START

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now)


@dataclass
class Shaky(RefusalsTable):
    """A table whose writes may fail, before or after they are in the database."""

    ledger: Ledger
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.ledger)

    async def put(self, gateway: str, counts: Mapping[Place, int]) -> None:
        outcome = self.outcomes.pop() if self.outcomes else "works"
        if outcome != "not written":
            await super().put(gateway, counts)
        if outcome != "works":
            raise LedgerUnavailable


@pytest.mark.anyio
async def test_counts_add_up_over_gateways_minutes_and_failures(ledger: Ledger) -> None:
    chance = random.Random(5)
    watch = Watch()
    table = Shaky(ledger)
    gateways = [RefusalCounter(table, watch.clock) for _ in range(3)]
    expected: Counter[tuple[str | None, str]] = Counter()
    for _ in range(60):
        gateway = chance.choice(gateways)
        for _ in range(chance.randrange(20)):
            key = chance.choice([None, "a", "b"])
            reason = chance.choice(["no engine ready", "overloaded"])
            gateway.count("default" if key else None, key, reason)
            expected[key, reason] += 1
        watch.now += timedelta(seconds=chance.randrange(40))
        table.outcomes.append(chance.choice(["works", "not written", "written"]))
        try:
            await gateway.flush()
        except LedgerUnavailable:
            continue
    table.outcomes.clear()
    for gateway in gateways:
        await gateway.flush()
    refusals = await table.read(START_MS - MINUTE_MS, START_MS + DAY_MS, None, 1000)
    sums: Counter[tuple[str | None, str]] = Counter()
    for row in refusals.counts:
        sums[row.key, row.reason] += row.requests
    assert sums == expected and refusals.requests == expected.total()
    minutes = [row.minute_ms for row in refusals.counts]
    assert minutes == sorted(minutes, reverse=True)
    assert len({(row.minute_ms, row.key, row.reason) for row in refusals.counts}) == len(minutes)
    (newest,) = (await table.read(START_MS - MINUTE_MS, START_MS + DAY_MS, None, 1)).counts
    assert newest == refusals.counts[0]
    refusals_of_default = await table.read(START_MS - MINUTE_MS, START_MS + DAY_MS, "default", 1000)
    assert refusals_of_default.requests == sum(
        n for (key, _), n in expected.items() if key is not None
    )


@pytest.mark.anyio
async def test_memory_is_bounded_and_what_is_beyond_is_counted_without_its_key(
    ledger: Ledger,
) -> None:
    table = Shaky(ledger, ["not written"])
    counter = RefusalCounter(table, Watch().clock)
    for number in range(MAX_COUNTS + 500):
        counter.count("default", f"key-{number}", "overloaded")
    with pytest.raises(LedgerUnavailable):
        await counter.flush()
    await counter.flush()
    refusals = await table.read(0, START_MS + DAY_MS, None, MAX_COUNTS + 2)
    assert refusals.requests == MAX_COUNTS + 500 and len(refusals.counts) == MAX_COUNTS + 1
    (remainder,) = [row for row in refusals.counts if row.reason == OTHERS]
    assert (remainder.requests, remainder.workspace, remainder.key) == (500, None, None)


@pytest.mark.anyio
async def test_they_are_deleted_with_the_turns_of_their_day(ledger: Ledger) -> None:
    watch = Watch()
    table = RefusalsTable(ledger)
    counter = RefusalCounter(table, watch.clock)
    for _ in range(2):
        counter.count(None, None, "missing key")
        watch.now += timedelta(days=1)
    await counter.flush()
    await retain(ledger, START_MS + DAY_MS, 0, 0)
    (count,) = (await table.read(0, START_MS + 9 * DAY_MS, None, 10)).counts
    assert count.minute_ms == (START_MS + DAY_MS) // MINUTE_MS * MINUTE_MS
