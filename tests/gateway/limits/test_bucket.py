"""The token bucket, on a clock that the tests move."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.bucket import TokenBucket

LIMITS = st.integers(1, 10_000)
STEPS = st.lists(
    st.tuples(st.floats(0, 200, allow_nan=False), st.integers(1, 20_000)), min_size=1, max_size=60
)


@given(LIMITS, STEPS)
def test_no_stretch_of_time_lets_more_through_than_its_share(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Between any two moments at most a full bucket and what they refill, whatever is asked."""
    now, bucket = 0.0, TokenBucket.full(per_minute, 0.0)
    taken: list[tuple[float, int]] = []
    for pause, asked in steps:
        now += pause
        amount = min(asked, per_minute)
        if bucket.wait(amount, now) == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for first, (start, _) in enumerate(taken):
        total = 0
        for moment, amount in taken[first:]:
            total += amount
            assert total <= per_minute + per_minute * (moment - start) / 60 + 1e-3


@given(LIMITS, STEPS)
def test_who_waits_as_long_as_was_said_gets_it_and_no_sooner(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    now, bucket = 0.0, TokenBucket.full(per_minute, 0.0)
    for pause, asked in steps:
        now += pause
        seconds = bucket.wait(asked, now)
        if seconds > 1e-3:
            assert bucket.wait(asked, now + seconds * 0.99) > 0
            now += seconds
            assert bucket.wait(asked, now) == 0
        bucket.take(min(asked, per_minute), now)


def test_a_lower_limit_makes_no_debt_and_forgives_none() -> None:
    used = TokenBucket.full(1_000_000, 0.0)
    used.take(500_000, 0.0)
    used.resize(1000, 0.0)
    assert used.remaining(0.0) == 0
    assert used.wait(1000, 0.0) == 60.0

    indebted = TokenBucket.full(1000, 0.0)
    indebted.take(1100, 0.0)
    indebted.resize(500, 0.0)
    assert indebted.wait(500, 0.0) == 72.0  # for 100 of debt, and the whole bucket
