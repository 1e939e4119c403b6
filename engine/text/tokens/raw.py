"""Raw prompts: text that the client has put into the model's own form."""

from array import array

from tokenizers import Tokenizer

from engine.text.rendered import RenderedPrompt, SegmentSpan


def render_text(tokenizer: Tokenizer, text: str) -> RenderedPrompt:
    """Tokens and the one segment, which ends with the prompt.

    Unlike text in a conversation it may contain control tokens: writing them is what raw prompts
    are for. What the tokenizer puts in front of a prompt (a beginning token) it puts here too.
    """
    encoding = tokenizer.encode(text)
    ends = array("I", [end for _, end in encoding.offsets])
    return RenderedPrompt(encoding.ids, [SegmentSpan(len(encoding.ids), 0, ends)])
