"""The result of rendering a prompt, by any renderer."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from engine.protocol import Prompt
from engine.refusal import StartRefused


class TemplateRefused(StartRefused):
    """The message is for the operator: what is missing or wrong in the model's files."""


_DIGEST_BYTES = 16


class KnownDays(msgspec.Struct, frozen=True):
    """Today, and the days of prompts' beginnings that were first used on another day. Days are ISO
    dates."""

    today: str
    earlier: dict[bytes, str] = {}

    def day_of(self, beginning: bytes) -> str:
        return self.earlier.get(beginning, self.today)


class DatedBeginning(msgspec.Struct, frozen=True):
    """A prompt's beginning was rendered with a day (ISO)."""

    beginning: bytes
    day: str


def beginning_of(prompt: Prompt, scope: str) -> bytes:
    """A digest (16 bytes) of the scope, the tools and the system prompt; linear in their length."""
    static = msgspec.json.encode((scope, prompt.tools, prompt.system))
    return blake2b(static, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """Where one segment ended in the tokens, and where its text's characters fall."""

    # The token offset of the segment's end. None where the template leaves no boundary.
    end: int | None
    first_token: int = 0
    # Less `begin`, item i is the number of characters of the segment's text that lie before token
    # `first_token + i + 1`. Empty when the renderer does not know.
    character_ends: Sequence[int] = field(default=())
    begin: int = 0
    # Whether the segment's last tokens are the same whatever text comes behind it. They are not
    # where a tokenizer joins the segment's last characters with the template's. Then `end` lies
    # before them.
    is_exact: bool = True

    def offset(self, characters: int | None) -> int | None:
        """The token offset of a point in the segment: never past that point."""
        if characters is None or self.end is None:
            return self.end
        whole = bisect_right(self.character_ends, self.begin + characters)
        return min(self.first_token + whole, self.end)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as tokens."""

    token_ids: list[int]
    # In the canonical order of `engine.protocol.Prompt`.
    segments: list[SegmentSpan]
    # The segments of system messages that the template can't take where they stand. They are told
    # in the user's turn.
    folded: Sequence[int] = ()
    # There if the template wrote a day that the caller may remember.
    dated: DatedBeginning | None = None
    # The ids of the images that the tokens have a place for, in order.
    images: Sequence[str] = ()
