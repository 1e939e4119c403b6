"""What an engine can't do whose model's server renders prompts with a template of its own."""

from collections.abc import Iterator
from typing import Literal

from engine.protocol.prompts import Prompt
from engine.protocol.sampling import Sampling

OwnTemplateField = Literal["prompt.text", "messages", "ignore_eos", "top_k"]


def needs_own_template(prompt: Prompt, sampling: Sampling) -> Iterator[OwnTemplateField]:
    """The fields of a request that an engine without the capability `own_template` refuses.

    They are a raw prompt, a last message of the assistant that is to be continued, and two that
    such a server can't be told.
    """
    if prompt.text is not None:
        yield "prompt.text"
    if prompt.messages and prompt.messages[-1].role == "assistant":
        yield "messages"
    if sampling.ignore_eos:
        yield "ignore_eos"
    if sampling.top_k:
        yield "top_k"
