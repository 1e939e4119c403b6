"""Words of a pasted curl command: those of a shell, in time linear in the text."""

import random
import shlex
import time

import pytest

from gateway.advice import shell


def words(text: str) -> list[str] | None:
    try:
        return list(shell.words(text))
    except ValueError:
        return None


def of_shell(text: str) -> list[str] | None:
    try:
        return shlex.split(text)
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_words_are_those_of_a_shell(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        text = "".join(chance.choice("ab {}'\"\\\n\t#") for _ in range(chance.randrange(14)))
        assert words(text) == of_shell(text), repr(text)


@pytest.mark.parametrize("part", ["a'b'", '"x\\"y"', "aaaa", "' '", "\\a", "a "])
def test_a_text_twice_as_long_takes_about_twice_as_long(part: str) -> None:
    def seconds(count: int) -> float:
        text, times = part * count, []
        for _ in range(3):
            began = time.process_time()
            list(shell.words(text))
            times.append(time.process_time() - began)
        return min(times)

    # Quadratic time would be 16 times as long.
    assert seconds(80_000) < 9 * max(seconds(20_000), 0.002)
