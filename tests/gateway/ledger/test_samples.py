"""Figures of a sample stand still: it is all of the range, or decided by the turns' own ids."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from gateway.base.record import TurnRecord
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import samples
from tests.gateway.records import turn_record

pytestmark = pytest.mark.anyio

START = datetime(2026, 11, 20, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)
MINUTE_MS = 60_000
LIMIT = 40


def turn(number: int, chance: random.Random, *, is_answered: bool = True) -> TurnRecord:
    return turn_record(
        f"msg_0123abcd{chance.getrandbits(80):020x}",
        opened_at=START + timedelta(seconds=number),
        first_token_seconds=0.5 if is_answered else None,
    )


def until(minutes: int) -> Range:
    return Range(since_ms=START_MS, until_ms=START_MS + minutes * MINUTE_MS)


async def test_a_range_with_fewer_turns_than_the_sample_is_whole(ledger: Ledger) -> None:
    """Crowded into one moment they are all there too."""
    chance = random.Random(5)
    turns = [turn(number // 20, chance, is_answered=number % 4 > 0) for number in range(LIMIT)]
    await ledger.insert_turns(turns)
    sample = await samples(ledger, until(60), LIMIT)
    assert {record.id for record in sample} == {
        record.id for record in turns if record.first_token_seconds is not None
    }


async def test_no_turn_leaves_or_joins_a_sample_as_time_goes_on(ledger: Ledger) -> None:
    chance = random.Random(6)
    turns = [turn(number, chance) for number in range(1500)]
    await ledger.insert_turns(turns)
    first = await samples(ledger, until(30), LIMIT)
    assert len(first) == LIMIT
    for minutes in (31, 37, 600):
        assert await samples(ledger, until(minutes), LIMIT) == first
    # One more turn puts out one at most.
    await ledger.insert_turns([turn(1501, chance)])
    later = await samples(ledger, until(600), LIMIT)
    assert len({record.id for record in first} - {record.id for record in later}) <= 1
    # Nothing of when a turn came decides whether it is in it.
    early = sum(record.opened_ms < START_MS + 750_000 for record in first)
    assert 10 <= early <= 30


async def test_a_large_range_has_the_sample_of_all_its_turns(ledger: Ledger) -> None:
    """Whether it is found among all or among those that an index has."""
    chance = random.Random(7)
    turns = [turn(number, chance) for number in range(1500)]
    await ledger.insert_turns(turns)
    for limit in (2, 5, 12, LIMIT):
        sample = await samples(ledger, until(60), limit)
        lowest = sorted(turns, key=lambda record: (record.id[30:], record.id[26:30], record.id))
        assert {record.id for record in sample} == {record.id for record in lowest[:limit]}
        assert sorted(sample, key=lambda record: record.order)[0].id == lowest[0].id
