"""What clients write never becomes a control token, and marks never change a token."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.protocol import Message, Prompt, TextPart, Tool
from engine.text.renderer import ChatRenderer
from engine.text.tokens.pieces import Piece, PieceTokenizer
from tests.engine.text.templates import (
    decode,
    demo_files,
    demo_renderer,
    renderer_for,
)


def num_controls(renderer: ChatRenderer, prompt: Prompt) -> int:
    control_ids = set(PieceTokenizer(renderer.tokenizer).control_ids.values())
    token_ids = renderer.render(prompt, thinking=False).token_ids
    return sum(token_id in control_ids for token_id in token_ids)


def test_the_tokens_are_those_of_the_whole_text_in_one_call() -> None:
    renderer = demo_renderer()
    prompt = Prompt([Message("user", [TextPart("Hello there 👋"), TextPart("how are you")])])
    whole = "<|im_start|>user\nHello there 👋\n\nhow are you<|im_end|>\n<|im_start|>assistant\n"
    rendered = renderer.render(prompt, thinking=False)
    assert rendered.token_ids == renderer.tokenizer.encode(whole, add_special_tokens=False).ids


def test_pieces_are_remembered_within_a_scope_and_a_budget() -> None:
    tokenizer = PieceTokenizer(demo_files().tokenizer, cache_bytes=3000)

    def piece(text: str, scope: str) -> Piece:
        [placed] = tokenizer.encode(text, scope=scope).pieces
        return placed.piece

    first = piece("some words", "a")
    assert piece("some words", "a") is first
    assert piece("some words", "b") is not first
    for number in range(100):
        piece(f"other words {number}", "a")
    again = piece("some words", "a")
    assert again is not first
    assert again == first


def test_a_longer_conversation_encodes_what_is_new() -> None:
    """A piece of text that was encoded before, here the first message, is the same object."""
    tokenizer = PieceTokenizer(demo_files().tokenizer)
    turn = "<|im_start|>user\nHello there<|im_end|>\n"
    short = tokenizer.encode(turn, scope="a").pieces
    long = tokenizer.encode(turn + turn.replace("there", "you"), scope="a").pieces
    assert [placed.piece for placed in long[:2]] == [placed.piece for placed in short]
    assert all(a.piece is b.piece for a, b in zip(long, short, strict=False))


NAMED = """\
{%- for tool in tools or [] %}<{{ tool.function.name }}>{{ tool.function.description }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{% endfor %}"""


@pytest.mark.parametrize("name", ["tool_call", "/tool_call", "|im_start|", "tool_call><tool_call"])
def test_a_text_that_the_template_completes_is_no_control_token(name: str) -> None:
    renderer = renderer_for(NAMED)

    def prompt(name: str) -> Prompt:
        return Prompt([Message("user", [TextPart("a")])], [Tool(name, {}, "does")])

    assert num_controls(renderer, prompt(name)) == num_controls(renderer, prompt("harmless"))
    tokens = renderer.render(prompt(name), thinking=False).token_ids
    assert decode(renderer, tokens).startswith(f"<{name}>does")


def unusual() -> Tokenizer:
    """Control tokens without brackets, normalized ones, one of a single character, one that the
    vocabulary has as a word, one that takes the spaces beside it; a run of spaces that is text."""
    parts = json.loads(demo_files().tokenizer.to_str())
    parts["normalizer"] = {"type": "NFKC"}
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    word = next(w for w in tokenizer.get_vocab() if w.isalpha() and w.isascii() and len(w) > 5)
    tokenizer.add_tokens([AddedToken("TURNEND", normalized=True), AddedToken("    ")])
    tokenizer.add_special_tokens(
        [
            AddedToken("<|shout|>", normalized=True),
            AddedToken("\u2402", normalized=False),
            AddedToken("<|wide|>", normalized=False, lstrip=True, rstrip=True),
            AddedToken(word, normalized=False),
        ]
    )
    return tokenizer


UNUSUAL = """\
{%- for message in messages %}<|shout|>{{ message.role }}
{{ message.content }}TURNEND{% endfor %}"""


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_text_becomes_a_control_token_of_an_unusual_tokenizer(data: st.DataObject) -> None:
    renderer, controls = unusual_renderer(), unusual_controls()
    assert {"TURNEND", "<|shout|>", "\u2402", "<|wide|>"} < set(controls) and "    " not in controls
    wide = [text.replace("|", "\uff5c").replace("T", "\uff34") for text in controls]
    fragment = st.sampled_from([*controls, *wide, "TURN", "END", "<|", "|>", " ", "    ", "a"])
    payload = "".join(data.draw(st.lists(fragment, max_size=6)))
    prompt = Prompt([Message("user", [TextPart(f"u{payload}v")])])
    token_ids = renderer.render(prompt, thinking=False).token_ids
    found = [token_id for token_id in token_ids if token_id in set(controls.values())]
    assert found == [controls["<|shout|>"], controls["TURNEND"]]


@cache
def unusual_renderer() -> ChatRenderer:
    return renderer_for(UNUSUAL, unusual())


@cache
def unusual_controls() -> dict[str, int]:
    return PieceTokenizer(unusual_renderer().tokenizer, template=UNUSUAL).control_ids
