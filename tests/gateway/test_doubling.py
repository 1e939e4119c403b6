"""What a request costs the gateway grows no faster than the request, in every dimension.

Three sizes of each here; `python -m scripts.bench.doubling` has more, and prints all.
"""

import pytest

from scripts.bench.doubling import GROWTH, curve_of, row
from scripts.bench.doubling_requests import SUBJECTS, Subject
from scripts.bench.doubling_state import STATE_SUBJECTS


@pytest.mark.parametrize("subject", [*SUBJECTS, *STATE_SUBJECTS], ids=lambda subject: subject.name)
def test_a_doubled_dimension_costs_no_more_than_twice_as_much(subject: Subject) -> None:
    curve = curve_of(subject, points=3)
    print(row(curve))
    assert curve.growth <= GROWTH


def test_what_is_quadratic_is_found() -> None:
    def make(size: int):  # type: ignore[no-untyped-def]
        return lambda: [n for n in range(size) if n in [-1] * size]

    assert curve_of(Subject("quadratic", 1600, make), points=3).growth > GROWTH
