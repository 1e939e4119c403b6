"""Text comes out whole, whatever the tokens cut through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.text.tokens.detokenize import Vocabulary
from tests.engine.text.templates import demo_files
from tests.engine.text.vocabularies import trained

TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("😀👨‍👩‍👧é \n\ufffd")))


def fed(tokenizer: Tokenizer, token_ids: list[int], *, continues: bool = False) -> list[str]:
    detokenizer = Vocabulary(tokenizer).detokenizer(continues=continues)
    pieces = [detokenizer.feed(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_byte_level_text_survives(text: str) -> None:
    tokenizer = demo_files().tokenizer
    token_ids = tokenizer.encode("a" + text, add_special_tokens=False).ids
    if not {0, 1, 2} & set(token_ids):
        pieces = fed(tokenizer, token_ids)
        assert "".join(pieces) == "a" + text
        assert pieces[-1] == ""


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("helo wrd,😀é\n日")))
def test_text_of_sentencepiece_survives_with_its_spaces(text: str) -> None:
    tokenizer = trained("sentencepiece")
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(fed(tokenizer, token_ids)) == tokenizer.decode(token_ids) == text


def test_half_a_character_waits_for_the_rest_and_control_tokens_are_silent() -> None:
    tokenizer = demo_files().tokenizer
    token_ids = tokenizer.encode("🦜", add_special_tokens=False).ids
    assert len(token_ids) > 1
    assert fed(tokenizer, token_ids) == [*[""] * (len(token_ids) - 1), "🦜", ""]
    assert fed(tokenizer, token_ids[:-1])[-1] == "\ufffd"
    for name in ("<|im_start|>", "<|endoftext|>"):
        assert fed(tokenizer, [tokenizer.token_to_id(name)]) == ["", ""]


@pytest.mark.parametrize("kind", ["metaspace", "sentencepiece"])
def test_a_space_that_goes_on_with_the_prompt_is_kept(kind: str) -> None:
    token_ids = trained(kind).encode("hello world", add_special_tokens=False).ids
    for continues, text in ((False, "hello world"), (True, " hello world")):
        assert "".join(fed(trained(kind), token_ids, continues=continues)) == text
