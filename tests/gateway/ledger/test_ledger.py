import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.ledger.access import Keys, digest_of
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Queries, Range
from tests.gateway.records import turn_record

ALL = Range(since_ms=0, until_ms=2**45)
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
async def ledger(tmp_path: Path, shared_database: str) -> AsyncIterator[Ledger]:
    settings = DatabaseSettings(data=tmp_path, database_url=shared_database)
    await asyncio.to_thread(migrate, settings)
    ledger = Ledger(settings.ledger_url, 60.0)
    yield ledger
    await ledger.close()


def turn(number: int, **changes: object) -> TurnRecord:
    values: dict[str, object] = {
        "workspace": "default",
        "opened_at": NOW,
        "outcome": "stop",
        "input_tokens": 10,
        "cache_read_tokens": 90,
        "price": "reference@2026-01-01",
        "cost": 19_000,
        "cost_without_cache": 100_000,
    }
    return turn_record(f"msg_{number:06}", **{**values, **changes})


@pytest.mark.anyio
async def test_a_turn_drained_twice_is_there_once(ledger: Ledger) -> None:
    await ledger.insert_turns([turn(1), turn(2)])
    await ledger.insert_turns([turn(2, input_tokens=999), turn(3)])
    totals = await Queries(ledger).totals(ALL)
    assert (totals.requests, totals.input_tokens) == (3, 30)
    assert totals.cost_without_cache_nano - totals.cost_nano == 3 * 81_000


@pytest.mark.anyio
async def test_a_series_has_every_interval_and_marks_the_partial_ones(ledger: Ledger) -> None:
    await ledger.insert_turns([turn(1)])
    end = int(NOW.timestamp() * 1000) + 90_500
    series = await Queries(ledger).series(Range(since_ms=end - 600_000, until_ms=end))
    assert series.bucket_seconds == 10
    assert [b.is_partial for b in series.buckets] == [True, *[False] * 59, True]
    assert [b.totals.requests for b in series.buckets if b.totals.requests] == [1]


@pytest.mark.anyio
async def test_keys_are_stored_by_digest_and_end_when_revoked(ledger: Ledger) -> None:
    keys = Keys(ledger)
    key_id = await keys.create("secret", "default", "one", NOW)
    assert await keys.create("secret", "default", "again", NOW) == key_id
    found = await keys.find(digest_of("secret"), NOW)
    assert found is not None
    key, workspace = found
    assert (key.workspace, key.created_at, workspace.id) == ("default", NOW, "default")
    assert await keys.revoke(key_id, NOW) and not await keys.revoke(key_id, NOW)
    assert await keys.find(digest_of("secret"), NOW) is None
    directory = await keys.directory(10, NOW, [digest_of("secret")])
    assert (directory.keys, directory.has_ended) == ([], {digest_of("secret")})
