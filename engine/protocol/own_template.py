"""What a prompt can't have where the model's server renders it with a template of its own."""

from collections.abc import Iterator
from typing import Literal

from engine.protocol.prompts import Prompt

OwnTemplateField = Literal["prompt.text", "messages"]


def needs_own_template(prompt: Prompt) -> Iterator[OwnTemplateField]:
    """The fields of a prompt that an engine without the capability `own_template` refuses: a raw
    prompt, and a last message of the assistant that is to be continued."""
    if prompt.text is not None:
        yield "prompt.text"
    if prompt.messages and prompt.messages[-1].role == "assistant":
        yield "messages"
