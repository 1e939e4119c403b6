"""Names: digests of prefixes, so that gateways and engines can speak of the same one.

A name is the hash of the scope and of everything before it, in order, so every gateway gives one
prefix the same name. Markers and the spelling of the JSON are not part of it; the order of keys in
tool inputs and schemas is. A name stands at each segment's end, and inside texts at multiples of a
step that grows with the *depth*, the characters of text before (`_STEPS`). A chain of BLAKE2b,
which the scope begins, covers the headers and a digest (XXH3 of 128 bits, seeded by the scope) of
each piece of text between two such places. Who does not know the scope, a secret, can't tell a text
by its name.

A document that stands anywhere has a name besides, which covers the scope and its text alone.
"""

from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from engine.protocol import (
    IMAGE_REFERENCE,
    MAX_NAMES,
    Breakpoint,
    Document,
    Name,
    Prompt,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.protocol.reports import AdapterInfo

TOOL, SYSTEM, RAW, USER, ASSISTANT, TOLD, THINKING, CALL, RESULT = "tsruamhco"
"""One letter for each kind of segment. `TOLD` is a text of a system message among the others."""
_TEXTS: dict[Role, str] = {"user": USER, "assistant": ASSISTANT, "system": TOLD}
_HEADERS = {
    RAW: b"raw",
    TOOL: b"tool ",
    SYSTEM: b"system",
    THINKING: b"thinking",
    CALL: b"tool_use ",
    RESULT: b"tool_result ",
}
NAMES_RULE = 2
"""The version of this rule. Names by different versions have nothing in common."""
MAX_STEP = 8192
_LEAST_STEP = 1024
_STEPS = ((16_384, _LEAST_STEP), (32_768, 2048), (65_536, 4096))
_FRONT_NAMES = 64
_DIGEST_BYTES = 8
PATCH_PIXELS = 28 * 28
"""About so many pixels of an image are a token, and four bytes of a prompt."""
_SEGMENT_END = b"\x02"
_encode = msgspec.json.Encoder().encode


class Segment(NamedTuple):
    """One segment: its kind's letter, where a message's part stands, whether it is the first part,
    what it has besides its text, and its text."""

    letter: str
    begin: bytes
    is_first: bool
    values: list[Any] | None
    text: str


class Prefix(NamedTuple):
    """One prefix of a prompt: its name, and how many bytes of content it has."""

    name: Name
    num_bytes: int


def find_prefixes(
    prompt: Prompt,
    scope: str,
    adapter: AdapterInfo | None = None,
    kept: Breakpoint | None = None,
    documents: Sequence[Document] = (),
) -> list[Prefix]:
    """All prefixes of the prompt that have a name, shallowest first.

    From the segment on in which an `adapter` begins to act its weights are in the chain. Before,
    names are the base model's, as keys and values are. From the end of the segment on that is
    marked by `kept`, what is kept of the prefix is in the chain. So are the `documents`, each from
    its beginning on, and from the first segment on that a sibling's entry may be read.
    """
    begins = None
    if adapter is not None and (invocation := adapter.invocation) is not None:
        # As far as texts tell: else the template writes it behind them all, or nothing does.
        having = (n for n, one in enumerate(segments_of(prompt)) if invocation in one.text)
        begins = max(having, default=None)
    elif adapter is not None:
        begins = 0
    placed = {one.segment: one.recompute for one in documents}
    chain = blake2b(scope.encode(), digest_size=_DIGEST_BYTES, person=b"holdfast")
    seed = int.from_bytes(chain.digest())
    if kept is not None and kept.sibling:
        chain.update(b"\x07")
    prefixes: list[Prefix] = []
    num_bytes = depth = 0
    # An image's share of the bytes, beside its reference. The engine alone knows tokens.
    sizes = {one.id: 4 * one.width * one.height // PATCH_PIXELS for one in prompt.images}
    for segment, (letter, begin, _, values, text) in enumerate(segments_of(prompt)):
        header = begin + _HEADERS.get(letter, b"text")
        if values is not None:
            header += _encode(values)
        # What the chain takes in next. Of a short text all goes in with one call.
        taken = b"\x01%d:%b" % (len(header), header)
        if adapter is not None and segment == begins:
            taken = b"\x04" + bytes.fromhex(adapter.digest) + taken
        if (recompute := placed.get(segment)) is not None:
            taken = b"\x06%a" % recompute + taken
        num_bytes += len(header)
        if sizes:
            num_bytes += sum(sizes.get(id, 0) for id in IMAGE_REFERENCE.findall(text))
        start = 0
        length = len(text)
        while start < length:
            # A piece ends at the next multiple of its step, or with the text.
            step = step_at(depth + start) if length > _LEAST_STEP else _LEAST_STEP
            end = start - start % step + step
            data = text[start:end].encode()
            num_bytes += len(data)
            taken += b"\x03" + xxh3_128_digest(data, seed)
            if end < length:
                chain.update(taken)
                taken = b""
                prefixes.append(Prefix(Name(chain.hexdigest(), segment, end), num_bytes))
            start = end
        depth += length
        if kept is not None and kept.keep is not None and segment == kept.segment:
            taken += f"\x05{kept.scorer} {kept.keep}".encode()
        chain.update(taken + _SEGMENT_END)
        prefixes.append(Prefix(Name(chain.hexdigest(), segment), num_bytes))
    return prefixes


def name_documents(
    prompt: Prompt, scope: str, documents: Sequence[Document], prefixes: Sequence[Prefix]
) -> tuple[list[Document], list[tuple[int, int]]]:
    """The documents with their names, and where in the bytes of the prompt's content each stands.

    `prefixes` are all of the prompt's.
    """
    chain = blake2b(scope.encode(), digest_size=_DIGEST_BYTES, person=b"document")
    ends = {name.segment: num_bytes for name, num_bytes in prefixes if name.characters is None}
    texts = [segment.text.encode() for segment in segments_of(prompt)] if documents else []
    named = list[Document]()
    places = list[tuple[int, int]]()
    for one in documents:
        text = texts[one.segment]
        own = chain.copy()
        own.update(text)
        named.append(replace(one, name=own.hexdigest()))
        places.append((ends[one.segment] - len(text), ends[one.segment]))
    return named, places


def trim_names(
    prefixes: list[Prefix], keep: Collection[int] = (), most: int = MAX_NAMES
) -> list[Prefix]:
    """At most so many of them, in their order: the ends of segments in `keep`, then the first
    _FRONT_NAMES, which others likely share, then the deepest segment ends, then the deepest
    others."""
    if len(prefixes) <= most:
        return prefixes

    kept: list[int] = []
    ends: list[int] = []
    inner: list[int] = []
    for position, (name, _) in enumerate(prefixes):
        if name.characters is None and name.segment in keep:
            kept.append(position)
        elif position >= _FRONT_NAMES:
            (inner if name.characters is not None else ends).append(position)
    front = [position for position in range(_FRONT_NAMES) if position not in kept]
    chosen = [*reversed(kept), *front, *reversed(ends), *reversed(inner)][:most]
    return [prefixes[position] for position in sorted(chosen)]


def step_at(depth: int) -> int:
    """The characters from one name inside a text to the next, at this depth in characters."""
    for below, step in _STEPS:
        if depth < below:
            return step
    return MAX_STEP


def segments_of(prompt: Prompt) -> Iterator[Segment]:
    """All segments in order."""
    if prompt.text is not None:
        yield Segment(RAW, b"", False, None, prompt.text)
    for tool in prompt.tools:
        yield Segment(TOOL, b"", False, [tool.name, tool.description, tool.input_schema], "")
    for block in prompt.system:
        yield Segment(SYSTEM, b"", False, None, block.text)
    for number, message in enumerate(prompt.messages):
        begin = b"%d %b " % (number, message.role.encode())
        is_first = True
        for part in message.parts:
            match part:
                case TextPart():
                    yield Segment(_TEXTS[message.role], begin, is_first, None, part.text)
                case ThinkingPart():
                    yield Segment(THINKING, begin, is_first, None, part.text)
                case ToolUsePart():
                    yield Segment(CALL, begin, is_first, [part.id, part.name, part.input], "")
                case ToolResultPart():
                    values = [part.tool_use_id, part.is_error]
                    yield Segment(RESULT, begin, is_first, values, part.text)
            is_first = False
