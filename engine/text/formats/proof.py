"""Proves, when a model is loaded, how it writes calls and thinking and what its template takes.

A small conversation with a known call is rendered in every way in which templates take calls. Every
format's parser reads the result. A format is taken only if its parser finds exactly the known call.
Thinking is proven likewise. If no format is proven for calls, the model's tools are refused, so no
markup is passed on as text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

from engine.cache.ids import TokenId
from engine.errors import InvalidRequest
from engine.protocol import (
    GenerateRequest,
    Message,
    Part,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.calls import FormatParser, PlainText, calls_of
from engine.text.formats.matching import places_of
from engine.text.formats.reasoning import (
    MESSAGES,
    REASONING_FORMATS,
    MessagesParser,
    MessageSyntax,
    ReasoningFormat,
    ThinkingParser,
)
from engine.text.formats.table import FAMILIES, TOOL_FORMATS, CallFormat, Derivation, with_ways_of
from engine.text.rendered import TemplateRefused
from engine.text.template.boundaries import PlacedText, place_segments
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.messages import (
    CallTexts,
    TemplateTraits,
    ThinkingKey,
    new_conversation,
    strings_of,
)
from engine.text.tokens.pieces import ControlTexts
from engine.text.warning import warn

_MAX_SHOWN = 300
_QUESTION = "probe-question"
_ANSWER = "probe-answer"
_RESULT = "probe-result"
_THOUGHT = "probe-thought"
_TEXT = "probe-text"
_NAME = "probe_tool"
LAST_WORD = "probe-last"
"""The last word of every probe's input."""
# They are in alphabetical order, because some templates sort arguments.
_PROPERTIES: dict[str, Any] = {
    "count": {"type": "integer", "description": "probe"},
    "flag": {"type": "boolean", "description": "probe"},
    "more": {"type": "object", "properties": {"key": {"type": "string"}}, "description": "probe"},
    "ratio": {"type": "number", "description": "probe"},
    "rows": {"type": "array", "items": {"type": "string"}, "description": "probe"},
    "text": {"type": "string", "description": "probe"},
    "word": {"type": "string", "description": "probe"},
}
_TOOL = Tool(
    _NAME, {"type": "object", "properties": _PROPERTIES, "required": ["word"]}, "probe-description"
)
# The first input has every kind of value of JSON, and the last has the least that a call needs.
# Some templates write strings without escapes, and some write no nested values.
_INPUTS: tuple[dict[str, Any], ...] = (
    {
        "count": 3,
        "flag": True,
        "more": {"key": "z"},
        "ratio": 1.5,
        "rows": ["x", "y"],
        "text": 'a "b" <c>\n\\d é',
        "word": LAST_WORD,
    },
    {"count": 3, "flag": True, "ratio": 1.5, "text": "probe it", "word": LAST_WORD},
    {"text": "probe it", "word": LAST_WORD},
)
_ONE = {"word": "probe it"}
_CUT_INPUT = '{"word": "probe \\"cut\\", more'
_OTHER = "another one"
_OTHER_INPUT = {"word": _OTHER}
DERIVED = "template"
"""The name of a format that is known from the template alone."""
_USER = Message("user", [TextPart(_QUESTION)])
# No two questions are equal, because templates find the last one by comparing messages.
_SECOND = Message("user", [TextPart("probe-second")])
_SYSTEM = TextPart("probe-system")
_ANSWERED = Message("assistant", [TextPart(_ANSWER)])
_THINKING_KEYS: tuple[ThinkingKey, ...] = (
    "reasoning_content", "thinking", "reasoning", "tool_plan", "thought"
)  # fmt: skip
_THINKING_MESSAGES = {
    name: syntax for name, syntax in MESSAGES.items() if syntax.thinks is not None
}
_TAG = re.compile(r"<[^<>\s]{1,40}>(?:thought\n)?|\[/?[A-Z_]{1,40}\]")


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders prompts of its own through one template. A refusal by the template is no error."""

    template: ChatTemplate
    controls: ControlTexts

    def text(self, prompt: Prompt, traits: TemplateTraits, *, thinking: bool = False) -> str | None:
        """The prompt as the template renders it; None if the template refuses it."""
        conversation = new_conversation(prompt, self.controls, traits)
        with suppress(InvalidRequest):
            return self.template.render(conversation.variables({}, thinking=thinking))
        return None

    def find_traits(self, traits: TemplateTraits) -> TemplateTraits:
        """The given traits, and the fewest further traits with which the probe's prompts render.

        A prompt that renders with no trait adds none.
        """
        for prompt, needle, trait in (
            (Prompt([_USER], system=[_SYSTEM]), _SYSTEM.text, "folds_system"),
            (Prompt(_calling([_ONE])), _NAME, "shortens_ids"),
            (Prompt(_calling([_ONE, _OTHER_INPUT])), _OTHER, "splits_calls"),
            (Prompt(_calling([_ONE], behind=_TEXT)), _TEXT, "joins_results"),
        ):
            extended = replace(traits, **{trait: True})  # type: ignore[arg-type]
            if not self._renders(prompt, needle, traits) and self._renders(
                prompt, needle, extended
            ):
                traits = extended
        folding = replace(traits, folds_late_system=True)
        if not self._keeps_late_system(traits) and self._keeps_late_system(folding):
            traits = folding
        # Do the tools come behind an answer that was already given?
        text = self.text(Prompt([_USER, _ANSWERED, _SECOND], [_TOOL]), traits) or ""
        moves_tools = 0 <= text.find(_ANSWER) < text.find(_NAME)
        return replace(traits, moves_tools=moves_tools)

    def find_text_input(self, traits: TemplateTraits) -> TemplateTraits:
        """The traits with `writes_text` if the template writes an input that is no JSON object
        unchanged."""
        extended = replace(traits, writes_text=True)
        text = self.text(Prompt(_calling([_CUT_INPUT]), [_TOOL]), extended)
        return extended if text is not None and _CUT_INPUT in text else traits

    def shows_tools(self, traits: TemplateTraits) -> bool:
        """Whether the template writes the tools."""
        return self._renders(Prompt([_USER], [_TOOL]), _NAME, traits)

    def has_tools_first(self, traits: TemplateTraits) -> bool:
        """Whether the tools come before the system prompt."""
        placed = self._place(Prompt([_USER], [_TOOL], [_SYSTEM]), traits)
        if placed is None:
            return False
        tool, system, _ = placed.places
        return tool.end is not None and system.begin is not None and tool.end <= system.begin

    def opens_tag(
        self, tags: ReasoningFormat, traits: TemplateTraits, *, thinking: bool, after_result: bool
    ) -> bool:
        """Whether the prompt of a new turn ends inside the tags of thinking."""
        prompt = Prompt(_calling([_ONE])) if after_result else Prompt([_USER])
        text = self.text(prompt, traits, thinking=thinking)
        last = _RESULT if after_result else _QUESTION
        end = "" if text is None else text.rpartition(last)[2]
        return end.rfind(tags.open) > end.rfind(tags.close)

    def find_turn_end(self, traits: TemplateTraits) -> frozenset[TokenId]:
        """The control token right behind an assistant's text; empty if there is none."""
        placed = self._place(Prompt([_USER, _ANSWERED, _SECOND]), traits)
        if placed is None or placed.places[1].end is None:
            return frozenset()
        matches = self.controls.matches(placed.text)
        return frozenset(m.token_id for m in matches if m.begin == placed.places[1].end)

    def _keeps_late_system(self, traits: TemplateTraits) -> bool:
        """Whether a system message stays in its place, between two turns and behind the last."""
        late = Message("system", [TextPart("probe-late")])
        for messages in ([_USER, _ANSWERED, late, _SECOND], [_USER, _ANSWERED, _SECOND, late]):
            text = self.text(Prompt(messages, system=[_SYSTEM]), traits)
            words = [strings_of(Prompt([message]))[0] for message in messages[1:]]
            places = [-1 if text is None else text.find(word) for word in words]
            if text is None or places != sorted(places) or any(text.count(w) != 1 for w in words):
                return False
        return True

    def _renders(self, prompt: Prompt, needle: str, traits: TemplateTraits) -> bool:
        return needle in (self.text(prompt, traits) or "")

    def _place(self, prompt: Prompt, traits: TemplateTraits) -> PlacedText | None:
        conversation = new_conversation(prompt, self.controls, traits)
        with suppress(InvalidRequest):
            return place_segments(self.template, conversation, thinking=False)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """The formats that the operator sets."""

    # A name of `TOOL_FORMATS`, or `auto` for the proven format, or `none`.
    tools: str = "auto"
    # A name of `REASONING_FORMATS`, or of messages with thinking, or `auto`, or `none`.
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True)
class ProvenCalls:
    """A format of calls that a template's own rendering proved."""

    # Its name in `TOOL_FORMATS`, or DERIVED.
    name: str
    format: CallFormat
    # How the template takes calls.
    traits: TemplateTraits
    # A turn with one call, as the template writes it. Empty if the operator set another format.
    turn: str
    # The input of that call.
    probe: Mapping[str, Any]
    # The template's own way of writing calls; None if it could not be derived.
    call_texts: CallTexts | None = None


