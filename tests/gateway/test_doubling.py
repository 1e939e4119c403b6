"""What a request costs the gateway grows no faster than the request, in every dimension."""

import pytest

from tests.doubling import GROWTH, Dimension, curve_of, row
from tests.gateway.doubling_requests import DIMENSIONS
from tests.gateway.doubling_state import STATE_DIMENSIONS


@pytest.mark.parametrize(
    "dimension",
    [*DIMENSIONS, *STATE_DIMENSIONS],
    ids=lambda case: case.name,
)
def test_a_doubled_dimension_costs_no_more_than_twice_as_much(dimension: Dimension) -> None:
    curve = curve_of(dimension)
    print(row(curve))
    assert curve.growth <= GROWTH


def test_what_is_quadratic_is_found() -> None:
    def make(size: int):  # type: ignore[no-untyped-def]
        return lambda: [n for n in range(size) if n in [-1] * size]

    assert curve_of(Dimension("quadratic", 1600, make)).growth > GROWTH
