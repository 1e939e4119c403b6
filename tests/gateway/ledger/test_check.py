"""`ledger check` names sums that are not those of their turns."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger
from gateway.ledger.upkeep import problems, rebuild, retain
from tests.gateway.records import turn_record

NOW = datetime(2026, 11, 22, 11, 30, 0, 123456, tzinfo=UTC)


def turn(number: int) -> TurnRecord:
    return turn_record(
        f"msg_{number:06}",
        workspace=("a", "b")[number % 2],
        engine="engine-0" if number % 3 else None,
        stream=number % 2 == 0,
        opened_at=NOW + timedelta(minutes=7 * number),
        outcome="stop",
        miss_reason="cold" if number % 4 else None,
        input_tokens=10 + number,
        cache_read_tokens=90 * (number % 2),
        computed_tokens=10 + number,
        output_tokens=7,
        first_token_seconds=0.1 + number / 7,
        prefill_seconds=1e-7 * number,
        price="reference",
        cost=10**9 + number,
        cost_without_cache=2 * 10**9,
        fingerprint=bytes(range(number % 256)),
        prefix=f"{number % 5:016}",
        prefix_ttl="5m",
    )


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[Ledger]:
    settings = DatabaseSettings(data=tmp_path)
    await asyncio.to_thread(migrate, settings)
    ledger = Ledger(settings.ledger_url)
    await ledger.insert_turns([turn(number) for number in range(260)])
    yield ledger
    await ledger.close()


@pytest.mark.anyio
async def test_a_ledger_as_it_was_written_has_no_damage(filled: Ledger) -> None:
    assert await problems(filled) == []
    await rebuild(filled)
    day = NOW.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    ms = int(day.timestamp() * 1000)
    await retain(filled, ms, ms, ms)
    assert await problems(filled) == [], "nor after a rebuild and retention"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE turn_rollups SET output_tokens = output_tokens + 1 WHERE width_seconds = 3600",
        "UPDATE turn_rollups SET workspace_id = 'c' WHERE width_seconds = 86400 AND key_id = 'k'"
        " AND workspace_id = 'a' AND engine = ''",
        "UPDATE reason_rollups SET requests = requests - 1 WHERE kind = 'miss'",
        "UPDATE latency_rollups SET bin = bin + 1 WHERE bin = (SELECT max(bin) FROM"
        " latency_rollups)",
        "DELETE FROM turn_rollups WHERE width_seconds = 3600 AND workspace_id = 'a'",
        "UPDATE prefixes SET cache_read_tokens = 1 WHERE workspace_id = 'a'",
        "UPDATE prefixes SET gaps_1h = gaps_1h + 1 WHERE workspace_id = 'b'",
        "DELETE FROM prefixes WHERE workspace_id = 'b'",
        "DELETE FROM turns WHERE id = 'msg_000007'",
    ],
)
@pytest.mark.anyio
async def test_sums_that_are_not_those_of_their_turns_are_named(
    filled: Ledger, tmp_path: Path, statement: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        assert db.execute(statement).rowcount >= 1
    found = await problems(filled)
    assert found and all(line.startswith("table ") for line in found)
    assert not any("structure" in line for line in found)
