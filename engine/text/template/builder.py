"""A prompt's tools and messages as chat templates take them: OpenAI's, marked where wanted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.protocol import (
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.template.chat_template import TemplateInput, write_json
from engine.text.template.marks import MarkedDict, SegmentMarks, mark_value, surround
from engine.text.template.replay import interleaved
from engine.text.template.sandbox import GivenList
from engine.text.template.traits import TemplateTraits

_SEPARATOR = "\n\n"
"""Between the texts that make up one message; it belongs to the later one."""
_TOOLS_HEADING = "## Tools\nYou have access to the following tools:\n"
_ERROR_PREFIX = "Error: "
"""How a tool result says that the call failed: chat templates have no field for it."""

_SYSTEM_PREFIX = "System: "
"""How a system message begins that is told in the user's turn."""


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call by the client's id: the id that the template gets, and the tool's name."""

    part_id: str
    given_id: str
    name: str


@dataclass(frozen=True, slots=True)
class BuiltMessage:
    """What one message of a prompt is to the template. Nobody changes it: prompts share it."""

    given: Sequence[dict[str, Any]]
    calls: Sequence[KnownCall] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """What the template gets, and the messages that a prompt which begins alike can use again."""

    given: TemplateInput
    messages: Sequence[BuiltMessage]


class MessageBuilder:
    """Walks a prompt in the order of its segments and writes the template's variables."""

    def __init__(
        self,
        prompt: Prompt,
        marks: Mapping[int, SegmentMarks],
        traits: TemplateTraits,
        calls: Sequence[KnownCall] = (),
    ) -> None:
        self._prompt = prompt
        self._marks = marks
        self._traits = traits
        self._segment = 0
        self._tool_names: dict[str, str] = {}
        self._call_ids: dict[str, str] = {}
        self._know(calls)
        self._new_calls: list[KnownCall] = []

    def build(
        self,
        *,
        thinking: bool,
        add_generation_prompt: bool,
        known: Sequence[BuiltMessage] = (),
    ) -> Built:
        """`known`: what the first messages are, built without marks; there are no marks then."""
        tools = [self._tool(tool) for tool in self._prompt.tools]
        system = _SEPARATOR.join(self._text(block.text) for block in self._prompt.system)
        messages: list[dict[str, Any]] = []
        for built in known:
            messages.extend(built.given)
            self._know(built.calls)
        reusable = self._add_messages(messages, self._prompt.messages[len(known) :])
        if self._traits.replay.interleaves:
            messages = interleaved(messages)
        if tools and self._traits.replay.told:
            tools, system = [], _SEPARATOR.join(filter(None, [self._told(tools), system]))
        if system:
            self._put_first(system, messages)
        given = TemplateInput(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
        )
        return Built(given, [*known, *reusable])

    def _know(self, calls: Sequence[KnownCall]) -> None:
        for call in calls:
            self._call_ids[call.part_id] = call.given_id
            self._tool_names[call.part_id] = call.name

    def _add_messages(
        self, messages: list[dict[str, Any]], added: Sequence[Message]
    ) -> list[BuiltMessage]:
        """Returns those before the first that is folded: folding changes what is beside it."""
        reusable: list[BuiltMessage] = []
        has_folded = False
        folded: dict[str, Any] | None = None
        for message in added:
            begin, self._new_calls = len(messages), []
            if message.role == "assistant":
                messages.extend(self._assistant_messages(message))
            elif is_folded(message, self._prompt, self._traits):
                folded = self._fold(message, messages)
            else:
                built = self._messages(message)
                if folded is not None and messages[-1] is folded and built[0]["role"] == "user":
                    folded["content"] += _SEPARATOR + built.pop(0)["content"]
                messages.extend(built)
            has_folded = has_folded or folded is not None
            if not has_folded:
                reusable.append(BuiltMessage(messages[begin:], self._new_calls))
        return reusable

    def _fold(self, message: Message, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """A system message as part of the user's turn before it, or of one of its own.

        The user's text behind it, if there is any, goes on in the same turn.
        """
        [built] = self._messages(message)
        text = _SYSTEM_PREFIX + built["content"]
        if messages and messages[-1]["role"] == "user":
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _SEPARATOR + text}
        else:
            messages.append({"role": "user", "content": text})
        return messages[-1]

    def _next_marks(self) -> SegmentMarks | None:
        marks = self._marks.get(self._segment)
        self._segment += 1
        return marks

    def _text(self, text: str) -> str:
        marks = self._next_marks()
        return text if marks is None else surround(text, marks)

    def _tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        written = {"type": "function", "function": function}
        marks = self._next_marks()
        if marks is None:
            return written
        # Templates write out the whole tool, or its function, or its fields.
        marked = MarkedDict(_mark_fields(function, marks.inner), marks, function)
        return MarkedDict({"type": "function", "function": marked}, marks, written)

    def _told(self, tools: list[dict[str, Any]]) -> str:
        """The tools as a text, for a template that renders none."""
        return (
            _TOOLS_HEADING
            + "\n".join(write_json(tool["function"]) for tool in tools)
            + _SEPARATOR
            + self._traits.replay.told
        )

    def _put_first(self, system: str, messages: list[dict[str, Any]]) -> None:
        if not self._traits.folds_system:
            messages.insert(0, {"role": "system", "content": system})
        elif messages and messages[0]["role"] == "user":
            messages[0] = {**messages[0], "content": system + _SEPARATOR + messages[0]["content"]}
        else:
            messages.insert(0, {"role": "user", "content": system})

    def _assistant_messages(self, message: Message) -> Iterator[dict[str, Any]]:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case TextPart():
                    texts.append(self._text(part.text))
                case ThinkingPart():
                    thoughts.append(self._text(part.text))
                case ToolUsePart():
                    calls.append(self._call(part))
                case ToolResultPart():
                    raise InvalidRequest("a tool result in an assistant's message")
        yield from self._turn(_SEPARATOR.join(texts), _SEPARATOR.join(thoughts), calls)

    def _turn(
        self, text: str, thought: str, calls: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """The messages of one turn of the assistant: one, but for what a template can't take."""
        replay = self._traits.replay
        if calls and replay.written is not None:
            text, calls = text + self._written(calls), []
        if calls and text and thought and replay.merges_text:
            text, thought = "", thought + _SEPARATOR + text
        if calls and text and replay.splits_text:
            yield self._assistant(text, thought)
            text = thought = ""
        built = self._assistant(text, thought)
        num_first = 1 if self._traits.splits_calls else len(calls)
        for begin in range(0, len(calls) or 1, num_first or 1):
            if calls:
                built["tool_calls"] = GivenList(calls[begin : begin + num_first])
                if not built["content"] and replay.null_content:
                    built["content"] = None
            yield built
            built = self._assistant("", "")

    def _assistant(self, text: str, thought: str) -> dict[str, Any]:
        built: dict[str, Any] = {"role": "assistant", "content": text}
        if thought and self._traits.thinks_in_content:
            thinking = {"type": "thinking", "thinking": thought}
            built["content"] = GivenList([thinking, {"type": "text", "text": text}])
        elif thought:
            built[self._traits.replay.thinking_key] = thought
        return built

    def _call(self, part: ToolUsePart) -> dict[str, Any]:
        name, marked = _mark_call(part, self._next_marks())
        arguments: Any = marked
        replay = self._traits.replay
        if replay.string_arguments:
            arguments = write_json(arguments)
        call_id = self._traits.call_id(part.id)
        if replay.names_ids:
            call_id = f"functions.{part.name}:{len(self._call_ids)}"
        call = KnownCall(part.id, call_id, part.name)
        self._know([call])
        self._new_calls.append(call)
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _written(self, calls: list[dict[str, Any]]) -> str:
        """The calls as text, for a template that renders none."""
        written = self._traits.replay.written
        assert written is not None
        texts = [
            written.before.replace("{name}", call["function"]["name"])
            + write_json(call["function"]["arguments"])
            + written.behind
            for call in calls
        ]
        return written.begin + written.separator.join(texts) + written.end

    def _messages(self, message: Message) -> list[dict[str, Any]]:
        """A user's or a system message: runs of text, and a message for each tool result."""
        built: list[dict[str, Any]] = []
        texts: list[str] = []
        for part in message.parts:
            match part:
                case TextPart():
                    texts.append(self._text(part.text))
                case ToolResultPart():
                    if texts:
                        built.append({"role": message.role, "content": _SEPARATOR.join(texts)})
                        texts = []
                    built.append(self._tool_result(part))
                case _:
                    raise InvalidRequest(f"`{type(part).__name__}` in a {message.role} message")
        if texts and built and self._traits.joins_results:
            built[-1]["content"] += _SEPARATOR + _SEPARATOR.join(texts)
        elif texts:
            built.append({"role": message.role, "content": _SEPARATOR.join(texts)})
        return built

    def _tool_result(self, part: ToolResultPart) -> dict[str, Any]:
        text = self._text(part.text)
        return {
            "role": "tool",
            "tool_call_id": self._call_ids.get(
                part.tool_use_id, self._traits.call_id(part.tool_use_id)
            ),
            "name": self._tool_names.get(part.tool_use_id, ""),
            "content": _ERROR_PREFIX + text if part.is_error else text,
        }


def is_folded(message: Message, prompt: Prompt, traits: TemplateTraits) -> bool:
    """Is this a system message within the conversation that the template can't take there?"""
    is_late = message.role == "system" and message is not prompt.messages[0]
    return is_late and traits.folds_late_system and bool(message.parts)


def _mark_call(part: ToolUsePart, marks: SegmentMarks | None) -> tuple[str, dict[str, Any]]:
    """A call's name and input with marks: around the input, and for its fields the inner ones."""
    if marks is None:
        return part.name, part.input
    if not marks.inner:
        return part.name, MarkedDict(part.input, marks, part.input)
    values = dict(part.input)
    # The last fields are those that tell where a call ends.
    for key, pair in zip(reversed(part.input), marks.inner[1:], strict=False):
        values[key] = mark_value(part.input[key], pair)
    return surround(part.name, marks.inner[0]), MarkedDict(values, marks, part.input)


def _mark_fields(function: dict[str, Any], pairs: Sequence[SegmentMarks]) -> dict[str, Any]:
    """A tool's function whose fields have marks of their own: name, description, parameters, and
    the description of the last parameter, which is the last that most templates write."""
    if not pairs:
        return function
    marked = dict(function)
    fields = [key for key in ("name", "description", "parameters") if key in function]
    for key, pair in zip(fields, pairs, strict=False):
        marked[key] = mark_value(function[key], pair)
    parameters = function["parameters"]
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(properties, dict) and properties and len(pairs) > len(fields):
        last = next(reversed(properties))
        field = properties[last]
        if isinstance(field, dict) and isinstance(field.get("description"), str):
            told = surround(field["description"], pairs[len(fields)])
            marked_properties = {**properties, last: {**field, "description": told}}
            inner = {**parameters, "properties": marked_properties}
            marked["parameters"] = MarkedDict(inner, pairs[fields.index("parameters")], parameters)
    return marked
