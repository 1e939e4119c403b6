"""Axes are finite, and say each label once, whatever they show."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dashboard.charts.axes import MAX_TIMES, amounts, decades, times

VALUES = st.lists(st.integers(-(10**18), 10**18).map(lambda n: n / 1000), max_size=20)
NANOS = st.lists(st.integers(-(10**7), 10**7).map(lambda nano: nano / 1e9), max_size=20)


def written(form: str, tick: float) -> str:
    """What d3 writes for the forms that `amounts` uses."""
    body = form.lstrip("$")
    if body != "~s":
        return f"{tick:{body}}"
    if tick == 0:
        return "0"
    power = math.floor(math.log10(abs(tick)) / 3) * 3
    return f"{tick / 10**power:.6g}e{power}"


@given(st.one_of(VALUES, NANOS))
def test_an_axis_of_amounts_holds_them_all(values: list[float]) -> None:
    found = amounts(values)
    low, high = found.domain
    assert math.isfinite(low) and math.isfinite(high) and low < high
    room = 1e-8 * (high - low)
    assert all(low - room <= value <= high + room for value in values)
    assert 2 <= len(found.ticks) <= 8 and low <= 0 <= high
    labels = [written(found.form, tick) for tick in found.ticks]
    assert len(set(labels)) == len(labels), labels


@given(st.lists(st.integers(0, 10**12), max_size=10))
def test_what_is_counted_has_no_halves(values: list[int]) -> None:
    assert all(tick == int(tick) for tick in amounts(values, whole=True).ticks)


def test_thirty_cents_are_not_written_as_millidollars() -> None:
    found = amounts([0.3], unit="$")
    assert found.form == "$,.1f" and found.domain == [0.0, 0.3]


@given(st.integers(0, 4_000_000_000_000), st.integers(1000, 40_000_000_000))
def test_moments_are_few_and_differ(since_ms: int, length_ms: int) -> None:
    found = times(since_ms, since_ms + length_ms)
    assert len(found.ticks) <= MAX_TIMES + 1
    assert all(found.since <= tick <= found.until for tick in found.ticks)
    labels = [tick.strftime(found.form) for tick in found.ticks]
    assert all(one != two for one, two in pairwise(labels))


@given(st.lists(st.floats(1e-4, 1e7), max_size=20))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    found = decades(values)
    low, high = found.domain
    assert 0 < low < high and all(low <= value <= high for value in values)
    assert found.ticks == sorted(set(found.ticks))
