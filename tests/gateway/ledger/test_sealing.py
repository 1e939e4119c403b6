"""Rows that were plain before revision 0003 are sealed, also over a kill, and read meanwhile."""

import asyncio
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import insert, select, text

from gateway.base.errors import NotFound
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import upgrade
from gateway.ledger.batches import Batches
from gateway.ledger.cached_contents import CachedContents
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.schema import BatchItemRow, BatchRow, CachedContentRow
from gateway.ledger.sealed import PLAIN, Sealing, Texts

MASTER = SecretStr("a master secret of the tests")
NOW = datetime(2026, 11, 28, tzinfo=UTC)
WORD = "Flussuferläufer"
ROWS = 40


def plain(number: int) -> bytes:
    return zlib.compress(f"{WORD} {number} ".encode() * 400)


async def fill(ledger: Ledger) -> None:
    """A batch of which some rows have ended, and a cached content, as they were before."""
    batch = {
        "id": "b1",
        "workspace_id": "w",
        "key_id": "k",
        "version": "2023-06-01",
        "status": "in_progress",
        "num_bytes": 1,
        "created_at": NOW,
        "expires_at": NOW + timedelta(days=1),
        "owner": "",
        "owned_until": NOW,
    }
    rows = [
        {
            "batch_id": "b1",
            "position": number,
            "custom_id": f"r{number}",
            "rank": number,
            "prefix": "p",
            "params": plain(number),
            "status": ("pending", "succeeded", "expired")[number % 3],
            "result": plain(1000 + number) if number % 3 else None,
        }
        for number in range(ROWS)
    ]
    content = {
        "id": "c1",
        "workspace_id": "w",
        "model": "m",
        "display_name": "",
        "body": plain(7),
        "num_bytes": 1,
        "num_tokens": 1,
        "prefix": "p",
        **dict.fromkeys(("created_at", "updated_at", "expires_at", "held_until"), NOW),
    }
    async with ledger.transaction() as connection:
        await connection.execute(insert(BatchRow), [batch])
        await connection.execute(insert(BatchItemRow), rows)
        await connection.execute(insert(CachedContentRow), [content])


async def check_reads(ledger: Ledger, master: SecretStr = MASTER) -> None:
    store = Batches(ledger, master, max_running=1, max_bytes=1)
    _, waiting = await store.pending("b1", ROWS)
    assert [item.params for item in waiting] == [plain(n) for n in range(0, ROWS, 3)]
    results = await store.results("b1", -1, ROWS)
    assert results == [(n, f"r{n}", plain(1000 + n)) for n in range(ROWS) if n % 3]
    contents = CachedContents(ledger, master, 1, 1)
    _, body = await contents.with_body("w", "c1", NOW - timedelta(seconds=1))
    assert body == plain(7)


async def num_plain(ledger: Ledger) -> int:
    async with ledger.transaction() as connection:
        rows = (await connection.execute(select(BatchItemRow.params, BatchItemRow.result))).all()
        bodies = (await connection.execute(select(CachedContentRow.body))).scalars()
        cells = [*(cell for row in rows for cell in row), *bodies]
    return sum(cell is not None and cell.startswith(PLAIN) for cell in cells)


def test_plain_rows_are_sealed_some_at_a_time_and_read_meanwhile(
    tmp_path: Path, shared_database: str
) -> None:
    settings = DatabaseSettings(data=tmp_path, database_url=shared_database)
    upgrade(settings, "0002")
    asyncio.run(with_ledger(settings.ledger_url, fill))
    upgrade(settings)

    async def work(ledger: Ledger) -> None:
        before = await num_plain(ledger)
        assert before > ROWS
        # The first gateway is killed after one step. The next one goes on.
        assert await Sealing(ledger, MASTER).step()
        assert 0 < await num_plain(ledger) < before
        await check_reads(ledger)
        await Sealing(ledger, MASTER).run(asyncio.Event())
        assert await num_plain(ledger) == 0
        await check_reads(ledger)
        with pytest.raises(NotFound, match="another master secret"):
            await check_reads(ledger, SecretStr("another"))
        # Nothing is left to do, and the next start asks one row.
        assert not await Sealing(ledger, MASTER).step()
        async with ledger.transaction() as connection:
            marks = await connection.execute(text("SELECT name FROM watermarks"))
            assert "unsealed" not in set(marks.scalars())
        if not ledger.is_postgres:
            for path in tmp_path.glob("shared.db*"):
                content = path.read_bytes()
                assert not any(plain(n) in content for n in range(ROWS)), path

    asyncio.run(with_ledger(settings.ledger_url, work))


def test_a_body_in_another_ones_place_is_not_read() -> None:
    texts = Texts(MASTER).batch("b1")
    sealed = texts.sealed_params(1, plain(1))
    assert texts.opened_params(1, sealed) == plain(1)
    for reader, position in ((texts, 2), (Texts(MASTER).batch("b2"), 1)):
        with pytest.raises(NotFound):
            reader.opened_params(position, sealed)
    with pytest.raises(NotFound):
        texts.opened_result(1, "succeeded", sealed)
    body = Texts(MASTER).sealed_content("w", "c1", plain(1))
    for workspace, content in (("v", "c1"), ("w", "c2")):
        with pytest.raises(NotFound):
            Texts(MASTER).opened_content(workspace, content, body)


@pytest.mark.anyio
async def test_another_master_secret_is_told_and_seals_nothing(ledger: Ledger) -> None:
    first = Sealing(ledger, MASTER)
    second = Sealing(ledger, SecretStr("another"))
    await first.run(asyncio.Event())
    await fill(ledger)
    async with ledger.transaction() as connection:
        await connection.execute(text("INSERT INTO watermarks VALUES ('unsealed', 1)"))
    before = await num_plain(ledger)
    await second.run(asyncio.Event())
    assert second.problem is not None and "put the first one back" in second.problem
    assert await num_plain(ledger) == before
    again = Sealing(ledger, MASTER)
    await again.run(asyncio.Event())
    assert again.problem is None and await num_plain(ledger) == 0