@dataclass(frozen=True, slots=True)
class ProvenThinking:
    """How a template writes thinking, by its own rendering."""

    # The name of the format; None if the template writes no thinking.
    name: str | None
    # How the template takes calls and thinking.
    traits: TemplateTraits
    # None if the thinking stands in messages, or was not rendered.
    tags: ReasoningFormat | None = None
    # The template's text between the thinking and the rest of the same turn.
    inside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """How a model's template writes calls and thinking."""

    # The name of the format of calls; None if no known format fits the template.
    tool_format: str | None
    # The name of the format of thinking; None if no known format fits the template.
    reasoning_format: str | None
    # How the template takes calls and thinking.
    traits: TemplateTraits
    # None if no format of calls was proven.
    calls: ProvenCalls | None
    # None if thinking has no tags.
    tags: ReasoningFormat | None
    # The texts of the control tokens that end turns.
    ends: frozenset[str]
    # The texts of the control tokens that stand inside turns, and so end none.
    no_ends: frozenset[str]

    @property
    def call_format(self) -> CallFormat | None:
        if self.calls is not None:
            return self.calls.format
        return None if self.tool_format is None else TOOL_FORMATS[self.tool_format]

    @property
    def call_instructions(self) -> str:
        """Instructions on how to write a call, for a model whose template has none."""
        call_format = self.call_format
        if call_format is None:
            return ""
        call_texts = call_format.call_texts[0]
        call = call_texts.begin + call_texts.call + call_texts.end
        for place, word in (("{name}", "NAME"), ("{input}", "ARGUMENTS"), ("{digits}", "0")):
            call = call.replace(place, word)
        return f"To call tools write this, with the arguments as one JSON object:\n{call}"

    @property
    def messages(self) -> MessageSyntax | None:
        """The notation of a turn's messages; None if a turn has no messages."""
        call_format = self.call_format
        messages = None if call_format is None else call_format.messages
        return messages or _THINKING_MESSAGES.get(self.reasoning_format or "")

    @property
    def thinking_markers(self) -> frozenset[str]:
        if self.messages is not None:
            return self.messages.markers
        return frozenset() if self.tags is None else self.tags.markers

    @property
    def markers(self) -> frozenset[str]:
        call_format = self.call_format
        return self.thinking_markers | (frozenset() if call_format is None else call_format.markers)

    def new_parser(self, request: GenerateRequest, *, is_open: bool) -> FormatParser:
        """A parser for one choice. `is_open` says that the prompt ends inside the thinking."""
        tools = request.prompt.callable_tools if request.tool_choice.mode != "none" else []
        call_format = self.call_format if tools else None
        if self.messages is not None:
            if call_format is not None and call_format.ways:
                return call_format.new_parser(tools)
            return MessagesParser(self.messages, tools)
        calls: FormatParser = PlainText() if call_format is None else call_format.new_parser(tools)
        if self.tags is not None:
            calls = ThinkingParser(self.tags, calls, is_open=is_open)
        return calls


