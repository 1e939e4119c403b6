"""Names: digests of prefixes, by which gateways and engines speak of the same prefix.

A name is the hash of the scope and of everything before it, in order. So every gateway gives one
prefix the same name. The order of keys in tool inputs and schemas is part of the hash. Markers and
the spelling of the JSON are not.

A name stands at each segment's end, and inside texts at multiples of a step. The step grows with
the *depth*, the characters of text before (`_STEPS`).

The hash is a chain of BLAKE2b that begins with the scope. It takes in each segment's header, and a
digest of each piece of text between two names (XXH3 of 128 bits, seeded by the scope). The scope is
a secret: nobody without it can recognise a text by its name.
"""

from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from engine.protocol import (
    IMAGE_REFERENCE,
    MAX_NAMES,
    Name,
    Prompt,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.protocol.reports import AdapterInfo

# One letter for each kind of segment.
TOOL = "t"
SYSTEM = "s"
RAW = "r"
USER = "u"
ASSISTANT = "a"
# A text of a system message among the other messages.
LATER_SYSTEM = "m"
THINKING = "h"
CALL = "c"
RESULT = "o"
_TEXTS: dict[Role, str] = {"user": USER, "assistant": ASSISTANT, "system": LATER_SYSTEM}
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
DIGEST_BYTES = 8
SALT_BYTES = 32
_MAX_KEY_BYTES = 64
"""The longest key of BLAKE2b."""
PATCH_PIXELS = 28 * 28
"""About so many pixels of an image make a token, which counts as four bytes of a prompt."""
_encode = msgspec.json.Encoder().encode


class Segment(NamedTuple):
    """One segment of a prompt."""

    # The letter of its kind.
    letter: str
    # The number and the role of its message; empty outside of messages.
    begin: bytes
    # Whether it is the first part of its message.
    is_first: bool
    # Its content besides the text: a tool's fields, a call's id.
    values: list[Any] | None
    text: str


class Prefix(NamedTuple):
    """One prefix of a prompt."""

    name: Name
    # The bytes of its content.
    num_bytes: int


# The first bytes of what the chain takes in: each kind of input begins with its own.
_HEADER = b"\x01"
_SEGMENT_END = b"\x02"
_TEXT_DIGEST = b"\x03"
_ADAPTER = b"\x04"


class Salts(NamedTuple):
    """Further input of the chain, by segment. Each kind begins with its own byte (5 to 7)."""

    # The salt before a segment.
    before: Mapping[int, bytes] = {}
    # The salt at a segment's end.
    behind: Mapping[int, bytes] = {}


_NO_SALTS = Salts()


def salt_of(cache_salt: str | None, scope: str) -> str:
    """The digest of a client's salt in this scope: 32 bytes in hex; empty without a salt.

    A salt can only narrow the scope. The client's word can't be read from the digest.
    """
    if cache_salt is None:
        return ""
    key = scope.encode()[:_MAX_KEY_BYTES]
    return blake2b(
        cache_salt.encode(), digest_size=SALT_BYTES, key=key, person=b"cache_salt"
    ).hexdigest()


def find_prefixes(
    prompt: Prompt,
    scope: str,
    adapter: AdapterInfo | None = None,
    salts: Salts = _NO_SALTS,
) -> list[Prefix]:
    """All prefixes of the prompt that have a name, shallowest first.

    A name covers everything that the prefix's KV cache depends on. The chain takes in the digest of
    the `adapter`'s weights before the segment in which the adapter begins to act.
    """
    adapter_begins = _begin_of(adapter, prompt)
    # The bytes that each image counts besides its reference. Only the engine knows its tokens.
    image_bytes = {
        image.id: 4 * image.width * image.height // PATCH_PIXELS for image in prompt.images
    }
    chain = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"holdfast")
    seed = int.from_bytes(chain.digest())
    prefixes: list[Prefix] = []
    num_bytes = 0
    depth = 0
    for number, segment in enumerate(segments_of(prompt)):
        header = segment.begin + _HEADERS.get(segment.letter, b"text")
        if segment.values is not None:
            header += _encode(segment.values)
        # The chain's next input. It is gathered so that a short segment takes one call.
        pending = _HEADER + b"%d:%b" % (len(header), header)
        if adapter is not None and number == adapter_begins:
            pending = _ADAPTER + bytes.fromhex(adapter.digest) + pending
        if number in salts.before:
            pending = salts.before[number] + pending
        num_bytes += len(header)
        text = segment.text
        if image_bytes:
            num_bytes += sum(image_bytes.get(id, 0) for id in IMAGE_REFERENCE.findall(text))
        start = 0
        length = len(text)
        while start < length:
            # A piece ends at the next multiple of its step, or with the text.
            step = step_at(depth + start) if length > _LEAST_STEP else _LEAST_STEP
            end = start - start % step + step
            piece = text[start:end].encode()
            num_bytes += len(piece)
            pending += _TEXT_DIGEST + xxh3_128_digest(piece, seed)
            if end < length:
                chain.update(pending)
                pending = b""
                prefixes.append(Prefix(Name(chain.hexdigest(), number, end), num_bytes))
            start = end
        depth += length
        if number in salts.behind:
            pending += salts.behind[number]
        chain.update(pending + _SEGMENT_END)
        prefixes.append(Prefix(Name(chain.hexdigest(), number), num_bytes))
    return prefixes


def _begin_of(adapter: AdapterInfo | None, prompt: Prompt) -> int | None:
    """The segment in which the adapter begins to act; None where it never does."""
    if adapter is None:
        return None
    invocation = adapter.invocation
    if invocation is None:
        return 0
    # Where no text has the invocation, the template may write it behind all segments.
    invoking = [
        number for number, segment in enumerate(segments_of(prompt)) if invocation in segment.text
    ]
    return max(invoking, default=None)


def trim_names(
    prefixes: list[Prefix], keep: Collection[int] = (), max_names: int = MAX_NAMES
) -> list[Prefix]:
    """At most `max_names` of the prefixes, in their order.

    They are chosen in this order: the ends of the segments in `keep`, the first _FRONT_NAMES (which
    other prompts likely share), the deepest ends of segments, the deepest names inside texts.
    """
    if len(prefixes) <= max_names:
        return prefixes

    required: list[int] = []
    front: list[int] = []
    ends: list[int] = []
    inner: list[int] = []
    for position, (name, _) in enumerate(prefixes):
        if name.characters is None and name.segment in keep:
            required.append(position)
        elif position < _FRONT_NAMES:
            front.append(position)
        elif name.characters is None:
            ends.append(position)
        else:
            inner.append(position)
    chosen = [*reversed(required), *front, *reversed(ends), *reversed(inner)][:max_names]
    return [prefixes[position] for position in sorted(chosen)]


def step_at(depth: int) -> int:
    """The characters from one name inside a text to the next, at this depth in characters."""
    for bound, step in _STEPS:
        if depth < bound:
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
