"""Limits of workspaces, on clocks that the tests move: what is reserved, and what is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import accounts as module
from gateway.admission.accounts import TurnClaim, WorkspaceLimits
from gateway.admission.rates import TokenBucket
from gateway.base.errors import Overloaded, RateLimited, SpendLimitReached
from gateway.base.grants import Limits
from gateway.base.record import TurnRecord
from gateway.prompt.ask import Principal
from tests.gateway.records import turn_record

START = datetime(2026, 11, 30, 23, 0, tzinfo=UTC)


@dataclass
class Gate:
    """Limits, their clocks, and turns of one workspace."""

    limits: Limits
    seconds: float = 0.0
    count: int = 0
    limits_of: WorkspaceLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits_of = WorkspaceLimits(
            lambda: self.seconds, lambda: START + timedelta(seconds=self.seconds)
        )

    @property
    def principal(self) -> Principal:
        return Principal("w", "k", "s", limits=self.limits)

    @contextmanager
    def taken(
        self, turn_id: str, estimate: int, *, backlog: int = 0, is_open: bool = False
    ) -> Iterator[None]:
        """A turn's place while the block runs, which is in the journal if `is_open`."""
        self.limits_of.take(TurnClaim(turn_id, self.principal, estimate, backlog))
        try:
            yield
        finally:
            self.limits_of.leave(turn_id, "w", is_open=is_open)

    def turn(self, estimate: int = 1, **counts: int) -> None:
        """One turn from its admission to its close."""
        self.count += 1
        turn_id = f"t{self.count}"
        with self.taken(turn_id, estimate, is_open=True):
            pass
        self.limits_of.count_used(self.record(turn_id, **counts))

    def record(self, turn_id: str, **counts: int) -> TurnRecord:
        opened_at = START + timedelta(seconds=self.seconds)
        return turn_record(turn_id, opened_at=opened_at, **counts)

    def remaining(self) -> int:
        rate = self.limits_of.rates(self.principal).tokens
        assert rate is not None
        return rate.remaining


def test_more_than_was_reserved_is_a_debt_that_later_turns_wait_for() -> None:
    gate = Gate(Limits(tokens_per_minute=600))
    gate.turn(1_000_000, input_tokens=1200)  # of any length, where the bucket is full
    with pytest.raises(RateLimited) as refused:
        gate.turn(1)
    assert refused.value.retry_after == 61, "600 in debt, and one token"


def test_cache_reads_soon_reserve_next_to_nothing() -> None:
    gate = Gate(Limits(tokens_per_minute=1000))
    for _ in range(20):
        gate.seconds += 60
        gate.turn(900, cache_read_tokens=890, output_tokens=9)
    for _ in range(20):
        gate.turn(900, cache_read_tokens=890, output_tokens=9)
    assert gate.remaining() == 1000 - 21 * 9


def test_the_month_ends_a_spend_limit_and_unpriced_turns_cost_nothing() -> None:
    gate = Gate(Limits(monthly_spend=100))
    gate.turn(cost=99)
    gate.turn(input_tokens=1_000_000)
    gate.turn(cost=1)
    with pytest.raises(SpendLimitReached):
        gate.turn()
    gate.seconds += 3600
    gate.turn(cost=1)


def test_a_request_that_would_exceed_the_spend_limit_is_told_so() -> None:
    """At 82 % of the limit nothing "has reached" it."""
    gate = Gate(Limits(monthly_spend=1_000_000_000))
    gate.turn(cost=820_000_000)
    with pytest.raises(SpendLimitReached) as refused:
        gate.limits_of.take(TurnClaim("large", gate.principal, 1, 0, most_cost=200_000_000))
    assert str(refused.value) == (
        "this request would exceed the workspace's spend limit of $1.0 for this month:"
        " $0.82 is spent, and up to $0.2 more is reserved for it and for requests that run"
    )
    gate.turn(cost=180_000_000)
    with pytest.raises(SpendLimitReached) as refused:
        gate.turn()
    assert str(refused.value) == "the workspace has reached its spend limit for this month"


@pytest.mark.parametrize("jump", [timedelta(days=365), timedelta(days=-365), timedelta(hours=1)])
def test_a_wall_clock_that_jumps_and_comes_back_keeps_the_spend_limit(jump: timedelta) -> None:
    """A jump ahead had the month that came later: no cost counted until then."""
    gate = Gate(Limits(monthly_spend=100))
    gate.turn(cost=60)
    for _ in range(5):
        gate.seconds += jump.total_seconds()
        gate.turn(cost=1)
        gate.seconds -= jump.total_seconds()
        gate.turn(cost=1)
    gate.turn(cost=35)
    with pytest.raises(SpendLimitReached):
        gate.turn()


def test_the_gateways_own_bounds_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Limits())
    with pytest.raises(Overloaded), gate.taken("t", 1, backlog=module.MAX_BACKLOG):
        pass
    monkeypatch.setattr(module, "MAX_ADMITTED", 1)
    with gate.taken("a", 1), pytest.raises(Overloaded):
        gate.turn()
    gate.turn()


def test_memory_is_bounded_and_who_is_limited_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 10)
    gate = Gate(Limits(requests_per_minute=1))
    gate.turn()
    for number in range(100):
        gate.limits_of.rates(Principal(f"w{number}", "k", "s"))
    assert len(gate.limits_of._accounts) <= 10
    with pytest.raises(RateLimited):
        gate.turn()


def test_a_lower_limit_makes_no_debt_and_forgives_none() -> None:
    used = TokenBucket.full(1_000_000, 0.0)
    used.take(500_000, 0.0)
    used.resize(1000, 0.0)
    assert (used.remaining(0.0), used.wait(1000, 0.0)) == (0, 60.0)
    indebted = TokenBucket.full(1000, 0.0)
    indebted.take(1100, 0.0)
    indebted.resize(500, 0.0)
    assert indebted.wait(500, 0.0) == 72.0  # for 100 of debt, and the whole bucket


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 20_000)), min_size=1, max_size=60),
)
def test_no_stretch_of_time_lets_more_through_than_its_share(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Between any two moments at most a full bucket and what they refill, whatever is asked."""
    now = 0.0
    bucket = TokenBucket.full(per_minute, 0.0)
    taken: list[tuple[float, int]] = []
    for pause, num_tokens in steps:
        now += pause
        amount = min(num_tokens, per_minute)
        if bucket.wait(amount, now) == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for first, (start, _) in enumerate(taken):
        total = 0
        for moment, amount in taken[first:]:
            total += amount
            assert total <= per_minute + per_minute * (moment - start) / 60 + 1e-3


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "close"]), st.integers(1, 500), st.integers(0, 800)),
        max_size=60,
    )
)
def test_what_is_taken_is_what_was_counted(steps: list[tuple[str, int, int]]) -> None:
    """After every turn has closed, a bucket that never filled up again is short of exactly what
    the turns counted."""
    gate = Gate(Limits(tokens_per_minute=1_000_000_000))
    opened: list[str] = []
    counted = 0
    for number, (step, estimate, used) in enumerate(steps):
        if step == "admit":
            with gate.taken(f"t{number}", estimate, is_open=True):
                pass
            opened.append(f"t{number}")
        elif step == "close" and opened:
            gate.limits_of.count_used(gate.record(opened.pop(0), input_tokens=used))
            counted += used
    for turn_id in opened:
        gate.limits_of.count_used(gate.record(turn_id))
    assert gate.remaining() == 1_000_000_000 - counted
