"""The schema goes up, down and up again, on either database."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config

from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import ROOT, migrate
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.sums import Queries, Range
from scripts.stack import python, start
from tests.faults.sizes import number
from tests.postgres import new_database

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
ALL = Range(since_ms=0, until_ms=2**45)
NUM_MIGRATORS = number(3, 10)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseSettings:
    """An empty database of either kind."""
    url = ""
    if request.param == "postgres":
        url = new_database(request.getfixturevalue("postgres"), uuid4().hex)
    return DatabaseSettings(data=tmp_path, database_url=url)


def config_of(settings: DatabaseSettings) -> Config:
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("script_location", str(ROOT / "migrations"))
    config.attributes["url"] = settings.ledger_url
    return config


def turn(number: int) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{number:06}",
        instance="i",
        workspace="default",
        key_id="key",
        model="m",
        stream=False,
        opened_at=NOW,
        outcome="stop",
        input_tokens=10,
        cache_read_tokens=90,
        prefix="0" * 16,
    )


async def put(ledger: Ledger, number: int) -> None:
    await Keys(ledger).create(f"secret {number}", "default", "one", NOW)
    await ledger.insert_turns([turn(number)])


async def counted(ledger: Ledger) -> tuple[int, int, int]:
    """Turns, their prompt tokens and keys; the turns are counted by the sums of whole days."""
    totals = await Queries(ledger).totals(ALL)
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
        assert run(settings, counted) == (count, count * 100, count)


def test_migrators_that_start_together_do_not_race(settings: DatabaseSettings) -> None:
    logs = [settings.data / f"{one}.log" for one in range(NUM_MIGRATORS)]
    started = [
        start(
            [*python("gateway"), "migrate"],
            {
                # A directory each, as on several machines: the file's lock is not what saves them.
                "HOLDFAST_DATA": str(settings.data / str(one if settings.database_url else 0)),
                "HOLDFAST_DATABASE_URL": settings.database_url,
            },
            log,
        )
        for one, log in enumerate(logs)
    ]
    ends = [process.wait() for process in started]
    assert ends == [0] * NUM_MIGRATORS, [log.read_text("utf-8") for log in logs]
