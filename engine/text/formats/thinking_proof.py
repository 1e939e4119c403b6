"""Which tags a template's thinking stands in, and in which field it wants it, by rendering some."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.call_stream import FormatParser
from engine.text.formats.harmony import HarmonyParser
from engine.text.formats.proof import PROBE_TOOL, turn_begin
from engine.text.formats.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    ThinkingParser,
)
from engine.text.formats.tool_calls import PlainText
from engine.text.template.messages import TemplateTraits, ThinkingKey
from engine.text.template.probes import TemplateProbe

_QUESTION, _ANSWER, _RESULT = "probe-question", "probe-answer", "probe-result"
_THOUGHT = "probe-thought"
_KEYS: tuple[ThinkingKey, ...] = ("reasoning_content", "thinking", "reasoning")
_TAG = re.compile(r"<[^<>\s]{1,40}>(?:thought\n)?|\[/?[A-Z_]{1,40}\]")
_DERIVED = "template"
"""The name of tags that are known from the template alone."""


@dataclass(frozen=True, slots=True)
class ProvenThinking:
    """`name` None: the template shows no thinking. `inside` is what stands within a turn.

    `inside` is the template's text between the thinking and what follows it in the same turn.
    """

    name: str | None
    traits: TemplateTraits
    tags: ReasoningFormat | None = None
    inside: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingProof:
    """Renders probes through one template; `has_calls` where it renders calls."""

    probe: TemplateProbe
    has_calls: bool

    def find(self, traits: TemplateTraits, wanted: str = "auto") -> ProvenThinking:
        """A template that drops all thinking has the tags that it takes out of answers."""
        if wanted == "none":
            return ProvenThinking(None, traits)
        names = [n for n in (*REASONING_FORMATS, HARMONY) if wanted in ("auto", n)]
        if wanted == "auto":
            is_wrapped = "<response></response>" in self.probe.template.source
            names.remove("think" if is_wrapped else "granite")
        for way in _ways(traits):
            for message in self._messages():
                turn = self._turn(message, way)
                if turn is None or _THOUGHT not in turn.text:
                    continue
                for name in names:
                    if _reads(turn, _parser(name, is_open=turn.opens(name))):
                        return self._proven(name, way, turn)
                tags = _derive(turn.text) if wanted == "auto" else None
                if tags is not None and _reads(
                    turn, ThinkingParser(tags, PlainText(), is_open=False)
                ):
                    proven = self._proven(_DERIVED, way, turn)
                    return replace(proven, tags=tags)
        return ProvenThinking(*self._dropped(names, wanted), traits)

    def _dropped(self, names: list[str], wanted: str) -> tuple[str | None]:
        if wanted != "auto":
            return (wanted,)
        source = self.probe.template.source
        known = (n for n in names if n != HARMONY and REASONING_FORMATS[n].close in source)
        return (next(known, None),)

    def _proven(self, name: str, traits: TemplateTraits, turn: "_Turn") -> ProvenThinking:
        behind = turn.text.partition(_THOUGHT)[2]
        ends = [at for n in (_ANSWER, PROBE_TOOL.name) if (at := behind.find(n)) >= 0]
        inside = behind[: min(ends)] if ends else ""
        if self.has_calls and self._loses_text(traits):
            merged = replace(traits, replay=replace(traits.replay, merges_text=True))
            if not self._loses_text(merged):
                traits = merged
        return ProvenThinking(name, traits, REASONING_FORMATS.get(name), inside)

    def _loses_text(self, traits: TemplateTraits) -> bool:
        """Is a turn with thinking, text and a call refused or without its thinking?"""
        parts: list[Part] = [ThinkingPart(_THOUGHT), TextPart(_ANSWER), _CALL]
        turn = self._turn(parts, traits)
        return turn is None or _THOUGHT not in turn.text

    def _messages(self) -> Iterator[list[Part]]:
        """Thinking behind the last question, where every template that renders any does."""
        if self.has_calls:
            yield [ThinkingPart(_THOUGHT), _CALL]
        yield [ThinkingPart(_THOUGHT), TextPart(_ANSWER)]

    def _turn(self, parts: list[Part], traits: TemplateTraits) -> "_Turn | None":
        messages = [Message("user", [TextPart(_QUESTION)])]
        tools = [PROBE_TOOL] if self.has_calls else []
        asked = self.probe.text(Prompt(messages, tools), traits, thinking=True)
        messages = [*messages, Message("assistant", parts)]
        if _CALL in parts:
            messages.append(Message("user", [ToolResultPart(_CALL.id, _RESULT)]))
        answered = self.probe.text(Prompt(messages, tools), traits, thinking=True)
        if asked is None or answered is None:
            return None
        text = answered[turn_begin(asked, answered) :].partition(_RESULT)[0]
        return _Turn(asked, text)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The prompt of a turn and the turn's text behind it."""

    asked: str
    text: str

    def opens(self, name: str) -> bool:
        tags = REASONING_FORMATS.get(name)
        end = self.asked.rpartition(_QUESTION)[2]
        return tags is not None and end.rfind(tags.open) > end.rfind(tags.close)


_CALL = ToolUsePart("toolu_0Ab0Ab0Ab0Ab0Ab0Ab0Ab000", PROBE_TOOL.name, {"word": "probe it"})


def _ways(traits: TemplateTraits) -> Iterator[TemplateTraits]:
    for key in _KEYS:
        yield replace(traits, replay=replace(traits.replay, thinking_key=key))
    yield replace(traits, thinks_in_content=True)


def _parser(name: str, *, is_open: bool) -> FormatParser:
    if name == HARMONY:
        return HarmonyParser(lambda: "probe-id", [PROBE_TOOL.name])
    return ThinkingParser(REASONING_FORMATS[name], PlainText(), is_open=is_open)


def _reads(turn: _Turn, parser: FormatParser) -> bool:
    """Does a parser find the thinking, whole and nothing else?"""
    deltas = [*parser.feed(turn.text), *parser.close()]
    thought = "".join(d.text for d in deltas if isinstance(d, ThinkingDelta))
    text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    return thought == _THOUGHT and _THOUGHT not in text


def _derive(turn: str) -> ReasoningFormat | None:
    """The tags around the thinking, whatever their names."""
    before, _, behind = turn.partition(_THOUGHT)
    opened = _TAG.search(before.rstrip()[-60:]) if before.strip() else None
    closed = _TAG.match(behind.lstrip())
    if opened is None or closed is None or opened.group().startswith(("</", "[/")):
        return None
    opening = before.rstrip()[before.rstrip().rfind(opened.group().rstrip()) :]
    return ReasoningFormat(opening, closed.group())
