"""From a prompt to what a chat template sees: OpenAI-style messages, marked where wanted."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.template.builder import Built, BuiltMessage, KnownCall, MessageBuilder
from engine.text.template.chat_template import TemplateInput
from engine.text.template.marks import (
    MarkAlphabet,
    SegmentMarks,
    choose_cut,
    map_strings,
    strings_in,
)
from engine.text.template.traits import TemplateTraits
from engine.text.template.variants import vary
from engine.text.tokens.controls import ControlTexts


@dataclass(kw_only=True)
class Conversation:
    """A prompt whose control tokens' texts are cut; `cut` is the character that was put in.

    `known`: what the first messages were to the template in another render. `calls`: those of
    messages that stood before the prompt's, where it is a part of another.
    """

    prompt: Prompt
    cut: str
    traits: TemplateTraits
    known: Sequence[BuiltMessage] = ()
    calls: Sequence[KnownCall] = ()

    @cached_property
    def alphabet(self) -> MarkAlphabet:
        return MarkAlphabet(strings_of(self.prompt))

    def with_built(self, known: Sequence[BuiltMessage]) -> "Conversation":
        return replace(self, known=known)

    @property
    def is_continued(self) -> bool:
        """The prompt ends inside the assistant's turn, which the model goes on with."""
        messages = self.prompt.messages
        return bool(messages) and messages[-1].role == "assistant"

    def varied(self, segment: int) -> "Conversation":
        """The same but for what comes right after one segment, for comparing renders."""
        varied = vary(self.prompt, segment, self.alphabet.take())
        return Conversation(prompt=varied, cut=self.cut, traits=self.traits, calls=self.calls)

    def variables(self, marks: Mapping[int, SegmentMarks], *, thinking: bool) -> TemplateInput:
        """The template's variables, with marks around the segments named in `marks`."""
        return self._build(marks, (), thinking=thinking).given

    def build(self, *, thinking: bool) -> Built:
        """The template's variables without marks; `known` is not built again."""
        return self._build({}, self.known, thinking=thinking)

    def _build(
        self, marks: Mapping[int, SegmentMarks], known: Sequence[BuiltMessage], *, thinking: bool
    ) -> Built:
        builder = MessageBuilder(self.prompt, marks, self.traits, self.calls)
        return builder.build(
            thinking=thinking, add_generation_prompt=not self.is_continued, known=known
        )


def new_conversation(
    prompt: Prompt,
    controls: ControlTexts | None,
    traits: TemplateTraits | None = None,
    *,
    completing: Collection[str] = (),
    calls: Sequence[KnownCall] = (),
) -> Conversation:
    """With cuts also where the template's text could complete one of the controls `completing`."""
    cut = choose_cut(strings_of(prompt))
    clean = _Cleaner(controls, cut, completing)
    cleaned = Prompt(
        messages=[clean.message(message) for message in prompt.messages],
        tools=[clean.tool(tool) for tool in prompt.tools],
        system=[TextPart(clean.text(part.text)) for part in prompt.system],
    )
    return Conversation(prompt=cleaned, cut=cut, traits=traits or TemplateTraits(), calls=calls)


def continued_conversation(
    begun: Conversation,
    messages: Sequence[Message],
    num_known: int,
    controls: ControlTexts,
) -> Conversation | None:
    """A conversation whose tools, system prompt and first `num_known` messages are cleaned already.

    None where the other messages have the character of its cuts.
    """
    added = messages[num_known:]
    if any(begun.cut in text for message in added for text in message_strings(message)):
        return None
    clean = _Cleaner(controls, begun.cut)
    known = begun.prompt.messages[:num_known]
    return Conversation(
        prompt=Prompt(
            [*known, *(clean.message(message) for message in added)],
            begun.prompt.tools,
            begun.prompt.system,
        ),
        cut=begun.cut,
        traits=begun.traits,
        known=begun.known[:num_known],
    )


class _Cleaner:
    """Puts the cut into every control token's text, and where one of `completing` could begin."""

    def __init__(
        self, controls: ControlTexts | None, cut: str, completing: Collection[str] = ()
    ) -> None:
        self._controls = controls
        self._cut = cut
        self._completing = completing

    def text(self, text: str) -> str:
        if self._controls is None:
            return text
        if self._completing:
            text = self._controls.cut_completing(text, self._cut, self._completing)
        return self._controls.cut(text, self._cut)

    def tool(self, tool: Tool) -> Tool:
        told = None if tool.description is None else self.text(tool.description)
        return Tool(self.text(tool.name), map_strings(tool.input_schema, self.text), told)

    def message(self, message: Message) -> Message:
        return Message(message.role, [self._part(part) for part in message.parts])

    def _part(self, part: Part) -> Part:
        text = self.text
        match part:
            case TextPart():
                return TextPart(text(part.text))
            case ThinkingPart():
                return ThinkingPart(text(part.text))
            case ToolUsePart():
                # Some templates write ids out, so they are cleaned like any text.
                return ToolUsePart(text(part.id), text(part.name), map_strings(part.input, text))
            case ToolResultPart():
                return ToolResultPart(text(part.tool_use_id), text(part.text), part.is_error)


def completed_by(texts: Iterable[str], controls: ControlTexts) -> frozenset[str]:
    """The control tokens' texts that the template's text could complete around one of these."""
    return frozenset(control for text in texts for control in controls.completed_by(text))


def strings_of(prompt: Prompt) -> Iterator[str]:
    """Every text of a prompt."""
    yield from head_strings(prompt)
    for message in prompt.messages:
        yield from message_strings(message)


def head_strings(prompt: Prompt) -> Iterator[str]:
    """Every text of the tools and of the system prompt."""
    for tool in prompt.tools:
        yield from (tool.name, tool.description or "")
        yield from strings_in(tool.input_schema)
    for block in prompt.system:
        yield block.text


def message_strings(message: Message) -> Iterator[str]:
    """Every text of a message."""
    for part in message.parts:
        if isinstance(part, ToolUsePart):
            yield from (part.id, part.name)
            yield from strings_in(part.input)
        else:
            yield part.text
            if isinstance(part, ToolResultPart):
                yield part.tool_use_id
