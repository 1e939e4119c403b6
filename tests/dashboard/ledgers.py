"""Ledgers in the states that a page must draw: turns that are inserted, summed by the ledger."""

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from engine.protocol import InputUsage
from gateway.base.epochs import EpochReport
from gateway.base.settings import DatabaseSettings
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.rollups import row_of
from gateway.ledger.schema import TurnRow
from gateway.ledger.upkeep import rebuild
from gateway.prices.files import PriceBook
from tests.gateway.records import turn_record
from tests.migrated import migrate

HOSTILE = "=![x](http://evil.test/x.png) :red[boo] <img src=//evil.test/i> $a$"
NUM_MANY = 20_000
# A dollar for a million tokens; written at 1.25 and 2, read at a tenth, output at five.
PRICE = PriceBook().find("reference", date(2026, 11, 1))
Row = dict[str, Any]


def turn(number: int, moment: datetime, **changes: Any) -> Row:
    """The columns of a turn; tokens are `input`, `read`, `write_5m`, `write_1h`, `output`."""
    tokens = {name: changes.pop(name, 0) for name in ("input", "read", "write_5m", "write_1h")}
    output = changes.pop("output", 10)
    price = changes.pop("price", PRICE)
    usage = InputUsage(
        input_tokens=tokens["input"],
        cache_read_tokens=tokens["read"],
        cache_write_5m_tokens=tokens["write_5m"],
        cache_write_1h_tokens=tokens["write_1h"],
        computed_tokens=tokens["input"] + tokens["write_5m"] + tokens["write_1h"],
    )
    cost = price.cost(usage, output) if price else None
    record = turn_record(
        f"msg_{number:028x}",
        workspace="default",
        key_id="key_1",
        engine="engine-0",
        stream=True,
        opened_at=moment,
        outcome="stop",
        output_tokens=output,
        first_token_seconds=0.2,
        duration_seconds=1.0,
        prefill_seconds=0.1,
        price=price.id if price else None,
        cost=cost.actual if cost else None,
        cost_without_cache=cost.without_cache if cost else None,
        http_request_id=f"req_{number:024x}",
        status=200,
    )
    record.take_usage(usage)
    row = row_of(record)
    assert changes.keys() <= row.keys(), changes.keys() - row.keys()
    return row | changes


def fill(data: Path, turns: Iterator[Row], reports: Sequence[EpochReport] = ()) -> None:
    """Migrate, insert and sum; `reports` are what engines told."""
    data.mkdir(parents=True)
    settings = DatabaseSettings(data=data)
    migrate(settings)

    async def insert_all(ledger: Ledger) -> None:
        if rows := list(turns):
            async with ledger.transaction() as connection:
                await connection.execute(insert(TurnRow), rows)
        await rebuild(ledger)
        await ledger.record_epochs(reports)

    asyncio.run(with_ledger(settings.ledger_url, insert_all))


def rows(data: Path, query: str) -> list[tuple[Any, ...]]:
    """Of a gateway's ledger, by plain SQL."""
    with closing(sqlite3.connect(next(data.glob("*.db")))) as connection:
        return connection.execute(query).fetchall()


def empty() -> Iterator[Row]:
    return iter(())


def one_row() -> Iterator[Row]:
    moment = datetime.now(UTC) - timedelta(hours=3)
    yield turn(1, moment, input=100, write_5m=2000, miss_reason="cold")


def refused() -> Iterator[Row]:
    """A request that no engine took, and one whose prompt no engine had seen."""
    moment = datetime.now(UTC) - timedelta(minutes=10)
    yield turn(1, moment, output=0, outcome="overloaded_error", status=529)
    yield turn(
        2, moment, output=0, outcome="overloaded_error", available_tokens=0, captured_tokens=0
    )


def hostile() -> Iterator[Row]:
    start = datetime.now(UTC) - timedelta(hours=2)
    names = {"workspace_id": HOSTILE[:64], "model": HOSTILE, "engine": HOSTILE[:64]}
    for number in range(3):
        yield turn(
            number,
            start + timedelta(minutes=number),
            read=100 * number,
            write_5m=100,
            miss_reason=HOSTILE[:32],
            prefix=HOSTILE[:16],
            outcome=HOSTILE[:32],
            **names,
        )


def many() -> Iterator[Row]:
    """Three thousand of a month; half of them in prefixes that come again."""
    chance = random.Random(20261121)
    start = datetime.now(UTC) - timedelta(days=30)
    for number in range(NUM_MANY):
        moment = start + timedelta(days=30) * (number / NUM_MANY)
        workspace = f"team-{chance.randrange(12):02}"
        read_tokens = chance.choice((0, 4000, 20_000))
        shared = chance.random() < 0.5
        yield turn(
            number,
            moment,
            workspace_id=workspace,
            key_id=f"key_{workspace}",
            engine=chance.choice(("engine-0", "engine-1")),
            model=chance.choice(("m", "n")),
            input=chance.randrange(600),
            read=read_tokens,
            write_5m=0 if read_tokens else 4000,
            first_token_seconds=0.05 if read_tokens else 0.9,
            miss_reason=None if read_tokens else "ttl_expired",
            prefix=f"{chance.randrange(500):016x}" if shared else None,
            prefix_ttl="5m" if shared else None,
        )


FILLS: dict[str, Callable[[], Iterator[Row]]] = {
    "empty": empty,
    "managed": empty,
    "one_row": one_row,
    "refused": refused,
    "hostile": hostile,
    "many": many,
}