def find_formats(
    probe: TemplateProbe, choice: FormatChoice, known_ends: Iterable[str] = ()
) -> ModelFormats:
    """Prove the formats of a model's template.

    `known_ends` are the texts of the end tokens that the model declares. Raises TemplateRefused if
    `choice` has a name of no format.
    """
    for setting, name, known in (
        ("tool_format", choice.tools, TOOL_FORMATS),
        ("reasoning_format", choice.reasoning, {**REASONING_FORMATS, **_THINKING_MESSAGES}),
    ):
        names = ["auto", "none", *known]
        if name not in names:
            raise TemplateRefused(f"`{setting}`: {name!r} is none of {', '.join(names)}")
    proof = _CallProof(probe, tuple(known_ends))
    calls = None if choice.tools == "none" else proof.find()
    tool_format = None if calls is None else calls.name
    if calls is None and choice.tools == "auto":
        turn = proof.turn_of([{"word": LAST_WORD}], TemplateTraits())
        if turn is not None and _NAME in turn:
            warn(
                "no known format reads the calls that the chat template writes: tools are refused",
                written=turn[:_MAX_SHOWN],
            )
    if choice.tools not in ("auto", "none", tool_format):
        warn(
            "the tool format that is set is not the one that the template proves",
            set=choice.tools,
            proven=tool_format,
        )
        tool_format = choice.tools
        if calls is not None:
            call_format = TOOL_FORMATS[tool_format]
            calls = ProvenCalls(tool_format, call_format, calls.traits, "", calls.probe)
    traits = TemplateTraits() if calls is None else calls.traits
    thinking = _ThinkingProof(probe, calls is not None).find(traits, choice.reasoning)
    messages = MESSAGES.get(tool_format or "") or _THINKING_MESSAGES.get(thinking.name or "")
    ends = frozenset[str]() if messages is None else messages.turn_ends
    inside = probe.controls.pattern.findall(thinking.inside)
    tags = thinking.tags or REASONING_FORMATS.get(thinking.name or "")
    no_ends = (frozenset(inside) - ends) | (frozenset() if tags is None else tags.markers)
    no_ends |= frozenset() if messages is None else frozenset(messages.ends) - ends
    if calls is not None and calls.turn:
        ends |= proof.ends_behind(calls)
    return ModelFormats(
        tool_format=tool_format,
        reasoning_format=thinking.name,
        traits=thinking.traits,
        calls=calls,
        tags=tags,
        ends=ends - no_ends,
        no_ends=no_ends,
    )


