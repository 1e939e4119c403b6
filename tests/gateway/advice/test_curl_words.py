"""Words of a pasted curl command: those of a shell, in time linear in the text."""

import random
import shlex
import time
from collections.abc import Callable, Iterable

import pytest

from gateway.advice.pasted import shell_words
from gateway.base.errors import InvalidRequest


def words(text: str, of: Callable[[str], Iterable[str]]) -> list[str] | None:
    try:
        return list(of(text))
    except (ValueError, InvalidRequest):
        return None


def test_words_are_those_of_a_shell() -> None:
    chance = random.Random(1)
    for _ in range(6000):
        text = "".join(chance.choice("ab {}'\"\\\n\t#") for _ in range(chance.randrange(14)))
        assert words(text, shell_words) == words(text, shlex.split), repr(text)


@pytest.mark.parametrize("part", ["a'b'", '"x\\"y"', "aaaa", "' '", "\\a", "a "])
def test_a_text_twice_as_long_takes_about_twice_as_long(part: str) -> None:
    def seconds(count: int) -> float:
        text, times = part * count, []
        for _ in range(3):
            began = time.process_time()
            shell_words(text)
            times.append(time.process_time() - began)
        return min(times)

    # Quadratic time would be 16 times as long.
    assert seconds(80_000) < 9 * max(seconds(20_000), 0.002)
