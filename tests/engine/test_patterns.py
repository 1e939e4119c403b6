"""Patterns from files, which a process of their own matches and which end by themselves."""

import re
import time

import pytest

from engine.patterns import PatternRefused, matching

NAMES = [f"model.layers.{layer}.self_attn.{side}_proj" for layer in range(40) for side in "qkvo"]


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj", "layers.1.self_attn.o_proj"],
        [r"(?:model\.)?layers\.\d+\.self_attn\.(?=k)k_proj", ".*"],
        [r"(?i:layers\.(?P<digit>\d)(?P=digit)\.SELF_attn\.v_proj)", "^model.*o_proj"],
    ],
    ids=["names", "look-ahead", "back-reference"],
)
def test_a_name_has_the_first_pattern_that_fits_as_peft_finds_it(patterns: list[str]) -> None:
    expected = {}
    for name in NAMES:
        fitting = [pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)]
        if fitting:
            expected[name] = fitting[0]
    assert expected and matching(patterns, NAMES) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*|.*|.*)*(.*)*(.*)*(.*)*X",
        r"([a-z._\d]+)+!",
        r"(\w+\.?)+!",
        r"(?:[a-z]+|\w+|\.)*(?!.)!",
        r"(.+)(.+)(.+)(.+)(.+)(.+)(.+)!",
    ],
)
def test_a_pattern_that_backtracks_without_end_is_refused(pattern: str) -> None:
    began = time.monotonic()
    with pytest.raises(PatternRefused, match="takes more than"):
        matching([pattern], NAMES)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("pattern", ["(", "a**", "(?P<a", "(" * 5_000 + ")" * 5_000, "(?i)q"])
def test_what_is_no_expression_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(PatternRefused, match="not a regular expression"):
        matching([pattern], ())


def test_many_patterns_have_one_bound_together() -> None:
    with pytest.raises(PatternRefused, match="takes more than"):
        matching([f"x{number}" * 3 + ".*.*.*Y" for number in range(30_000)], NAMES * 20)