def turn_begin(prompt: str, conversation: str) -> int:
    """The character at which the model's text begins in a rendered conversation.

    `prompt` is the rendered prompt that the model answered. A template may begin a finished turn in
    another way than its generation prompt. Then the model's text begins at the first difference, or
    at the beginning of the markup in which that difference lies.
    """
    if conversation.startswith(prompt):
        return len(prompt)
    pairs = enumerate(zip(prompt, conversation, strict=False))
    begin = next((at for at, (left, right) in pairs if left != right), len(conversation))
    opened = max(conversation.rfind(bracket, 0, begin) for bracket in "<[")
    if opened >= 0 and not re.search(r"[>\]]", conversation[opened:begin]):
        return opened
    return begin


def _calling(
    inputs: Sequence[Any], *, text: str = "", names: Sequence[str] = (), behind: str = ""
) -> list[Message]:
    """A question, a turn of calls, and a message with their results.

    `text` stands before the calls, and `behind` stands after the results. The ids are like ours.
    """
    ids = [f"toolu_{'0Ab' * 7}{index:03}" for index in range(len(inputs))]
    parts: list[Part] = [TextPart(text)] if text else []
    parts += [
        ToolUsePart(call_id, names[index] if names else _NAME, call_input)
        for index, (call_id, call_input) in enumerate(zip(ids, inputs, strict=True))
    ]
    results: list[Part] = [ToolResultPart(call_id, _RESULT) for call_id in ids]
    results += [TextPart(behind)] if behind else []
    return [_USER, Message("assistant", parts), Message("user", results)]


def _reads(call_format: CallFormat, turn: str | None, inputs: Sequence[Any]) -> bool:
    """Whether the format's parser finds exactly these calls in a turn."""
    if turn is None or call_format.opening not in turn:
        return False
    parser = call_format.new_parser([_TOOL])
    calls = calls_of([*parser.feed(turn), *parser.close()])
    return calls == [(_NAME, dict(call_input)) for call_input in inputs]


