"""The first difference of two prompts whose texts are known."""

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Message, Prompt, TextPart
from gateway.prompt.difference import common_length, first_difference


def prompt(system: str, *texts: str) -> Prompt:
    messages = [Message(role="user", parts=[TextPart(text)]) for text in texts]
    return Prompt(system=[TextPart(system)], messages=messages)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_the_common_length_is_that_of_comparing_one_by_one(
    shared: str, first: str, second: str
) -> None:
    length = common_length(shared + first, shared + second)
    pairs = zip(shared + first, shared + second, strict=False)
    expected = 0
    for left, right in pairs:
        if left != right:
            break
        expected += 1
    assert length == expected


def test_a_date_is_found_at_its_character() -> None:
    book = "A lease holds. " * 600
    earlier = prompt("x" * 99 + "Monday" + book, "Hello")
    later = prompt("x" * 99 + "Sunday" + book, "Hello")
    difference = first_difference(earlier, later)
    assert difference is not None
    assert (difference.segment, difference.characters) == (0, 99)
    assert 0 < difference.share < 0.02


def test_what_only_grew_has_no_difference_and_what_was_cut_has_one() -> None:
    assert first_difference(prompt("s", "a"), prompt("s", "a", "b")) is None
    cut = first_difference(prompt("s", "a", "b"), prompt("s", "a"))
    assert cut is not None and (cut.segment, cut.characters) == (2, 0)
