"""What a prompt can't have if another server renders it with its own chat template."""

from collections.abc import Iterator
from typing import Literal

from engine.protocol.prompts import Prompt

OwnTemplateField = Literal["prompt.text", "messages"]


def needs_own_template(prompt: Prompt) -> Iterator[OwnTemplateField]:
    """The prompt's fields that an engine without the capability `own_template` refuses.

    They are a raw text, and a last message of the assistant, which is to be continued.
    """
    if prompt.text is not None:
        yield "prompt.text"
    if prompt.messages and prompt.messages[-1].role == "assistant":
        yield "messages"
