"""Final counts that an engine keeps for turns that the journal does not have."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.base.errors import LedgerUnavailable
from gateway.base.metrics import Metrics
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.database import Ledger
from tests.gateway.journal.test_journal import Witness, nobody, record, settling
from tests.gateway.records import counts_of
from tests.gateway.serving import WAIT_SECONDS

pytestmark = pytest.mark.anyio


async def test_counts_are_acknowledged_if_the_ledger_has_the_turn_and_else_it_is_named_once(
    tmp_path: Path,
    ledger_url: str,
) -> None:
    journal, ledger = Journal(tmp_path / "journal").start(), Ledger(ledger_url)
    stored, waiting, lost = (record(journal, number) for number in range(3))
    other = "msg_0123456700000000"
    await ledger.insert_turns([stored])
    await journal.open(waiting)
    mine = [stored.id, f"{stored.id}.2", waiting.id, lost.id, f"{lost.id}.2"]
    witness = Witness(*map(counts_of, [*mine, other]))
    reconciler = settling(journal, witness, known=ledger.known)
    for _ in range(3):
        await reconciler.step(is_sweep=True)
        assert set(witness.acked) == {stored.id, f"{stored.id}.2"}
        assert await journal.set_aside_turns() == [lost.id]
        assert journal.num_set_aside == 1
    await ledger.close()
    await journal.stop()

    # Rows from `recover --instance` come into the ledger. The next start finds them there.
    journal, ledger = Journal(tmp_path / "journal").start(), Ledger(ledger_url)
    await ledger.insert_turns([lost])
    assert journal.num_set_aside == 1

    await Drain(journal, ledger.insert_turns, nobody, Metrics(), ledger.known).step()
    assert await journal.set_aside_turns() == [] and journal.num_set_aside == 0
    await settling(journal, witness, known=ledger.known).step(is_sweep=True)
    assert {lost.id, f"{lost.id}.2"} <= set(witness.acked)
    await ledger.close()
    await journal.stop()


async def test_a_turn_that_the_drain_inserts_between_the_two_questions_is_not_named_lost(
    journal: Journal,
) -> None:
    """The journal is asked first, since the row is in the ledger before the journal forgets it."""
    turn = record(journal, 1)
    await journal.open(turn)
    await journal.close(turn)
    rows: set[str] = set()

    async def insert(turns: Sequence[object]) -> None:
        rows.add(turn.id)

    drain = Drain(journal, insert, nobody, Metrics())

    async def known(turn_ids: Sequence[str]) -> set[str]:
        found = rows & set(turn_ids)
        await drain.step()
        return found

    witness = Witness(counts_of(turn.id))
    reconciler = settling(journal, witness, known=known)
    await reconciler.step(is_sweep=True)
    assert await journal.set_aside_turns() == []
    await drain.step()
    await reconciler.step(is_sweep=True)
    assert witness.acked == [turn.id] and await journal.set_aside_turns() == []


async def test_while_the_ledger_is_away_nothing_is_acknowledged_and_nothing_is_named(
    journal: Journal,
) -> None:
    turn = record(journal, 1)
    witness, is_away = Witness(counts_of(turn.id)), True

    async def known(turn_ids: Sequence[str]) -> set[str]:
        if is_away:
            raise LedgerUnavailable
        return set(turn_ids)

    reconciler = settling(journal, witness, known=known)
    await reconciler.step(is_sweep=True)
    assert not witness.acked and not await journal.set_aside_turns()
    is_away = False
    await reconciler.step(is_sweep=True)
    assert witness.acked == [turn.id] and not await journal.set_aside_turns()


async def test_an_engine_is_swept_when_it_first_answers(journal: Journal) -> None:
    witness, stopping = Witness(counts_of(record(journal, 1).id)), asyncio.Event()
    witness.is_ready = False

    async def known(turn_ids: Sequence[str]) -> set[str]:
        return set(turn_ids)

    # The clock stands, so that no interval goes by.
    running = asyncio.create_task(settling(journal, witness, known=known).run(stopping))
    await asyncio.sleep(0.3)
    assert not witness.acked
    witness.is_ready = True
    async with asyncio.timeout(WAIT_SECONDS):
        while not witness.acked:
            await asyncio.sleep(0.05)
    stopping.set()
    await running
