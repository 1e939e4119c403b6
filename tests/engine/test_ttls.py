"""The classes of lifetimes: their order, lengths and costs, and the names of other versions."""

from itertools import pairwise

import pytest

from engine.protocol import TTLS, Ttl, class_of

UNIT_SECONDS = {"m": 60, "h": 3600}


@pytest.mark.parametrize("ttl", TTLS)
def test_a_class_lives_for_as_long_as_its_name_says(ttl: Ttl) -> None:
    assert TTLS[ttl].seconds == int(ttl[:-1]) * UNIT_SECONDS[ttl[-1]]


def test_the_shortest_class_stands_first_and_none_costs_less_than_a_shorter_one() -> None:
    for shorter, longer in pairwise(TTLS.values()):
        assert shorter.seconds < longer.seconds
        assert shorter.write_multiple <= longer.write_multiple


@pytest.mark.parametrize("ttl", TTLS)
def test_a_known_name_is_its_own_class(ttl: Ttl) -> None:
    assert class_of(ttl) == ttl


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1m", "5m"),
        ("6m", "5m"),
        ("45m", "30m"),
        ("61m", "1h"),
        ("24h", "12h"),
        ("7d", "12h"),
        ("7x", "5m"),
        ("h", "5m"),
        ("", "5m"),
        ("²h", "5m"),
    ],
)
def test_the_name_of_a_later_class_stands_for_the_longest_that_is_no_longer(
    name: str, expected: Ttl
) -> None:
    assert class_of(name) == expected
