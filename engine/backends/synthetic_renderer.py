"""How the synthetic engine renders prompts, and what it answers.

Tokens: one per 4 UTF-8 bytes of text, cut anew in each segment, so that counts can be worked out by
hand. Rendering: the segments' text and, after a chat, GENERATION_TOKENS of scaffold. Answers: the
words "synthetic 0 1 2 …" until `max_tokens`; no stop but that and stop sequences.
"""

from array import array
from collections.abc import Sequence

import msgspec

from engine.cache.ids import TokenId
from engine.protocol import (
    Delta,
    FinishReason,
    GenerateRequest,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.schedule.output import OutputParser, Spelled, unspelled
from engine.text.formats.matching import StopFinder, StopStrings
from engine.text.rendered import KnownDays, RenderedPrompt, SegmentSpan

BYTES_PER_TOKEN = 4
GENERATION_TOKENS = 4
_SCAFFOLD = [0xFFFFFFF0 + i for i in range(GENERATION_TOKENS)]


class SyntheticRenderer:
    writes_date = False

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str, days: KnownDays | None = None
    ) -> RenderedPrompt:
        tokens: list[TokenId] = []
        spans: list[SegmentSpan] = []
        for text in segment_texts(prompt):
            start = len(tokens)
            data = text.encode()
            # Four bytes are a token. 0xFF, which is in no UTF-8 text, fills the last token up.
            tokens.extend(array("I", data + b"\xff" * (-len(data) % BYTES_PER_TOKEN)))
            # The characters that each token ends behind.
            ends = range(BYTES_PER_TOKEN, len(data) + BYTES_PER_TOKEN, BYTES_PER_TOKEN)
            characters: Sequence[int] = ends
            if not text.isascii():
                characters = [len(data[:end].decode(errors="ignore")) for end in ends]
            spans.append(SegmentSpan(len(tokens), start, characters))
        scaffold = _SCAFFOLD if prompt.text is None else []
        return RenderedPrompt(tokens + scaffold, spans)

    def spelled(self, token_id: TokenId) -> Spelled:
        return unspelled(token_id)

    def parsers(self, request: GenerateRequest) -> Sequence[OutputParser]:
        stops = StopStrings(request.sampling.stop_sequences)
        return [SyntheticParser(stops) for _ in range(request.sampling.num_choices)]


class SyntheticParser:
    def __init__(self, stops: StopStrings) -> None:
        self.finish: FinishReason | None = None
        self.end_token_ids: frozenset[TokenId] = frozenset()
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self.allowed: bytes | None = None
        self.constraint = None
        self._stops = StopFinder(stops)
        self._num_words = 0

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        word = f" {self._num_words - 1}" if self._num_words else "synthetic"
        self._num_words += 1
        text = self._stops.feed(word)
        if self._stops.found is not None:
            self.finish = "stop_sequence"
            self.stop_sequence = self._stops.found
        return [TextDelta(text)] if text else []

    def close(self) -> Sequence[Delta]:
        text = self._stops.flush()
        return [TextDelta(text)] if text else []


def segment_texts(prompt: Prompt) -> list[str]:
    """The text of each segment, in order. Roles are part of it, as in a template."""
    if prompt.text is not None:
        return [prompt.text]
    texts = [msgspec.json.encode(tool).decode() for tool in prompt.tools]
    texts += [part.text for part in prompt.system]
    for message in prompt.messages:
        for part in message.parts:
            match part:
                case TextPart(text) | ThinkingPart(text) | ToolResultPart(_, text):
                    texts.append(text)
                case ToolUsePart():
                    texts.append(msgspec.json.encode(part).decode())
    return texts
