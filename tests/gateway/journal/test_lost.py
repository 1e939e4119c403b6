"""Turns that the journal lost are closed by what engines counted; counts of others are told."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.row_ids import new_try_id, row_turn_id
from gateway.conditions.records import of_lost
from gateway.journal.drain import Billing, Drain
from gateway.journal.lost import AWAY_SECONDS, GRACE_SECONDS, UNCLAIMED_SECONDS, LostTurns
from gateway.journal.rebuilt import Rebuilder
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.journal.table import BROKEN, LOST
from gateway.ledger.database import Ledger
from gateway.prices.files import load_prices
from tests.gateway.journal.test_journal import Witness, nobody, record
from tests.gateway.records import counts_of, ledger_rows

pytestmark = pytest.mark.anyio
FORMER = "0badc0de"
OTHER = "deadbeef"
USAGE = InputUsage(input_tokens=10, cache_read_tokens=90, computed_tokens=10)


def counted(request_id: str, output_tokens: int = 7) -> FinalCounts:
    return counts_of(
        request_id, reason="length", usage=USAGE, output_tokens=output_tokens, scope="scope of w"
    )


class Named(Witness):
    def __init__(self, name: str, *counts: FinalCounts) -> None:
        super().__init__(*counts)
        self.name = name


class Gateway:
    """A journal with a damaged former life, a ledger, engines, and a time that tests move."""

    def __init__(self, folder: Path, ledger_url: str, *engines: Witness) -> None:
        (folder / "journal").mkdir()
        (folder / "journal" / "instances").write_text(f"{FORMER}\n")
        self.journal = Journal(folder / "journal").start()
        assert FORMER in self.journal.instances and self.journal.instance != FORMER
        self.ledger = Ledger(ledger_url)
        self.ledger_url = ledger_url
        self.now = 1000.0
        metrics = Metrics()
        self.charged: list[str] = []
        billing = Billing(load_prices(), metrics, lambda turn: self.charged.append(turn.id))
        rebuilder = Rebuilder(
            lambda workspace: f"scope of {workspace}",
            lambda engine: f"model of {engine}",
            lambda model: "reference",
            lambda: datetime.now(UTC),
        )
        self.lost = LostTurns(
            self.journal,
            self.ledger.known,
            billing.charge,
            rebuilder,
            self._workspaces,
            lambda: self.now,
        )
        self.reconciler = Reconciler(
            self.journal,
            engines,
            metrics,
            billing.charge,
            lambda: self.now,
            self.ledger.known,
            self.lost,
        )
        self.drain = Drain(self.journal, self.ledger.insert_turns, nobody, metrics)

    async def _workspaces(self) -> Sequence[str]:
        return ["v", "w"]

    async def sweep(self, seconds: float = 0.0) -> None:
        self.now += seconds
        await self.reconciler.step(is_sweep=True)
        await self.drain.step()

    async def stop(self) -> list[str]:
        await self.ledger.close()
        await self.journal.stop()
        return sorted(row["id"] for row in ledger_rows(self.ledger_url))


async def test_each_lost_turn_gets_one_row_of_its_last_request_and_then_leaves_the_engines(
    tmp_path: Path, ledger_url: str
) -> None:
    first, moved = (f"msg_{FORMER}{number:020x}" for number in range(2))
    row_try = new_try_id(FORMER, row_turn_id("batch", 0))
    first_engine = Named("one", counted(f"{moved}"), counted(first), counted(row_try))
    second_engine = Named("two", counted(f"{moved}.2", output_tokens=9))
    gateway = Gateway(tmp_path, ledger_url, first_engine, second_engine)
    # A turn goes on elsewhere: nothing is written until the other engine has answered.
    second_engine.is_silent = True
    await gateway.sweep()
    assert gateway.charged == []
    assert sorted(await gateway.journal.set_aside_turns(LOST)) == [first, moved]
    second_engine.is_silent = False
    for _ in range(3):
        await gateway.sweep(30.0)
    assert sorted(gateway.charged) == [first, moved]
    assert await gateway.journal.set_aside_turns() == []
    assert {first, moved, row_try} <= set(
        first_engine.acked
    ) and f"{moved}.2" in second_engine.acked
    assert await gateway.stop() == [first, moved]
    rows = {row["id"]: row for row in ledger_rows(ledger_url)}
    assert {row["workspace_id"] for row in rows.values()} == {"w"}
    assert {row["key_id"] for row in rows.values()} == {"unknown"}
    assert {row["outcome"] for row in rows.values()} == {"gateway_lost"}
    assert (rows[first]["engine"], rows[first]["output_tokens"]) == ("one", 7)
    assert (rows[moved]["engine"], rows[moved]["output_tokens"]) == ("two", 9)
    assert rows[first]["cache_read_tokens"] == 90 and rows[first]["cost_nano"] > 0


async def test_an_engine_that_stays_away_is_not_waited_for_without_end(
    tmp_path: Path, ledger_url: str
) -> None:
    turn_id = f"msg_{FORMER}{0:020x}"
    away = Named("two")
    away.is_silent = True
    gateway = Gateway(tmp_path, ledger_url, Named("one", counted(turn_id)), away)
    await gateway.sweep()
    await gateway.sweep(AWAY_SECONDS - 1.0)
    assert gateway.charged == []
    await gateway.sweep(1.0)
    await gateway.sweep()
    assert await gateway.stop() == [turn_id] == gateway.charged


async def test_a_turn_of_this_process_has_a_moment_to_reach_the_journal(
    tmp_path: Path, ledger_url: str
) -> None:
    engine = Named("one")
    gateway = Gateway(tmp_path, ledger_url, engine)
    late = record(gateway.journal, 0)
    never = record(gateway.journal, 1)
    engine.counts += [counted(late.id), counted(never.id)]
    await gateway.sweep()
    await gateway.sweep(GRACE_SECONDS - 1.0)
    assert gateway.charged == []
    late.outcome = "length"
    await gateway.journal.close(late)
    await gateway.sweep(GRACE_SECONDS)
    await gateway.sweep()
    assert gateway.charged == [never.id]
    assert await gateway.stop() == [late.id, never.id]
    outcomes = {row["id"]: row["outcome"] for row in ledger_rows(ledger_url)}
    assert outcomes == {late.id: "length", never.id: "gateway_lost"}


async def test_a_record_that_can_not_be_read_is_closed_by_the_counts_unless_the_ledger_has_it(
    tmp_path: Path, ledger_url: str
) -> None:
    engine = Named("one")
    gateway = Gateway(tmp_path, ledger_url, engine)
    broken, stored, uncounted = (record(gateway.journal, number) for number in range(3))
    for turn in (broken, stored, uncounted):
        turn.outcome = "length"
        await gateway.journal.close(turn)
    await gateway.ledger.insert_turns([stored])
    with closing(sqlite3.connect(tmp_path / "journal" / "journal.db")) as db, db:
        db.execute("UPDATE turns SET record = CAST(replace(record, 'length', 'lengtH') AS BLOB)")
    engine.counts += [counted(broken.id), counted(stored.id)]
    await gateway.drain.step()
    ids = [turn.id for turn in (broken, stored, uncounted)]
    assert await gateway.journal.set_aside_turns(BROKEN) == ids
    await gateway.sweep()
    await gateway.sweep(GRACE_SECONDS)
    await gateway.sweep()
    assert gateway.charged == [broken.id]
    assert await gateway.journal.set_aside_turns(BROKEN) == [uncounted.id]
    assert await gateway.stop() == [broken.id, stored.id]


async def test_counts_of_another_gateway_are_left_to_it_and_told_when_nobody_asks_for_them(
    tmp_path: Path, ledger_url: str
) -> None:
    foreign_ids = [f"msg_{OTHER}{number:020x}" for number in range(14)]
    engine = Named("one", *map(counted, foreign_ids))
    gateway = Gateway(tmp_path, ledger_url, engine)
    await gateway.sweep()
    await gateway.sweep(UNCLAIMED_SECONDS - 1.0)
    engine.counts.append(counted(f"msg_{OTHER}{99:020x}"))  # that gateway is there still
    assert [*of_lost(gateway.lost)] == []
    await gateway.sweep(1.0)
    (finding,) = of_lost(gateway.lost)
    assert finding.kind == "counts_unclaimed" and OTHER in finding.about
    assert "14 requests" in finding.cause
    engine.counts.clear()
    await gateway.sweep()
    assert [*of_lost(gateway.lost)] == []
    assert await gateway.stop() == [] == gateway.charged
    assert engine.acked == []
