"""Final counts that an engine keeps for turns that the journal does not have."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.base.metrics import Metrics
from gateway.journal.drain import Drain
from gateway.journal.store import Journal
from gateway.ledger.database import Ledger
from tests.gateway.journal.test_journal import Witness, nobody, record, settling
from tests.gateway.records import counts_of

pytestmark = pytest.mark.anyio


async def test_counts_are_acknowledged_if_the_ledger_has_the_turn_and_else_it_is_named_once(
    tmp_path: Path, ledger_url: str
) -> None:
    journal = Journal(tmp_path / "journal").start()
    ledger = Ledger(ledger_url)
    stored, waiting, lost = (record(journal, number) for number in range(3))
    foreign_id = "msg_0123456700000000"
    await ledger.insert_turns([stored])
    await journal.open(waiting)
    mine = [stored.id, f"{stored.id}.2", waiting.id, lost.id, f"{lost.id}.2"]
    witness = Witness(*map(counts_of, [*mine, foreign_id]))
    reconciler = settling(journal, witness, known=ledger.known)
    for _ in range(3):
        await reconciler.step(is_sweep=True)
        assert set(witness.acked) == {stored.id, f"{stored.id}.2"}
        assert await journal.set_aside_turns() == [lost.id]
        assert journal.num_set_aside == 1
    await ledger.close()
    await journal.stop()

    # Rows from `recover --instance` come into the ledger. The next start finds them there.
    journal = Journal(tmp_path / "journal").start()
    ledger = Ledger(ledger_url)
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
        present = rows & set(turn_ids)
        await drain.step()
        return present

    witness = Witness(counts_of(turn.id))
    reconciler = settling(journal, witness, known=known)
    await reconciler.step(is_sweep=True)
    assert await journal.set_aside_turns() == []
    await drain.step()
    await reconciler.step(is_sweep=True)
    assert witness.acked == [turn.id] and await journal.set_aside_turns() == []
