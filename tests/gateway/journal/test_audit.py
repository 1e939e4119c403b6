"""What the ledger lacks of the turns that a gateway gave to it is told, by number."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from sqlalchemy import text

from engine.protocol import FIRST_TTLS, WRITE_FIELDS
from gateway.base.clock import Clock
from gateway.base.metrics import Metrics
from gateway.base.settings import DatabaseSettings
from gateway.journal import audit
from gateway.journal.audit import DAY_MS, Audit
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.checksums import BILLED
from gateway.ledger.counts import stored_turns
from gateway.ledger.database import Ledger
from gateway.ledger.upkeep import retain
from tests.gateway.journal.test_journal import nobody
from tests.gateway.records import ledger_rows, turn_record
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ask, eventually, serve, serve_gateway
from tests.migrated import migrate

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
CLOCK = Clock(wall=lambda: NOW)
TURNS = 60


class Books:
    """A journal and a ledger, with turns of three days that went from one to the other."""

    def __init__(self, journal: Journal, ledger: Ledger, url: str) -> None:
        self.url = url
        self.journal = journal
        self.ledger = ledger
        self.audit = Audit(journal, partial(stored_turns, ledger), CLOCK)

    async def fill(self) -> None:
        for number in range(TURNS):
            turn = turn_record(
                f"msg_{self.journal.instance}{number:016x}",
                instance=self.journal.instance,
                opened_at=NOW - timedelta(days=number % 3),
                input_tokens=number,
                cost=1000 + number,
                cost_without_cache=2000,
                price="m@2026-01-01",
            )
            await self.journal.open(turn)
            turn.outcome = "stop"
            await self.journal.close(turn)
        drain = Drain(self.journal, self.ledger.insert_turns, nobody, Metrics())
        while await drain.step():
            pass

    async def findings(self) -> list[tuple[int, int, int]]:
        """Days ago, missing, damaged."""
        await self.audit.look()
        assert self.audit.findings is not None
        today = int(NOW.timestamp() * 1000) // DAY_MS
        return [
            (today - finding.day_ms // DAY_MS, finding.missing, finding.damaged)
            for finding in self.audit.findings
        ]

    async def change(self, statement: str, **values: Any) -> None:
        async with self.ledger.transaction() as connection:
            await connection.execute(text(statement), values)


@pytest.fixture
async def books(tmp_path: Path, shared_database: str) -> AsyncIterator[Books]:
    settings = DatabaseSettings(data=tmp_path, database_url=shared_database)
    await asyncio.to_thread(migrate, settings)
    journal = Journal(tmp_path / "journal").start()
    ledger = Ledger(settings.ledger_url, 60.0)
    fresh = Books(journal, ledger, settings.ledger_url)
    await fresh.fill()
    yield fresh
    await journal.stop()
    await ledger.close()


@pytest.mark.anyio
async def test_rows_that_are_gone_are_told_by_number_and_day_until_they_are_back(
    books: Books,
) -> None:
    assert await books.findings() == []
    gone = f"msg_{books.journal.instance}%"
    await books.change("CREATE TABLE kept AS SELECT * FROM turns")
    await books.change(
        "DELETE FROM turns WHERE id LIKE :gone AND input_tokens IN (0, 3, 6, 7)", gone=gone
    )
    assert await books.findings() == [(1, 1, 0), (0, 3, 0)]
    assert (books.audit.findings or [])[-1].missing == 3
    await books.change(
        "INSERT INTO turns SELECT * FROM kept WHERE id NOT IN (SELECT id FROM turns)"
    )
    assert await books.findings() == []


@pytest.mark.anyio
@pytest.mark.parametrize("column", BILLED[2:])
async def test_each_billed_column_that_changes_is_told(books: Books, column: str) -> None:
    is_text = column in ("workspace_id", "key_id", "model", "outcome", "price")
    value = "'x'" if is_text else f"COALESCE({column}, 0) + 1"
    await books.change(f"UPDATE turns SET {column} = {value} WHERE input_tokens = 5")
    assert await books.findings() == [(2, 0, 1)]


@pytest.mark.anyio
async def test_turns_that_retention_deleted_are_not_missing(books: Books) -> None:
    day_ms = int(NOW.timestamp() * 1000)
    await retain(books.ledger, day_ms - DAY_MS, 0, 0)
    assert await books.findings() == []


@pytest.mark.anyio
async def test_a_repeated_drain_counts_a_turn_once(books: Books) -> None:
    """A kill between the insert and the forgetting repeats both."""
    before = await books.journal.forgotten()
    assert sum(before.values()) == TURNS
    ids = [f"msg_{books.journal.instance}{number:016x}" for number in range(TURNS)]
    await books.journal.forget(ids)
    assert await books.journal.forgotten() == before


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(4))
async def test_flipped_bits_in_the_log_of_a_killed_gateways_ledger(
    tmp_path: Path, seed: int
) -> None:
    """What SQLite drops without a word is told by number: rows are right, or told."""
    settings = DatabaseSettings(data=tmp_path / "data")
    await asyncio.to_thread(migrate, settings)
    journal = Journal(tmp_path / "journal").start()
    ledger = Ledger(settings.ledger_url, 60.0)
    books = Books(journal, ledger, settings.ledger_url)
    await books.fill()
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "data", killed)
    await ledger.close()
    log = killed / "ledger.db-wal"
    content = bytearray(log.read_bytes())
    rng = random.Random(seed)
    # Behind what the migration wrote, in the turns' own frames.
    for _ in range(rng.randint(1, 40)):
        content[rng.randrange(len(content) // 2, len(content))] ^= 1 << rng.randrange(8)
    log.write_bytes(content)
    url = DatabaseSettings(data=killed).ledger_url
    again = Ledger(url, 60.0)
    books = Books(journal, again, url)
    days = await books.findings()
    rows = ledger_rows(f"sqlite:///{killed / 'ledger.db'}")
    assert sum(missing for _, missing, _ in days) == TURNS - len(rows)
    assert len(rows) < TURNS, "the flips hit nothing"
    await journal.stop()
    await again.close()


def kinds(reply: httpx.Response) -> list[str]:
    """Of the conditions in an answer of /readyz."""
    return [condition["kind"] for condition in reply.json()["conditions"]]


def remove(directory: Path) -> None:
    """Also where the gateway writes a file into it meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def test_a_journal_whose_directory_is_removed_loses_no_turn(tmp_path: Path) -> None:
    """Under a running gateway: what it held is written anew, and it says so meanwhile."""
    with serve(ScriptedEngine()) as engine:
        with serve_gateway(tmp_path, engine) as url:
            eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
            ids = [ask(url).json()["id"] for _ in range(3)]
            remove(tmp_path / "journal")
            first = httpx.get(f"{url}/readyz", timeout=120)
            assert first.status_code == 503
            assert "journal_moved" in kinds(first)
            eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
            assert (tmp_path / "journal" / "journal.db").exists()
            ids += [ask(url).json()["id"] for _ in range(3)]
            remove(tmp_path / "journal")
            # Without a look at /readyz, too.
            ids += [ask(url).json()["id"] for _ in range(3)]
            assert (tmp_path / "journal" / "journal.db").exists()

            def stored() -> set[str]:
                return {row["id"] for row in ledger_rows(f"sqlite:///{tmp_path / 'ledger.db'}")}

            eventually(lambda: set(ids) <= stored())
        with serve_gateway(tmp_path, engine) as url:
            eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).json()["conditions"] == [])


