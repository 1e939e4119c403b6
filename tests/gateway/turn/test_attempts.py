"""Journal, reconciler and recovery of turns that were sent to more than one engine."""

from pathlib import Path

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord, turn_of
from gateway.journal.drain import Drain
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from tests.gateway.journal.test_journal import Witness, record

pytestmark = pytest.mark.anyio


def counts(request_id: str, output_tokens: int) -> FinalCounts:
    usage = InputUsage(input_tokens=10, computed_tokens=10)
    return FinalCounts(
        request_id=request_id,
        epoch="e",
        reason="cancelled",
        usage=usage,
        output_tokens=output_tokens,
    )


def test_a_request_id_tells_its_turn_and_attempt() -> None:
    assert turn_of("msg_0123") == ("msg_0123", 1)
    assert turn_of("msg_0123.3") == ("msg_0123", 3)
    assert turn_of("else.where") == ("else", 1)


async def test_after_a_kill_the_last_attempts_counts_are_the_turns(tmp_path: Path) -> None:
    journal = Journal(tmp_path).start()
    turn = record(journal, 1)
    await journal.open(turn)
    turn.attempt, turn.engine = 2, "engine-1"
    await journal.rewrite(turn)
    await journal.stop()

    journal, now = Journal(tmp_path).start(), [0.0]
    first, second = Witness(counts(turn.id, 3)), Witness()
    second.name, second.running = "engine-1", {f"{turn.id}.2"}
    charged: list[TurnRecord] = []
    metrics = Metrics()
    reconciler = Reconciler(journal, [first, second], metrics, charged.append, lambda: now[0])
    assert await reconciler.recover() == 1
    await reconciler.step(is_sweep=True)
    assert f"{turn.id}.2" in second.cancelled
    assert not charged and not first.acked, "the first engine's counts are not the turn's"
    second.counts, second.running = [counts(f"{turn.id}.2", 7)], set()
    await reconciler.step()
    assert [(t.id, t.engine, t.output_tokens) for t in charged] == [(turn.id, "engine-1", 7)]

    acked: list[tuple[str, list[str]]] = []
    stored: list[TurnRecord] = []

    async def insert(turns: object) -> None:
        stored.extend(turns)  # type: ignore[call-overload]

    async def acknowledge(name: str, request_ids: list[str]) -> None:
        acked.append((name, request_ids))

    await Drain(journal, insert, acknowledge, metrics).step()
    assert acked == [("engine-1", [f"{turn.id}.2"])]
    assert [row.id for row in stored] == [turn.id]
    await reconciler.step(is_sweep=True)
    assert first.acked == [turn.id], "the ledger has the turn: nobody needs these any more"
    await journal.stop()


async def test_what_a_turn_left_behind_is_cancelled_acknowledged_and_charged_to_nobody(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path).start()
    turn = record(journal, 1)
    await journal.open(turn)
    witness, charged = Witness(), list[TurnRecord]()
    witness.running = {turn.id}
    reconciler = Reconciler(journal, [witness], Metrics(), charged.append, lambda: 0.0)
    reconciler.retire("engine-0", turn.id)
    witness.is_ready = False
    await reconciler.step()
    assert not witness.cancelled
    witness.is_ready = True
    await reconciler.step()
    assert witness.cancelled == [turn.id] and not witness.acked
    witness.running, witness.counts = set(), [counts(turn.id, 5)]
    await reconciler.step()
    assert witness.acked == [turn.id] and not charged
    assert [open_one.id for open_one in await journal.open_turns()] == [turn.id]
    witness.cancelled.clear()
    await reconciler.step()
    assert not witness.cancelled, "it is settled"
    await journal.stop()
