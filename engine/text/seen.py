"""What was rendered before: prompts by how they begin, apart for every scope.

A prompt is known by the bytes of its parts, so `1`, `1.0` and `true` are three things.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Prompt
from engine.text.rendered import SegmentSpan
from engine.text.template.boundaries import Place
from engine.text.template.conversation import Conversation
from engine.text.tokens.pieces import EncodedText

_MAX_BYTES = 128 * 1024 * 1024
_MAX_ALIKE = 4
"""Prompts with the same beginning that are remembered: branches of one conversation."""
_SEGMENT_BYTES = 800
_CHARACTER_BYTES = 8  # in the prompt's bytes, its cleaned texts, the rendered text


@dataclass(frozen=True, slots=True)
class PromptKey:
    """How a prompt is known: what is before its messages, and each message."""

    head: tuple[str, str, bool, bytes]
    messages: Sequence[bytes]


def key_of(prompt: Prompt, *, thinking: bool, scope: str, day: str) -> PromptKey:
    """`day`: what the template is told of the time."""
    encode = msgspec.json.encode
    head = encode((prompt.tools, prompt.system, prompt.messages[:1]))
    return PromptKey((scope, day, thinking, head), [encode(message) for message in prompt.messages])


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A prompt that was rendered. `found` is where its segments are, `places` where they end
    in order, `spans` where in its tokens; all in `text`, which
    has no cuts; `cuts` are where they stood, `plain_cuts` less those in what the prompt and the
    template write together. `completed` are control tokens' texts that the
    template's text could complete around the tools' and system prompt's and around each message's.
    `completion` is how far its tools were completed.
    """

    key: PromptKey
    conversation: Conversation
    completed: Sequence[frozenset[str]]
    completion: int
    text: str
    plain_cuts: Sequence[int]
    cuts: Sequence[int]
    found: Sequence[Place]
    places: Sequence[Place]
    spans: Sequence[SegmentSpan]
    encoded: EncodedText

    @property
    def num_bytes(self) -> int:
        return _CHARACTER_BYTES * len(self.text) + _SEGMENT_BYTES * (len(self.places) + 1)


@dataclass(slots=True)
class SeenPrompts:
    """Least recently used go first, bounded by bytes."""

    max_bytes: int = _MAX_BYTES
    _num_bytes: int = 0
    _alike: OrderedDict[tuple[str, str, bool, bytes], list[Seen]] = field(
        default_factory=OrderedDict
    )

    def find(self, key: PromptKey) -> tuple[Seen, int] | None:
        """The one with the most first messages in common, and how many these are."""
        alike = self._alike.get(key.head)
        if alike is None:
            return None
        self._alike.move_to_end(key.head)
        common = [num_common(seen.key.messages, key.messages) for seen in alike]
        most = max(range(len(alike)), key=common.__getitem__)
        return alike[most], common[most]

    def add(self, seen: Seen) -> None:
        """In the place of those that it goes on from."""
        head = seen.key.head
        kept: list[Seen] = []
        for other in self._alike.pop(head, []):
            is_begun = num_common(other.key.messages, seen.key.messages) == len(other.key.messages)
            if is_begun or len(kept) + 1 == _MAX_ALIKE:
                self._num_bytes -= other.num_bytes
            else:
                kept.append(other)
        self._alike[head] = [seen, *kept]
        self._num_bytes += seen.num_bytes
        while self._num_bytes > self.max_bytes:
            _, alike = self._alike.popitem(last=False)
            self._num_bytes -= sum(other.num_bytes for other in alike)


def num_common(some: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many of their first elements are equal."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))
