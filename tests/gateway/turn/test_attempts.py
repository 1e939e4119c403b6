"""Journal, reconciler, recovery and cost of turns that were sent to more than one engine."""

from pathlib import Path

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.journal.drain import Billing
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


@pytest.mark.parametrize(
    ("leg", "outcome", "usage", "paid", "computed"),
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
    usage: InputUsage | None,
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
        prefilled = 0 if usage else 12
        witness.counts.append(
            counts_of(turn.request_id, reason="cancelled", usage=usage, prefilled_tokens=prefilled)
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
    turn.first_leg = FIRST
    turn.outcome = outcome
    Billing(load_prices(), Metrics()).charge(turn)
    assert (turn.cache_write_5m_tokens, turn.computed_tokens) == (paid, 3_010)
    await journal.stop()