@dataclass(frozen=True, slots=True)
class _CallProof:
    """Finds the format of calls of one template."""

    probe: TemplateProbe
    # The texts that may end a turn.
    ends: Sequence[str] = ()

    def find(self) -> ProvenCalls | None:
        """The proven format; None if no format is proven."""
        prompt_end = self.probe.text(Prompt([_USER]), TemplateTraits()) or ""
        prompt_end = prompt_end.rpartition(_QUESTION)[2]
        for call_input in _INPUTS:
            for traits in self._ways():
                turn = self.turn_of([call_input], traits)
                if turn is None or _NAME not in turn:
                    continue
                for name, call_format in TOOL_FORMATS.items():
                    # The prompt ends with the beginning of the turn's first message.
                    messages = call_format.messages
                    has_start = messages is None or messages.start in prompt_end
                    if has_start and _reads(call_format, turn, [call_input]):
                        proven = ProvenCalls(name, call_format, traits, turn, call_input)
                        return self._complete(proven)
        for traits in self._ways():
            # A derived format must read every kind of value of JSON.
            derived = self._derive(traits)
            inputs: tuple[dict[str, Any], ...] = (_INPUTS[0], _OTHER_INPUT, {})
            if derived is not None and all(
                self._reads(derived, [call_input], traits) for call_input in inputs
            ):
                turn = self.turn_of([_INPUTS[0]], traits) or ""
                return self._complete(ProvenCalls(DERIVED, derived, traits, turn, _INPUTS[0]))
        return self._find_described()

    def _ways(self) -> Iterator[TemplateTraits]:
        """The ways to give a call to a template, the usual ones first."""
        for names_ids, shortens_ids, null_content, strings in product((False, True), repeat=4):
            if not (names_ids and shortens_ids):
                yield TemplateTraits(
                    names_ids=names_ids,
                    shortens_ids=shortens_ids,
                    null_content=null_content,
                    string_arguments=strings,
                )
        yield TemplateTraits(names_in_metadata=True)

    def _derive(self, traits: TemplateTraits) -> CallFormat | None:
        pattern = self.probe.controls.pattern
        # The control token that the template writes behind an answer also ends a turn.
        answered = self.probe.text(Prompt([_USER, _ANSWERED, _USER]), TemplateTraits()) or ""
        end = pattern.match(answered, answered.find(_ANSWER) + len(_ANSWER))
        ends = self.ends if end is None else (*self.ends, end.group())
        return Derivation(partial(self.turn_of, traits=traits), _NAME, pattern, ends).derive()

    def _complete(self, proven: ProvenCalls) -> ProvenCalls:
        """Add how the template takes turns with more than one call."""
        call_format = proven.format
        traits = proven.traits
        call_input = dict(proven.probe)
        # Some templates write an empty content as an empty answer. They get no content.
        bare = replace(traits, null_content=True)
        shorter = self._text([call_input], bare)
        whole = self._text([call_input], traits)
        is_shorter = len(shorter or whole or "") < len(whole or "")
        if is_shorter and self._reads(call_format, [call_input], bare):
            traits = bare
        split = replace(traits, splits_calls=True)
        ways = (traits, split, replace(split, interleaves=True))
        two = [call_input, _OTHER_INPUT]
        traits = next((way for way in ways if self._reads(call_format, two, way)), split)
        if traits.splits_calls:
            # Two results of two tools: does the first one carry the second one's name?
            tools = [_TOOL, Tool("other_tool", _TOOL.input_schema, _TOOL.description)]
            names = [tool.name for tool in tools]
            prompt = Prompt(_calling([_OTHER_INPUT, _OTHER_INPUT], names=names), tools)
            behind = (self.probe.text(prompt, traits) or "").rpartition(_QUESTION)[2]
            header = behind.partition(_RESULT)[0] if _RESULT in behind else ""
            is_second = header.rfind(_NAME) < header.rfind("other_tool")
            if is_second and behind.count("other_tool") > 2:
                traits = replace(traits, interleaves=True)
        apart = replace(traits, splits_text=True)
        if not self._reads(call_format, [call_input], traits, _TEXT) and self._reads(
            call_format, [call_input], apart, _TEXT
        ):
            traits = apart
        derived = self._derive(traits)
        return replace(
            self._in_family(proven),
            traits=traits,
            turn=self.turn_of([call_input], traits) or proven.turn,
            call_texts=None if derived is None else derived.call_texts[0],
        )

    @property
    def _families(self) -> list[Sequence[str]]:
        """The families of formats for which the vocabulary has control tokens."""
        known = self.probe.controls.ids
        return [names for token, names in FAMILIES.items() if token in known]

    def _in_family(self, proven: ProvenCalls) -> ProvenCalls:
        """The proven format, which also reads the other formats of its model's family."""
        name = proven.name
        call_format = proven.format
        for names in self._families:
            # Objects and lists without markup belong to no family, so they take the family's name.
            is_bare = name in ("llama3_json", "pythonic")
            name = names[0] if is_bare else name
            call_format = with_ways_of(call_format, names)
        return replace(proven, name=name, format=call_format)

    def _find_described(self) -> ProvenCalls | None:
        """A format for a template that writes no calls; None if there is none.

        It is a format that the template's instructions describe, or for which the vocabulary has
        control tokens.
        """
        instructions = self.probe.text(Prompt([_USER], [_TOOL]), TemplateTraits())
        if instructions is None or _NAME not in instructions:
            return None
        family_names = set(chain.from_iterable(self._families))
        known = self.probe.controls.ids
        for name, call_format in TOOL_FORMATS.items():
            marks = [marker for marker in call_format.markers if marker.startswith("<")]
            has_marks = call_format.opening in instructions and all(mark in known for mark in marks)
            for call_texts in call_format.call_texts:
                head = call_texts.begin + call_texts.call.partition("{name}")[0].rstrip('"')
                before_name = head.removesuffix('{"name": ')
                ends_in_name = before_name != head and re.search(r"[<`\w]", before_name) is not None
                is_described = ends_in_name and head in instructions
                has_tokens = has_marks and call_format.opening in known
                if not (is_described or name in family_names or has_tokens):
                    continue
                traits = TemplateTraits(call_texts=call_texts)
                for call_input in _INPUTS:
                    turn = self.turn_of([call_input], traits)
                    if turn is not None and _reads(call_format, turn, [call_input]):
                        proven = ProvenCalls(name, call_format, traits, turn, call_input)
                        return self._in_family(proven)
        return None

    def _reads(
        self, call_format: CallFormat, inputs: Sequence[Any], traits: TemplateTraits, text: str = ""
    ) -> bool:
        return _reads(call_format, self.turn_of(inputs, traits, text=text), inputs)

    def ends_behind(self, proven: ProvenCalls) -> frozenset[str]:
        """The text of the control token right behind a call's markup; empty if text stands there.

        Functionary ends a turn of calls with another token than an answer. GLM ends it with the
        token of the next role.
        """
        turn = replace(self, ends=()).turn_of([dict(proven.probe)], proven.traits) or ""
        at = turn.rfind(LAST_WORD) + len(LAST_WORD)
        markup = sorted(proven.format.markers, key=len, reverse=True)
        for control in self.probe.controls.pattern.finditer(turn, at):
            if any(control.group() in marker for marker in markup):
                at = control.end()
                continue
            between = turn[at : control.start()]
            for marker in markup:
                between = between.replace(marker, "")
            return frozenset() if re.search(r"\w", between) else frozenset({control.group()})
        return frozenset()

    def turn_of(
        self, inputs: Sequence[Any], traits: TemplateTraits, *, text: str = ""
    ) -> str | None:
        """The model's text of a turn of calls, as the template writes it; None if it refuses it.

        It ends before the first result. A turn with one call ends at the first of `ends`.
        """
        prompt = self.probe.text(Prompt([_USER], [_TOOL]), traits)
        called = self._text(inputs, traits, text)
        if prompt is None or called is None:
            return None
        turn = called[turn_begin(prompt, called) :].partition(_RESULT)[0]
        ends = places_of(turn, self.ends)
        return turn[: min(ends)[0]] if ends and len(inputs) == 1 else turn

    def _text(self, inputs: Sequence[Any], traits: TemplateTraits, text: str = "") -> str | None:
        return self.probe.text(Prompt(_calling(inputs, text=text), [_TOOL]), traits)


