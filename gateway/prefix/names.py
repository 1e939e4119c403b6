"""Names: digests of prefixes, so that gateways and engines can speak of the same one.

A name is the hash of the scope and of everything before it, in order. It depends on nothing else,
so every gateway gives one prefix the same name. It stands at segment ends, and at every 8,192
characters of longer texts. Markers are not part of it, nor is how the JSON was written; the order
of keys inside tool inputs and schemas is.
"""

from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import Protocol

import msgspec

from engine.protocol import (
    MAX_NAMES,
    Name,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)

CHUNK_CHARACTERS = 8192
_DIGEST_BYTES = 8
_encode = msgspec.json.Encoder().encode


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def name_prefixes(prompt: Prompt, scope: str, keep: Collection[int] = ()) -> list[Name]:
    """Name the prompt's prefixes, shallowest first, at most MAX_NAMES.

    Where there are more, the segments in `keep` stay, then the deepest segment ends, then the
    deepest chunks.
    """
    chain = blake2b(scope.encode(), digest_size=_DIGEST_BYTES, person=b"holdfast")
    names: list[Name] = []
    for segment, (header, text) in enumerate(_segments(prompt)):
        chain.update(b"\x01%d:" % len(header) + header)
        names.extend(_chunks(chain, segment, text))
        chain.update(b"\x02")
        names.append(Name(chain.hexdigest(), segment))
    return names if len(names) <= MAX_NAMES else _trim(names, keep)


def _chunks(chain: _Hash, segment: int, text: str) -> Iterator[Name]:
    for start in range(0, len(text), CHUNK_CHARACTERS):
        end = start + CHUNK_CHARACTERS
        # A chunk of UTF-8 never contains the bytes 0x01 and 0x02 unless the text does, so its
        # length goes in front: no two contents give the same bytes.
        piece = text[start:end].encode()
        chain.update(b"\x03%d:" % len(piece) + piece)
        if end < len(text):
            yield Name(chain.hexdigest(), segment, end)


def _segments(prompt: Prompt) -> Iterator[tuple[bytes, str]]:
    if prompt.text is not None:
        yield b"raw", prompt.text
    for tool in prompt.tools:
        yield _tool_header(tool), ""
    for block in prompt.system:
        yield b"system", block.text
    for number, message in enumerate(prompt.messages):
        for part in message.parts:
            yield b"%d %s " % (number, message.role.encode()) + _part_header(part), _text(part)


def _tool_header(tool: Tool) -> bytes:
    return b"tool " + _encode([tool.name, tool.description, tool.input_schema])


def _part_header(part: Part) -> bytes:
    match part:
        case TextPart():
            return b"text"
        case ThinkingPart():
            return b"thinking"
        case ToolUsePart():
            return b"tool_use " + _encode([part.id, part.name, part.input])
        case ToolResultPart():
            return b"tool_result " + _encode([part.tool_use_id, part.is_error])


def _text(part: Part) -> str:
    return "" if isinstance(part, ToolUsePart) else part.text


def _trim(names: list[Name], keep: Collection[int]) -> list[Name]:
    """Keep the MAX_NAMES most useful ones, in their order."""

    def rank(position: int) -> tuple[bool, bool, int]:
        name = names[position]
        is_end = name.characters is None
        return (is_end and name.segment in keep, is_end, position)

    chosen = sorted(range(len(names)), key=rank, reverse=True)[:MAX_NAMES]
    return [names[position] for position in sorted(chosen)]
