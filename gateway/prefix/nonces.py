"""Client nonces that would end every prefix: recognised by their exact shape and left out.

One rule. Coding agents put a billing line of their own into the system prompt, first of all:

    x-anthropic-billing-header: cc_version=2.1.278.abc; cc_entrypoint=cli; cch=36ee5;

`cch` changes with every request, the version's suffix with every session, other fields with every
prompt (seen in public at github.com/anthropics/claude-code, issues 24168 and 68900). It is left out
where a system block is that line and nothing else, and where the first system text begins with it
and a line break. Nothing else is ever touched, no other text, no message, no tool: what a user
wrote reaches the model as it was written.
"""

import re
from typing import TypeVar

import msgspec

from gateway.wire.anthropic.content import Nonce, Text
from gateway.wire.anthropic.request import CountTokensRequest

_LINE = re.compile(
    r"x-anthropic-billing-header: cc_version=[A-Za-z0-9.+-]{1,64};"
    r"(?: (?:cch|cc_[a-z_]{1,32})=[A-Za-z0-9_.-]{1,64};){1,10}"
    r"[ \t]*(?:\r?\n|\Z)"
)

Request = TypeVar("Request", bound=CountTokensRequest)


def without_nonces(request: Request) -> tuple[Request, int]:
    """The request without billing lines, and how many were left out.

    A block that is nothing but the line becomes a `Nonce`: it keeps its place, so that paths in
    errors are the client's, and makes no segment. Of a longer text only the line is cut off.
    """
    system = request.system
    if not system:
        return request, 0
    if isinstance(system, str):
        line = _LINE.match(system)
        if line is None:
            return request, 0
        return msgspec.structs.replace(request, system=system[line.end() :] or None), 1
    blocks = [_cleaned(block, is_first=index == 0) for index, block in enumerate(system)]
    num_removed = sum(made is not block for made, block in zip(blocks, system, strict=True))
    return msgspec.structs.replace(request, system=blocks), num_removed


def _cleaned(block: Text, *, is_first: bool) -> Text:
    line = _LINE.match(block.text)
    if line is None:
        return block
    rest = block.text[line.end() :]
    if not rest:
        return Nonce(text=block.text, cache_control=block.cache_control)
    return msgspec.structs.replace(block, text=rest) if is_first else block