def test_readiness_tells_what_the_ledger_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_FOUND_SECONDS", 1.0)
    with serve(ScriptedEngine()) as engine:
        with serve_gateway(tmp_path, engine) as url:
            ids = [ask(url).json()["id"] for _ in range(3)]
            eventually(lambda: len(ledger_rows(f"sqlite:///{tmp_path / 'ledger.db'}")) == 3)
            eventually(
                lambda: httpx.get(f"{url}/readyz", timeout=120).json()["journal_backlog"] == 0
            )
        (row,) = (row for row in ledger_rows(url_of(tmp_path)) if row["id"] == ids[0])
        change(tmp_path, "DELETE FROM turns WHERE id = :id", id=ids[0])
        with serve_gateway(tmp_path, engine) as url:

            def conditions() -> list[Any]:
                listing: list[Any] = httpx.get(f"{url}/readyz", timeout=120).json()["conditions"]
                return listing

            eventually(lambda: "turns_missing" in [condition["kind"] for condition in conditions()])
            (missing,) = conditions()
            assert missing["severity"] == "critical"
            assert "the ledger lacks 1 of the turns" in missing["cause"]
            assert "python -m gateway recover" in missing["remedy"]
            # Somebody puts it back: the gateway that runs tells of it no more.
            places = ", ".join(f":{name}" for name in row)
            change(tmp_path, f"INSERT INTO turns ({', '.join(row)}) VALUES ({places})", **row)
            eventually(lambda: conditions() == [])


def url_of(data: Path) -> str:
    return f"sqlite:///{data / 'ledger.db'}"


def change(data: Path, statement: str, **values: Any) -> None:
    with closing(sqlite3.connect(data / "ledger.db", timeout=60)) as connection, connection:
        connection.execute(statement, values)


LATER_WRITES = [name for ttl, name in WRITE_FIELDS.items() if ttl not in FIRST_TTLS]
FIRST_BILLED = tuple(name for name in BILLED if name not in LATER_WRITES)
"""The columns of the first checksum, in the order that rows of before revision 0011 have it of."""


def first_checksum(row: dict[str, Any]) -> int:
    """As versions before revision 0011 wrote it."""
    values = (row[name] for name in FIRST_BILLED)
    return crc32("\0".join("" if value is None else str(value) for value in values).encode())


@pytest.mark.anyio
async def test_rows_of_the_first_checksum_stay_right_and_their_damage_is_told(
    books: Books,
) -> None:
    rows = await asyncio.to_thread(ledger_rows, books.url)
    for row in rows:
        values = {"id": row["id"], "checksum": first_checksum(row)}
        await books.change("UPDATE turns SET checksum = :checksum WHERE id = :id", **values)
    assert await books.findings() == []
    damaged = {"id": rows[0]["id"]}
    for column in ("input_tokens", *LATER_WRITES):
        await books.change(f"UPDATE turns SET {column} = {column} + 1 WHERE id = :id", **damaged)
        assert sum(count for _, _, count in await books.findings()) == 1
        await books.change(f"UPDATE turns SET {column} = {column} - 1 WHERE id = :id", **damaged)
    assert await books.findings() == []
    version = {**damaged, "version": 9 << 32}
    await books.change("UPDATE turns SET checksum = checksum + :version WHERE id = :id", **version)
    assert sum(count for _, _, count in await books.findings()) == 1, "nobody knows the version"
