"""What a turn in two legs costs, however it ends."""

from pathlib import Path

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.charge import Billing
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.prices.files import load_prices
from tests.gateway.journal.test_journal import Witness, record

pytestmark = pytest.mark.anyio

FIRST = InputUsage(input_tokens=10, cache_write_5m_tokens=3_000, computed_tokens=3_010)
SECOND = InputUsage(
    input_tokens=10, cache_read_tokens=2_992, cache_write_5m_tokens=8, computed_tokens=18
)
NOTHING = InputUsage(input_tokens=0)


def in_second_leg(journal: Journal, outcome: str) -> TurnRecord:
    turn = record(journal, 1)
    turn.begin_anew()
    turn.first_leg, turn.outcome = FIRST, outcome
    return turn


def usage_of(turn: TurnRecord) -> InputUsage:
    return InputUsage(
        input_tokens=turn.input_tokens,
        cache_read_tokens=turn.cache_read_tokens,
        cache_write_5m_tokens=turn.cache_write_5m_tokens,
        cache_write_1h_tokens=turn.cache_write_1h_tokens,
    )


def test_each_token_is_of_the_class_that_it_had_in_the_first_leg() -> None:
    usage = in_second_leg_usage(SECOND)
    assert usage.cache_write_5m_tokens == 3_000 and usage.cache_read_tokens == 0
    assert usage.prompt_tokens == FIRST.prompt_tokens == SECOND.prompt_tokens
    assert usage.computed_tokens == 3_028


def in_second_leg_usage(told: InputUsage) -> InputUsage:
    turn = TurnRecord(
        id="m", instance="", workspace="", key_id="", model="", stream=False, opened_at=None,  # type: ignore[arg-type]
        first_leg=FIRST,
    )  # fmt: skip
    return turn.over_legs(told)


@pytest.mark.parametrize(
    ("outcome", "told", "prefilled", "paid", "computed"),
    [
        # It had begun to answer: what was told is paid, whoever ended it.
        ("client_disconnect", SECOND, 0, FIRST, 3_028),
        ("gateway_killed", SECOND, 0, FIRST, 3_028),
        # It had not: a client that left pays what was done for it, and nobody pays a failure.
        ("client_disconnect", None, 12, FIRST, 3_022),
        ("timeout_error", None, 12, NOTHING, 3_022),
    ],
)
async def test_the_engines_counts_of_the_second_leg_close_the_turn_with_the_first_legs_classes(
    tmp_path: Path,
    outcome: str,
    told: InputUsage | None,
    prefilled: int,
    paid: InputUsage,
    computed: int,
) -> None:
    journal = Journal(tmp_path).start()
    turn = in_second_leg(journal, outcome)
    await journal.open(turn)
    await journal.stop()
    journal = Journal(tmp_path).start()
    (turn,) = await journal.open_turns()
    turn.outcome = outcome
    final = FinalCounts(
        request_id=turn.request_id,
        epoch="e",
        reason="cancelled",
        usage=told,
        prefilled_tokens=prefilled,
    )
    first = FinalCounts(request_id=turn.id, epoch="e", reason="stop", usage=FIRST)
    billing = Billing(load_prices(), Metrics())
    witness = Witness(first, final)
    reconciler = Reconciler(journal, [witness], Metrics(), billing.charge, lambda: 0.0)
    reconciler.take_over(turn)
    await reconciler.step()
    (closed,) = await journal.closed_turns(10)
    await journal.stop()
    assert usage_of(closed) == InputUsage(
        **{
            name: getattr(paid, name)
            for name in ("input_tokens", "cache_write_5m_tokens", "cache_read_tokens")
        }
    )
    assert closed.computed_tokens == computed
    assert closed.cost == paid.input_tokens * 1000 + paid.cache_write_5m_tokens * 1250


@pytest.mark.parametrize(
    ("outcome", "paid"), [("client_disconnect", 3_000), ("overloaded_error", 0)]
)
async def test_a_turn_that_ends_between_its_legs_is_charged_by_who_ended_it(
    tmp_path: Path, outcome: str, paid: int
) -> None:
    """The second engine never had it."""
    journal = Journal(tmp_path).start()
    turn = in_second_leg(journal, outcome)
    Billing(load_prices(), Metrics()).charge(turn)
    assert (turn.cache_write_5m_tokens, turn.computed_tokens) == (paid, 3_010)
    await journal.stop()


@pytest.mark.parametrize(("outcome", "paid"), [("client_disconnect", 3_000), ("timeout_error", 0)])
async def test_a_first_leg_alone_is_paid_by_a_client_that_left(
    tmp_path: Path, outcome: str, paid: int
) -> None:
    journal = Journal(tmp_path).start()
    turn = record(journal, 1)
    turn.is_first_leg, turn.outcome = True, outcome
    await journal.open(turn)
    first = FinalCounts(request_id=turn.id, epoch="e", reason="stop", usage=FIRST)
    billing = Billing(load_prices(), Metrics())
    reconciler = Reconciler(journal, [Witness(first)], Metrics(), billing.charge, lambda: 0.0)
    reconciler.take_over(turn)
    await reconciler.step()
    (closed,) = await journal.closed_turns(10)
    await journal.stop()
    assert (closed.cache_write_5m_tokens, closed.computed_tokens) == (paid, 3_010)