@dataclass(frozen=True, slots=True)
class _ThinkingProof:
    """Finds the format of thinking of one template."""

    probe: TemplateProbe
    # Whether the template renders calls.
    has_calls: bool

    def find(self, traits: TemplateTraits, wanted: str) -> ProvenThinking:
        """The format of thinking. `wanted` is the name that is set, or `auto` or `none`.

        If a template drops all thinking, the format is the one whose closing tag stands in the
        template's source.
        """
        if wanted == "none":
            return ProvenThinking(None, traits)
        source = self.probe.template.source
        known = (*REASONING_FORMATS, *_THINKING_MESSAGES)
        names = [n for n in known if wanted in ("auto", n)]
        if wanted == "auto":
            # Several formats have the same tags. The template's source shows which one is meant.
            hinted = {n for n, tags in REASONING_FORMATS.items() if tags.template_text}
            named = {n for n in hinted if REASONING_FORMATS[n].template_text in source}
            excluded = (hinted - named) | ({"think"} if named else set())
            names = [n for n in names if n not in excluded]
        ways = [replace(traits, thinking_key=key) for key in _THINKING_KEYS]
        for way in (*ways, replace(traits, thinks_in_content=True)):
            for parts in self._turns():
                prompt, turn = self._render(parts, way)
                if prompt is None or turn is None or _THOUGHT not in turn:
                    continue
                opened = prompt.rpartition(_QUESTION)[2]
                for name in names:
                    tags = REASONING_FORMATS.get(name)
                    messages = _THINKING_MESSAGES.get(name)
                    if _reads_thought(turn, opened, tags or messages):
                        return self._proven(name, tags, way, turn)
                # No known format reads the thinking. The tags around it make a format of their own.
                # The prompt may end behind the opening tag.
                before, _, behind = (opened + turn).partition(_THOUGHT)
                before = before.rstrip()
                tag_texts = _TAG.findall(before[-60:])
                closed = _TAG.match(behind.lstrip())
                if wanted != "auto" or not tag_texts or closed is None:
                    continue
                opening = before[before.rfind(tag_texts[-1].rstrip()) :]
                tags = ReasoningFormat(opening, closed.group())
                if tag_texts[-1][1] != "/" and _reads_thought(turn, opened, tags):
                    return self._proven(DERIVED, tags, way, turn)
        if wanted != "auto":
            return ProvenThinking(wanted, traits)
        tagged = {n: REASONING_FORMATS[n] for n in names if n in REASONING_FORMATS}
        return ProvenThinking(next((n for n in tagged if tagged[n].close in source), None), traits)

    def _turns(self) -> Iterator[list[Part]]:
        """The parts of turns with thinking. They stand behind the last question: a template that
        renders any thinking renders it there."""
        if self.has_calls:
            yield [ThinkingPart(_THOUGHT), *_calling([_ONE])[1].parts]
        yield [ThinkingPart(_THOUGHT), TextPart(_ANSWER)]

    def _proven(
        self, name: str, tags: ReasoningFormat | None, traits: TemplateTraits, turn: str
    ) -> ProvenThinking:
        behind = turn.partition(_THOUGHT)[2]
        ends = places_of(behind, (_ANSWER, _NAME))
        inside = behind[: min(ends)[0]] if ends else ""
        merged = replace(traits, merges_text=True)
        if self.has_calls and self._loses_text(traits) and not self._loses_text(merged):
            traits = merged
        return ProvenThinking(name, traits, tags, inside)

    def _loses_text(self, traits: TemplateTraits) -> bool:
        """Whether a turn with thinking, text and a call is refused, or loses its thinking."""
        [thought, *calls] = next(self._turns())
        turn = self._render([thought, TextPart(_ANSWER), *calls], traits)[1]
        return turn is None or _THOUGHT not in turn

    def _render(self, parts: list[Part], traits: TemplateTraits) -> tuple[str | None, str | None]:
        """The prompt of a turn, and the turn as the template writes it. Both are None if it refuses
        either."""
        tools = [_TOOL] if self.has_calls else []
        prompt = self.probe.text(Prompt([_USER], tools), traits, thinking=True)
        calls = [part for part in parts if isinstance(part, ToolUsePart)]
        results = [Message("user", [ToolResultPart(call.id, _RESULT)]) for call in calls]
        messages = [_USER, Message("assistant", parts), *results]
        answered = self.probe.text(Prompt(messages, tools), traits, thinking=True)
        if prompt is None or answered is None:
            return None, None
        return prompt, answered[turn_begin(prompt, answered) :].partition(_RESULT)[0]


def _reads_thought(turn: str, end: str, notation: ReasoningFormat | MessageSyntax | None) -> bool:
    """Whether a format's parser finds exactly the thinking in a turn. `end` is the prompt's end."""
    match notation:
        case ReasoningFormat():
            is_open = end.rfind(notation.open) > end.rfind(notation.close)
            parser: FormatParser = ThinkingParser(notation, PlainText(), is_open=is_open)
        case MessageSyntax():
            parser = MessagesParser(notation, [_TOOL])
        case None:
            return False
    deltas = [*parser.feed(turn), *parser.close()]
    thought = "".join(d.text for d in deltas if isinstance(d, ThinkingDelta))
    text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    return thought == _THOUGHT and _THOUGHT not in text
