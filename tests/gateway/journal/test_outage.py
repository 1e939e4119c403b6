"""A database that is away: nobody waits for it longer than the deadline, and nothing is lost."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from gateway.base.errors import LedgerUnavailable
from gateway.base.metrics import Metrics
from gateway.base.settings import DatabaseSettings
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Queries, Range
from scripts.bench.report import percentile
from tests.e2e.outage import data_directory, frozen_postgres, locked_sqlite, stopped_postgres
from tests.faults import sizes
from tests.gateway.bodies import body
from tests.gateway.journal.test_journal import nobody
from tests.gateway.ledger.test_sums import at
from tests.gateway.records import ledger_rows
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import HEADERS, ask, eventually, serve, serve_gateway
from tests.migrated import migrate
from tests.postgres import new_database, running_postgres

KINDS = [
    "locked",
    pytest.param("frozen", marks=pytest.mark.postgres),
    pytest.param("stopped", marks=pytest.mark.postgres),
]
TRIES = 3
MAX_ADDED_MS = 5.0
"""To the p99 of ten minutes, alone on the machine."""

EVER = Range(since_ms=0, until_ms=4_102_444_800_000)


class Outage:
    """A database of its own, since it is put out of order."""

    def __init__(self, kind: str, data: Path, url: str) -> None:
        self.kind = kind
        self.data = data
        self.url = url

    def __call__(self) -> AbstractContextManager[None]:
        if self.kind == "locked":
            return locked_sqlite(self.data / "ledger.db")
        where = data_directory(self.url)
        return frozen_postgres(where) if self.kind == "frozen" else stopped_postgres(where)

    def rows(self) -> list[str]:
        return [
            row["id"] for row in ledger_rows(self.url or f"sqlite:///{self.data / 'ledger.db'}")
        ]


@pytest.fixture(params=KINDS)
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outage]:
    if request.param == "locked":
        yield Outage(request.param, tmp_path, "")
        return
    with running_postgres() as server:
        yield Outage(request.param, tmp_path, new_database(server, uuid4().hex))


def test_a_transaction_ends_at_its_deadline_and_the_next_one_works(outage: Outage) -> None:
    settings = DatabaseSettings(data=outage.data, database_url=outage.url)
    migrate(settings)

    async def check() -> None:
        ledger = Ledger(settings.ledger_url)
        await ledger.insert_turns([at(1, 0)])
        with outage():
            # 5 s of deadline; psycopg by itself takes 10 s more, or for ever. A busy machine may
            # stop one try for longer than that, hardly all of them.
            took: list[float] = []
            while len(took) < TRIES and min(took, default=12.0) >= 12:
                started = time.monotonic()
                with pytest.raises(LedgerUnavailable):
                    await ledger.insert_turns([at(2, 0)])
                took.append(time.monotonic() - started)
            assert min(took) < 12
        for _ in range(100):
            try:
                await ledger.insert_turns([at(2, 0)])
                break
            except LedgerUnavailable:
                await asyncio.sleep(0.2)
        assert (await Queries(ledger).totals(EVER)).requests == 2
        await ledger.close()
        await asyncio.sleep(0.1)  # aiosqlite ends the thread of a failed connection by itself

    asyncio.run(check())


def test_served_without_a_database_then_drained_once(outage: Outage) -> None:
    """Ten turns on every commit; FAULTS=full asks twenty a second for ten minutes."""
    engine = ScriptedEngine()
    turn_ids = list[str]()
    count, pause = sizes.number((10, 0.0), (12_000, 0.05))
    before = list[float]()
    without = list[float]()
    with (
        serve(engine) as engine_url,
        serve_gateway(outage.data, engine_url, database_url=outage.url) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=120, trust_env=False) as http,
    ):

        def backlog() -> int:
            health = http.get("/readyz").json()
            assert health["ready"] and health["journal"]["has_room"]
            return int(health["journal"]["backlog"])

        def serve_turns(count: int, took: list[float]) -> None:
            begun = time.monotonic()
            for at in range(count):
                time.sleep(max(0.0, begun + at * pause - time.monotonic()))
                started = time.monotonic()
                answer = http.post("/v1/messages", json=body())
                took.append(time.monotonic() - started)
                assert answer.status_code == 200
                turn_ids.append(answer.json()["id"])

        serve_turns(count // 10, before)
        eventually(lambda: backlog() == 0)
        with outage():
            serve_turns(count, without)
            stranger = http.post("/v1/messages", json=body(), headers={"x-api-key": "hf-unknown"})
            # Reading is not blocked by SQLite's lock, so the stranger is known to be one.
            assert stranger.status_code == (401 if outage.kind == "locked" else 529)
            assert backlog() == count
        serve_turns(1, without)
        eventually(lambda: backlog() == 0)
    assert sorted(outage.rows()) == sorted(turn_ids)
    p99 = [percentile(took, 0.99) * 1000 for took in (before, without)]
    sizes.told("no database", kind=outage.kind, turns=count, p99_ms_with_and_without=p99)
    assert sizes.number(True, p99[1] < p99[0] + MAX_ADDED_MS), p99


@pytest.mark.parametrize(
    "outage",
    [
        "locked",
        pytest.param("frozen", marks=[pytest.mark.postgres, pytest.mark.slow]),
        pytest.param("stopped", marks=pytest.mark.postgres),
    ],
    indirect=True,
)
def test_it_does_not_hold_up_the_stop_and_the_next_start_drains(outage: Outage) -> None:
    with serve(ScriptedEngine()) as engine, ExitStack() as away:
        with serve_gateway(outage.data, engine, database_url=outage.url) as url:
            away.enter_context(outage())
            turn_ids = [ask(url).json()["id"] for _ in range(3)]
            time.sleep(1)  # the drain has begun to wait
        # Leaving the block stopped it: `serve` fails where that takes very long.
        away.close()
        with serve_gateway(outage.data, engine, database_url=outage.url):
            eventually(lambda: sorted(outage.rows()) == sorted(turn_ids))


@pytest.mark.postgres
def test_a_turn_that_the_ledger_cannot_hold_is_set_aside_and_stops_no_other(
    tmp_path: Path, postgres: str
) -> None:
    settings = DatabaseSettings(data=tmp_path, database_url=new_database(postgres, uuid4().hex))
    migrate(settings)

    async def check() -> None:
        journal = Journal(tmp_path / "j").start()
        metrics = Metrics()
        ledger = Ledger(settings.ledger_url)
        for turn in (at(1, 0), at(2, 0, model="a\x00b"), at(3, 0, workspace="w" * 100), at(4, 0)):
            await journal.open(turn)
            await journal.close(turn)

        drain = Drain(journal, ledger.insert_turns, nobody, metrics)
        await drain.step()
        assert (await Queries(ledger).totals(EVER)).requests == 2
        assert journal.backlog == 0 and journal.num_set_aside == 2
        assert await drain.step() == 0
        assert b"holdfast_gateway_turns_set_aside_total 2.0" in metrics.exposition()
        await journal.stop()
        await ledger.close()

    asyncio.run(check())
