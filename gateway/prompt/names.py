"""Names: digests of prefixes, so that gateways and engines can speak of the same one.

A name is the hash of the scope and of everything before it, in order. It depends on nothing else,
so every gateway gives one prefix the same name. It stands at segment ends, and at every 8,192
characters of longer texts. Markers and the spelling of the JSON are not part of it. The order of
keys inside tool inputs and schemas is part of it.
"""

from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import NamedTuple, Protocol

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
# hashlib gives up the interpreter's lock for longer ones, and getting it back from another thread
# takes longer than hashing them. A long text does not hold it all the time.
_UPDATE_BYTES = 2047
_LONG_CHARACTERS = 32 * CHUNK_CHARACTERS
_encode = msgspec.json.Encoder().encode


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Prefix(NamedTuple):
    """One prefix of a prompt: its name, and how many bytes of content it has."""

    name: Name
    num_bytes: int


def name_prefixes(prompt: Prompt, scope: str, keep: Collection[int] = ()) -> list[Name]:
    """The names that go out with a request: see `find_prefixes` and `trim_names`."""
    return [prefix.name for prefix in trim_names(find_prefixes(prompt, scope), keep)]


def find_prefixes(prompt: Prompt, scope: str) -> list[Prefix]:
    """All prefixes of the prompt that have a name, shallowest first."""
    chain = blake2b(scope.encode(), digest_size=_DIGEST_BYTES, person=b"holdfast")
    prefixes: list[Prefix] = []
    num_bytes = 0
    for segment, (header, text) in enumerate(_segments(prompt)):
        chain.update(b"\x01%d:" % len(header) + header)
        num_bytes += len(header)
        for name, size in _chunks(chain, segment, text):
            num_bytes += size
            if name is not None:
                prefixes.append(Prefix(name, num_bytes))
        chain.update(b"\x02")
        prefixes.append(Prefix(Name(chain.hexdigest(), segment), num_bytes))
    return prefixes


def trim_names(prefixes: list[Prefix], keep: Collection[int] = ()) -> list[Prefix]:
    """At most MAX_NAMES of them, in their order.

    Where there are more, the segments in `keep` stay, then the deepest segment ends, then the
    deepest chunks.
    """
    if len(prefixes) <= MAX_NAMES:
        return prefixes

    kept, ends, chunks = [], [], []
    for position, (name, _) in enumerate(prefixes):
        if name.characters is not None:
            chunks.append(position)
        elif name.segment in keep:
            kept.append(position)
        else:
            ends.append(position)
    chosen = [*reversed(kept), *reversed(ends), *reversed(chunks)][:MAX_NAMES]
    return [prefixes[position] for position in sorted(chosen)]


def _chunks(chain: _Hash, segment: int, text: str) -> Iterator[tuple[Name | None, int]]:
    """Each chunk's bytes, with a name where the text goes on behind it."""
    at_once = _UPDATE_BYTES if len(text) < _LONG_CHARACTERS else 4 * CHUNK_CHARACTERS
    for start in range(0, len(text), CHUNK_CHARACTERS):
        end = start + CHUNK_CHARACTERS
        # A chunk of UTF-8 never contains the bytes 0x01 and 0x02 unless the text does, so its
        # length goes in front: no two contents give the same bytes.
        piece = text[start:end].encode()
        chain.update(b"\x03%d:" % len(piece))
        for offset in range(0, len(piece), at_once):
            chain.update(piece[offset : offset + at_once])
        name = Name(chain.hexdigest(), segment, end) if end < len(text) else None
        yield name, len(piece)


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
