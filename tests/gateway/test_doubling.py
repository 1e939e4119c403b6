"""What a request costs the gateway grows no faster than the request, in every dimension."""

import pytest

from tests.doubling import MOST_GROWTH, Dimension, growth
from tests.gateway.doubling_requests import DIMENSIONS
from tests.gateway.doubling_state import STATE_DIMENSIONS


@pytest.mark.parametrize(
    "dimension",
    [*DIMENSIONS, *STATE_DIMENSIONS],
    ids=lambda one: one.name,
)
def test_four_times_as_much_costs_about_four_times_as_much(dimension: Dimension) -> None:
    assert growth(dimension) <= MOST_GROWTH


def test_what_is_quadratic_is_found() -> None:
    def make(size: int):  # type: ignore[no-untyped-def]
        return lambda: [n for n in range(size) if n in [-1] * size]

    assert growth(Dimension("quadratic", 1600, make)) > MOST_GROWTH
