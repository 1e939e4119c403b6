"""Raw prompts on a real tokenizer."""

from engine.protocol import Prompt
from engine.text.tokens.raw import render_text
from tests.engine.text.templates import demo_renderer

CHAT = "<|im_start|>user\nWhat is a lease?<|im_end|>\n<|im_start|>assistant\n"


def test_control_tokens_that_a_raw_prompt_writes_are_control_tokens() -> None:
    renderer = demo_renderer()
    rendered = renderer.render(Prompt([], text=CHAT), thinking=False)
    start = renderer.tokenizer.token_to_id("<|im_start|>")
    assert rendered.token_ids.count(start) == 2
    assert rendered.token_ids == renderer.tokenizer.encode(CHAT).ids


def test_a_point_in_the_text_has_the_offset_of_the_tokens_before_it() -> None:
    tokenizer = demo_renderer().tokenizer
    rendered = render_text(tokenizer, CHAT)
    [span] = rendered.segments
    assert span.offset(None) == len(rendered.token_ids)
    for characters in range(len(CHAT) + 1):
        offset = span.offset(characters)
        assert offset is not None
        before = tokenizer.decode(rendered.token_ids[:offset], skip_special_tokens=False)
        assert CHAT[:characters].startswith(before)
