"""What a kept prompt begins with, as one line of text."""

import pytest

from engine.protocol import Message, Prompt, TextPart, ThinkingPart
from gateway.admin.prompts import BEGINNING_CHARACTERS, first_words


def said(*texts: str) -> list[Message]:
    return [Message("user", [TextPart(text) for text in texts])]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt(said("a question"), system=[TextPart("  Be \n\t brief. ")]), "Be brief."),
        (Prompt(said("a question"), system=[TextPart("\n ")]), "a question"),
        (Prompt([Message("assistant", [ThinkingPart("hm")]), *said("and?")]), "and?"),
        (Prompt([], text="raw words"), "raw words"),
        (Prompt([]), ""),
        (Prompt(said("x" * 10**6)), "x" * BEGINNING_CHARACTERS),
    ],
)
def test_it_is_the_first_text_that_has_words(prompt: Prompt, words: str) -> None:
    assert first_words(prompt) == words
