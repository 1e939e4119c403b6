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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.dialects.anthropic import request as anthropic
from gateway.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.dialects.openai import request as openai
from gateway.dialects.openai.request import ChatRequest

_LINE = re.compile(
    r"x-anthropic-billing-header: cc_version=[A-Za-z0-9.+-]{1,64};"
    r"(?: (?:cch|cc_[a-z_]{1,32})=[A-Za-z0-9_.-]{1,64};){1,10}"
    r"[ \t]*(?:\r?\n|\Z)"
)

Request = TypeVar("Request", MessagesRequest, CountTokensRequest, ChatRequest)
Texts = TypeVar("Texts", anthropic.Text, openai.Text)


def without_nonces(request: Request) -> tuple[Request, int]:
    """The request without billing lines, and how many were left out.

    A block that is nothing but the line becomes a `Nonce`: it keeps its place, so that paths in
    errors are the client's, and makes no segment. Of a longer text only the line is cut off.
    """
    if isinstance(request, ChatRequest):
        return _without_in_chat(request)
    system = request.system
    if not system:
        return request, 0
    if isinstance(system, str):
        line = _LINE.match(system)
        if line is None:
            return request, 0
        return msgspec.structs.replace(request, system=system[line.end() :] or None), 1
    blocks, num_removed = _cleaned(system, _messages_nonce, is_first=True)
    return msgspec.structs.replace(request, system=blocks), num_removed


def _without_in_chat(request: ChatRequest) -> tuple[ChatRequest, int]:
    messages, total = list(request.messages), 0
    for index, message in enumerate(messages):
        if not isinstance(message, openai.SystemMessage | openai.DeveloperMessage):
            break
        given = message.content
        texts = [openai.Text(text=given)] if isinstance(given, str) else given
        made, num_removed = _cleaned(texts, _chat_nonce, is_first=index == 0)
        if num_removed:
            total += num_removed
            is_rest = isinstance(given, str) and not isinstance(made[0], openai.Nonce)
            changed: Any = made[0].text if is_rest else made
            messages[index] = msgspec.structs.replace(message, content=changed)
    return (msgspec.structs.replace(request, messages=messages), total) if total else (request, 0)


def _cleaned(
    blocks: Sequence[Texts], nonce: Callable[[Texts], Texts], *, is_first: bool
) -> tuple[list[Texts], int]:
    made: list[Texts] = []
    for index, block in enumerate(blocks):
        line = _LINE.match(block.text)
        rest = block.text[line.end() :] if line is not None else ""
        if line is not None and not rest:
            block = nonce(block)
        elif rest and is_first and index == 0:
            block = msgspec.structs.replace(block, text=rest)
        made.append(block)
    return made, sum(new is not old for new, old in zip(made, blocks, strict=True))


def _messages_nonce(block: anthropic.Text) -> anthropic.Text:
    return anthropic.Nonce(text=block.text, cache_control=block.cache_control)


def _chat_nonce(block: openai.Text) -> openai.Text:
    return openai.Nonce(
        text=block.text,
        cache_control=block.cache_control,
        prompt_cache_breakpoint=block.prompt_cache_breakpoint,
    )
