"""Client nonces that would end every prefix: recognised by their exact shape and left out.

One rule. Coding agents put a billing line of their own into the system prompt, first of all:

    x-anthropic-billing-header: cc_version=2.1.278.abc; cc_entrypoint=cli; cch=36ee5;

`cch` changes with every request, the version's suffix with every session, other fields with every
prompt (seen in public at github.com/anthropics/claude-code, issues 24168 and 68900). It is left out
where a system block is that line and nothing else, and where the first system text begins with it
and a line break. In Chat Completions, where routers translate such requests to, the system blocks
are the texts of the system and developer messages at the beginning. Nothing else is ever touched,
no other text, no message, no tool: what a user wrote reaches the model as it was written.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import asdict, replace

from gateway.dialects.anthropic import request as anthropic
from gateway.dialects.openai import request as openai

_LINE = re.compile(
    r"x-anthropic-billing-header: cc_version=[A-Za-z0-9.+-]{1,64};"
    r"(?: (?:cch|cc_[a-z_]{1,32})=[A-Za-z0-9_.-]{1,64};){1,10}"
    r"[ \t]*(?:\r?\n|\Z)"
)

RequestT = TypeVar("RequestT")
Texts = TypeVar("Texts", anthropic.Text, openai.Text)


def without_nonces(request: RequestT) -> tuple[RequestT, int]:
    """The request, from which billing lines are taken, and how many were.

    A block that is nothing but the line becomes a `Nonce`: it keeps its place, so that paths in
    errors are the client's, and makes no segment. Of a longer text only the line is cut off.
    """
    total = 0
    if isinstance(request, openai.ChatRequest):
        for index, message in enumerate(request.messages):
            if not isinstance(message, openai.SystemMessage):
                break
            given = message.content
            texts = [openai.Text(text=given)] if isinstance(given, str) else given
            made, num_removed = _cleaned(texts, openai.Nonce, is_first=index == 0)
            if num_removed:
                total += num_removed
                is_rest = isinstance(given, str) and not isinstance(made[0], openai.Nonce)
                message.content = made[0].text if is_rest else made
    elif isinstance(request, anthropic.CountTokensRequest):
        system = request.system
        if isinstance(system, list):
            request.system, total = _cleaned(system, anthropic.Nonce, is_first=True)
        elif system and (line := _LINE.match(system)) is not None:
            request.system, total = system[line.end() :] or None, 1
    return request, total


def _cleaned(
    blocks: Sequence[Texts], nonce: type[Texts], *, is_first: bool
) -> tuple[list[Texts], int]:
    made: list[Texts] = []
    for index, block in enumerate(blocks):
        line = _LINE.match(block.text)
        rest = block.text[line.end() :] if line is not None else ""
        if line is not None and not rest:
            block = nonce(**asdict(block))
        elif rest and is_first and index == 0:
            block = replace(block, text=rest)
        made.append(block)
    return made, sum(new is not old for new, old in zip(made, blocks, strict=True))
