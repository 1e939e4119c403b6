"""Journal, reconciler, recovery and cost of turns that were sent to more than one engine."""

from pathlib import Path

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.drain import Billing, Drain
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prices.files import load_prices
from tests.gateway.journal.test_journal import Witness, record, settling
from tests.gateway.records import counts_of

pytestmark = pytest.mark.anyio

FIRST = InputUsage(input_tokens=10, cache_write_5m_tokens=3_000, computed_tokens=3_010)
SECOND = InputUsage(
    input_tokens=10, cache_read_tokens=2_992, cache_write_5m_tokens=8, computed_tokens=18
)
NOTHING = InputUsage(input_tokens=0)


def counts(request_id: str, output_tokens: int) -> FinalCounts:
    usage = InputUsage(input_tokens=10, computed_tokens=10)
    return counts_of(request_id, reason="cancelled", usage=usage, output_tokens=output_tokens)


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


@pytest.mark.parametrize(
    ("leg", "outcome", "told", "paid", "computed"),
    [
        # It had begun to answer: what was told is paid, whoever ended it.
        (2, "client_disconnect", SECOND, FIRST, 3_028),
        (2, "gateway_killed", SECOND, FIRST, 3_028),
        # It had not: a client that left pays what was done for it, and nobody pays a failure.
        (2, "client_disconnect", None, FIRST, 3_022),
        (2, "timeout_error", None, NOTHING, 3_022),
        # The second engine never had it.
        (1, "client_disconnect", FIRST, FIRST, 3_010),
        (1, "timeout_error", FIRST, NOTHING, 3_010),
    ],
)
async def test_a_turn_in_two_legs_pays_the_classes_of_its_first(
    tmp_path: Path,
    leg: int,
    outcome: str,
    told: InputUsage | None,
    paid: InputUsage,
    computed: int,
) -> None:
    journal = Journal(tmp_path).start()
    turn = record(journal, 1)
    turn.is_first_leg = leg == 1
    if leg == 2:
        turn.begin_anew()
        turn.first_leg = FIRST
    await journal.open(turn)
    await journal.stop()
    journal = Journal(tmp_path).start()
    (turn,) = await journal.open_turns()
    turn.outcome = outcome
    witness = Witness(counts_of(turn.id, usage=FIRST))
    if leg == 2:
        prefilled = 0 if told else 12
        witness.counts.append(
            counts_of(turn.request_id, reason="cancelled", usage=told, prefilled_tokens=prefilled)
        )
    reconciler = settling(journal, witness)
    reconciler.take_over(turn)
    await reconciler.step()
    (closed,) = await journal.closed_turns(10)
    await journal.stop()
    for name in ("input_tokens", "cache_write_5m_tokens", "cache_read_tokens"):
        assert getattr(closed, name) == getattr(paid, name), name
    assert (closed.computed_tokens, closed.cache_write_1h_tokens) == (computed, 0)
    assert closed.cost == paid.input_tokens * 1000 + paid.cache_write_5m_tokens * 1250


@pytest.mark.parametrize(
    ("outcome", "paid"), [("client_disconnect", 3_000), ("overloaded_error", 0)]
)
async def test_a_turn_that_ends_between_its_legs_is_charged_by_who_ended_it(
    tmp_path: Path, outcome: str, paid: int
) -> None:
    journal = Journal(tmp_path).start()
    turn = record(journal, 1)
    turn.begin_anew()
    turn.first_leg, turn.outcome = FIRST, outcome
    Billing(load_prices(), Metrics()).charge(turn)
    assert (turn.cache_write_5m_tokens, turn.computed_tokens) == (paid, 3_010)
    await journal.stop()
