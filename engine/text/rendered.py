"""The result of rendering a prompt, by any renderer."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from engine.protocol import Prompt
from engine.refusal import StartRefused


class TemplateRefused(StartRefused):
    """Something is missing or wrong in the model's files. The message is for the operator."""


_DIGEST_BYTES = 16


class KnownDays(msgspec.Struct, frozen=True):
    """The days that a template may write, as ISO dates."""

    today: str
    # By beginning (`beginning_of`): the day of its first use. Beginnings of today are left out.
    earlier: dict[bytes, str] = {}

    def day_of(self, beginning: bytes) -> str:
        """The day with which a prompt of this beginning is rendered."""
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
    """The place of a segment in the tokens, and the places of its text's characters.

    A segment is not exact if the tokenizer joins its last characters with the template's. Its last
    tokens then depend on the text behind it, and `end` lies before them.
    """

    # The tokens up to the segment's end; None: the template leaves no boundary.
    end: int | None
    # The token to which `character_ends[0]` belongs.
    first_token: int = 0
    # Item i minus `begin`: the text's characters up to the end of token `first_token + i`.
    character_ends: Sequence[int] = field(default=())
    # The begin of the segment's text, in characters of the same piece.
    begin: int = 0
    # Whether the segment's last tokens are the same whatever text follows.
    is_exact: bool = True

    def offset(self, characters: int | None) -> int | None:
        """The tokens up to a point of the segment, which is never passed.

        `characters` are those of the segment's text before the point; None is the segment's end.
        The result is None if the template leaves no boundary.
        """
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
    # The segments of system messages that the template can't place. A user's turn has their text.
    folded: Sequence[int] = ()
    # The day that the template wrote, for the caller to remember; None: it wrote none.
    dated: DatedBeginning | None = None
    # The ids of the images that the tokens have a place for, in order.
    images: Sequence[str] = ()
