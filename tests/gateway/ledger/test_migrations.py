"""The schema goes up, down and up again, on either database, and revisions are only added."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from msgspec.structs import replace
from sqlalchemy import text

from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import ROOT, migrate
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.leases import leases_kept
from gateway.ledger.reads.sums import Queries, Range, Reasons
from gateway.ledger.upkeep import retain
from gateway.prompt.fingerprint import Fingerprint, Point, pack, unpack
from gateway.structs.fleet import LeasesKept
from tests.gateway.ledger.test_epochs import DAY, ended, epoch_report
from tests.gateway.ledger.test_sums import START, at
from tests.gateway.records import ledger_rows

FIRST = "f3afc8957a46c6baf54fb2a65782c185aa7dd038c2bf1f208582da686d6f55d2"
"""The SHA-256 of revision 0001. Databases were made with it: a change goes into a new revision."""


@pytest.fixture
def settings(tmp_path: Path, shared_database: str) -> DatabaseSettings:
    """An empty database of either kind."""
    return DatabaseSettings(data=tmp_path, database_url=shared_database)


def config_of(settings: DatabaseSettings) -> Config:
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = settings.ledger_url
    return config


async def put(ledger: Ledger, number: int) -> None:
    await Keys(ledger).create(f"secret {number}", "default", "one", START)
    await ledger.insert_turns([at(number, 0)])


async def counted(ledger: Ledger) -> tuple[int, int, int]:
    """Turns, their prompt tokens and keys; the turns are counted by the sums of whole days."""
    totals = await Queries(ledger).totals(Range(since_ms=0, until_ms=2**45))
    return totals.requests, totals.prompt_tokens, len(await Keys(ledger).all())


def run(settings: DatabaseSettings, work: object) -> object:
    return asyncio.run(with_ledger(settings.ledger_url, work))  # type: ignore[arg-type]


def test_the_schema_is_the_models_and_goes_down_to_nothing(settings: DatabaseSettings) -> None:
    migrate(settings)
    config = config_of(settings)
    command.check(config)
    command.downgrade(config, "base")
    migrate(settings)
    command.check(config)


def test_a_second_migration_leaves_rows_and_sums(settings: DatabaseSettings) -> None:
    for count in (1, 2):
        migrate(settings)
        run(settings, lambda ledger, count=count: put(ledger, count))
        assert run(settings, counted) == (count, count * 10, count)


_AS_BEFORE = (
    "INSERT INTO reason_rollups (by_engine, width_seconds, start_ms, workspace_id, engine, model,"
    " kind, value, requests) SELECT by_engine, width_seconds, start_ms, workspace_id, engine,"
    " model, 'miss', value, requests FROM reason_rollups WHERE kind = 'part'"
    " ON CONFLICT (by_engine, width_seconds, start_ms, workspace_id, engine, model, kind, value)"
    " DO UPDATE SET requests = reason_rollups.requests + excluded.requests",
    "DELETE FROM reason_rollups WHERE kind = 'part'",
)
"""Makes the sums of reasons as versions before revision 0009 did."""


def test_reasons_of_before_are_told_apart_where_the_turns_are_there(
    settings: DatabaseSettings,
) -> None:
    migrate(settings)
    there, gone = (
        [
            at(n, day, cache_read_tokens=read_tokens, engine="engine-0")
            for n, read_tokens in enumerate(reads, day)
        ]
        for day, reads in ((9, (0, 0, 50)), (0, (0, 50, 50)))
    )
    horizon = int(START.timestamp() * 1000) + 5 * 86_400_000

    async def make_as_before(ledger: Ledger) -> None:
        await ledger.insert_turns([*there, *gone])
        async with ledger.transaction() as connection:
            for statement in _AS_BEFORE:
                await connection.execute(text(statement))
        await retain(ledger, horizon, 0, 0)

    run(settings, make_as_before)
    command.downgrade(config_of(settings), "0008")
    migrate(settings)

    def reasons(since_day: int, until_day: int, **of: str) -> Reasons:
        bounds = [
            int(START.timestamp() * 1000) + day * 86_400_000 for day in (since_day, until_day)
        ]
        period = Range(since_ms=bounds[0], until_ms=bounds[1], **of)
        answer = run(settings, lambda ledger: Queries(ledger).reasons(period))
        assert isinstance(answer, Reasons)
        return answer

    for of in ({}, {"engine": "engine-0"}):
        recent = reasons(8, 12, **of)
        assert (recent.misses, recent.parts, recent.mixed) == ({"cold": 2}, {"cold": 1}, {})
        old = reasons(-2, 2, **of)
        assert (old.misses, old.parts, old.mixed) == ({}, {}, {"cold": 3})
        assert old.marks == recent.marks == {}, "nobody told of markers"


def test_models_of_prefixes_of_before_are_told_by_their_turns(settings: DatabaseSettings) -> None:
    migrate(settings)
    turns = [at(1, 0, model="n"), at(2, 0, model="m"), at(3, 0, model="n", prefix="1" * 16)]

    async def models(ledger: Ledger) -> list[tuple[str, str]]:
        query = text("SELECT least_model, model FROM prefixes ORDER BY prefix")
        return [tuple(row) for row in await ledger.rows(query)]

    run(settings, lambda ledger: ledger.insert_turns(turns))
    command.downgrade(config_of(settings), "0009")
    migrate(settings)
    assert run(settings, models) == [("m", "n"), ("n", "n")]


PRINTED = Fingerprint(
    model="m",
    parameters=b"12h",
    num_tools=0,
    num_system=1,
    points=[Point(0, None, b"12h of it", 9)],
    marks=[(0, "12h"), (3, "30m"), (4, "12h")],
)


async def twelve_hours(ledger: Ledger) -> None:
    """Many turns: their fingerprints are read a page at a time."""
    first = replace(
        at(1, 0), cache_write_12h_tokens=900, prefix_ttl="12h", fingerprint=pack(PRINTED)
    )
    later = [at(number, 0, fingerprint=pack(PRINTED)) for number in range(2, 503)]
    early = at(503, 0, fingerprint=msgspec.msgpack.encode(["12h", b"", 0, 0, []]))
    await ledger.insert_turns([first, *later, early])


async def prefix_ttls(ledger: Ledger) -> list[str | None]:
    return [row.ttl for row in await ledger.rows(text("SELECT ttl FROM prefixes"))]


def test_writes_for_twelve_hours_go_down_to_the_longest_class_of_before(
    settings: DatabaseSettings,
) -> None:
    migrate(settings)
    run(settings, twelve_hours)
    before = run(settings, counted)
    command.downgrade(config_of(settings), "0010")
    migrate(settings)
    assert run(settings, counted) == before
    assert run(settings, prefix_ttls) == ["1h"]
    *rows, early = ledger_rows(settings.ledger_url)
    assert (rows[0]["cache_write_1h_tokens"], rows[0]["cache_write_12h_tokens"]) == (900, 0)
    assert rows[0]["prefix_ttl"] == "1h"
    assert rows[0]["checksum"] is None, "the earlier version has another"
    expected = replace(PRINTED, marks=[(0, "1h"), (3, "30m"), (4, "1h")])
    assert len(rows) == 502 and all(unpack(row["fingerprint"]) == expected for row in rows)
    assert unpack(early["fingerprint"]).model == "12h"


async def ends_told(ledger: Ledger) -> None:
    ends = ended(expired=1, dropped=1, released=2)
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=6, ended=ends)])


async def kept_of(ledger: Ledger) -> LeasesKept:
    return await leases_kept(ledger, DAY, {"engine-0": "a"})


def test_released_leases_go_down_to_what_an_operator_dropped(settings: DatabaseSettings) -> None:
    migrate(settings)
    run(settings, ends_told)
    before = run(settings, kept_of)
    command.downgrade(config_of(settings), "0011")
    migrate(settings)
    after = run(settings, kept_of)
    assert isinstance(before, LeasesKept) and isinstance(after, LeasesKept)
    assert (before.released, before.lost) == (2, {"dropped": 1})
    assert (after.released, after.lost) == (0, {"dropped": 3})
    assert (after.expired, after.held) == (before.expired, before.held) == (1, 2)


def test_the_first_revision_is_what_it_was() -> None:
    path = ROOT / "migrations" / "versions" / "0001_schema.py"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FIRST
