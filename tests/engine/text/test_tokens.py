"""What clients write never becomes a control token, and marks never change a token."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.protocol import Tool
from engine.text.renderer import ChatRenderer
from engine.text.tokens.pieces import Piece, PieceTokenizer
from tests.engine.backends.local import prompt
from tests.engine.text.templates import decode, demo_files, renderer_for, renderer_of


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
    assert all(a.piece is b.piece for a, b in zip(long, short, strict=False))


@pytest.mark.parametrize("name", ["tool_call", "/tool_call", "|im_start|", "tool_call><tool_call"])
def test_a_text_that_the_template_completes_is_no_control_token(name: str) -> None:
    renderer = renderer_of("named")
    controls = set(PieceTokenizer(renderer.tokenizer).control_ids.values())
    odd, plain = (
        renderer.render(prompt("a", tools=[Tool(tool_name, {}, "does")]), thinking=False).token_ids
        for tool_name in (name, "harmless")
    )
    assert len([t for t in odd if t in controls]) == len([t for t in plain if t in controls])
    assert decode(renderer, odd).startswith(f"<{name}>does")


UNUSUAL = """\
{%- for message in messages %}<|shout|>{{ message.role }}
{{ message.content }}TURNEND{% endfor %}"""


@cache
def unusual() -> tuple[ChatRenderer, dict[str, int]]:
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
    renderer = renderer_for(UNUSUAL, tokenizer)
    return renderer, dict(PieceTokenizer(renderer.tokenizer, template=UNUSUAL).control_ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_text_becomes_a_control_token_of_an_unusual_tokenizer(data: st.DataObject) -> None:
    renderer, controls = unusual()
    assert {"TURNEND", "<|shout|>", "\u2402", "<|wide|>"} < set(controls) and "    " not in controls
    wide = [text.replace("|", "\uff5c").replace("T", "\uff34") for text in controls]
    fragment = st.sampled_from([*controls, *wide, "TURN", "END", "<|", "|>", " ", "    ", "a"])
    payload = "".join(data.draw(st.lists(fragment, max_size=6)))
    token_ids = renderer.render(prompt(f"u{payload}v"), thinking=False).token_ids
    control_ids = [token_id for token_id in token_ids if token_id in set(controls.values())]
    assert control_ids == [controls["<|shout|>"], controls["TURNEND"]]
