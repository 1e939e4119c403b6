"""Damage inside the ledger's file is found and named, also where SQLite sees none."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.ledger.check import problems
from gateway.ledger.database import Ledger
from gateway.ledger.upkeep import rebuild, retain
from tests.gateway.process import gateway_process
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve

NOW = datetime(2026, 11, 22, 11, 30, 0, 123456, tzinfo=UTC)


def turn(number: int) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{number:06}",
        instance="i",
        workspace=("a", "b")[number % 2],
        key_id="k",
        model="m",
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


async def look(url: str) -> list[str]:
    ledger = Ledger(url)
    try:
        return [line async for line in problems(ledger, lambda: asyncio.sleep(0))]
    finally:
        await ledger.close()


async def fill(url: str, count: int = 260) -> None:
    ledger = Ledger(url)
    await ledger.insert_turns([turn(number) for number in range(count)])
    await ledger.close()


@pytest.fixture
def filled(tmp_path: Path) -> DatabaseSettings:
    settings = DatabaseSettings(data=tmp_path)
    migrate(settings)
    asyncio.run(fill(settings.ledger_url))
    return settings


def change(settings: DatabaseSettings, statement: str) -> None:
    with closing(sqlite3.connect(settings.data / "ledger.db")) as db, db:
        assert db.execute(statement).rowcount >= 1


def test_a_ledger_as_it_was_written_has_no_damage(filled: DatabaseSettings) -> None:
    assert asyncio.run(look(filled.ledger_url)) == []

    async def work() -> None:
        ledger = Ledger(filled.ledger_url)
        await rebuild(ledger)
        day = NOW.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        ms = int(day.timestamp() * 1000)
        await retain(ledger, ms, ms, ms)
        await ledger.close()

    asyncio.run(work())
    assert asyncio.run(look(filled.ledger_url)) == [], "nor after a rebuild and retention"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("output_tokens", "6"),
        ("cost_nano", "cost_nano + 1"),
        ("workspace_id", "'c'"),
        ("key_id", "'x'"),
        ("first_token_seconds", "first_token_seconds * 1.0000001"),
        ("fingerprint", "x'00'"),
        ("miss_reason", "NULL"),
        ("stream", "1 - stream"),
        ("opened_at", "'2026-11-22 11:30:00.123457'"),
        ("price", "'r\xe9ference'"),
        ("available_tokens", "7"),
    ],
)
def test_a_row_that_is_not_what_was_written_is_named(
    filled: DatabaseSettings, column: str, value: str
) -> None:
    change(filled, f"UPDATE turns SET {column} = {value} WHERE id = 'msg_000133'")
    found = asyncio.run(look(filled.ledger_url))
    assert "table turns: the row of turn msg_000133 is damaged" in found


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
def test_sums_that_are_not_those_of_their_turns_are_named(
    filled: DatabaseSettings, statement: str
) -> None:
    change(filled, statement)
    found = asyncio.run(look(filled.ledger_url))
    assert found and all(line.startswith("table ") for line in found)
    assert not any("structure" in line for line in found)


def flip(path: Path, needle: bytes, at: int) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(needle)
    content[place + at] ^= 1
    path.write_bytes(content)


def test_a_gateway_names_a_flipped_bit_and_goes_on_serving(
    filled: DatabaseSettings, tmp_path: Path
) -> None:
    """The bit is in a fingerprint: neither SQLite nor any sum knows of it."""
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    flip(tmp_path / "ledger.db", bytes(range(200)), 100)
    log = tmp_path / "log"
    with serve(ScriptedEngine()) as engine, gateway_process(tmp_path, engine, log) as (url, _):

        def told() -> list[str]:
            answer = httpx.get(f"{url}/readyz", timeout=120)
            assert answer.status_code == 200
            return list(answer.json()["ledger_damage"] or [])

        eventually(lambda: bool(told()))
        (line,) = told()
        assert line.startswith("table turns: the row of turn msg_0002")
        metrics = httpx.get(f"{url}/metrics", timeout=120).text
        assert "holdfast_gateway_ledger_damage 1.0" in metrics
    assert "ledger_damage" in log.read_text("utf-8")


def test_rows_of_an_earlier_version_have_no_checksum(filled: DatabaseSettings) -> None:
    change(filled, "UPDATE turns SET checksum = NULL")
    assert asyncio.run(look(filled.ledger_url)) == []


def test_only_a_file_of_sqlite_is_looked_at_as_one(tmp_path: Path) -> None:
    async def path_of(url: str) -> str | None:
        ledger = Ledger(url)
        found = ledger.path
        await ledger.close()
        return found

    assert asyncio.run(path_of("postgresql+psycopg://u:p@127.0.0.1:1/name")) is None
    assert asyncio.run(path_of("sqlite+aiosqlite:///:memory:")) is None
    wanted = f"{tmp_path}/ledger.db"
    assert asyncio.run(path_of(f"sqlite+aiosqlite:///{wanted}")) == wanted
    assert not Path(wanted).exists()
