"""Words of a pasted curl command: those of a shell, in time linear in the text."""

import random
import shlex
from collections.abc import Callable, Iterable

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
