"""Turns a prompt into a chat template's variables: OpenAI's messages and tools, with marks.

Templates agree on OpenAI's messages only in outline. When a model is loaded,
`engine.text.formats.proof` finds the differences of its template. They are its `TemplateTraits`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest
from engine.protocol import (
    IMAGE_REFERENCE,
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.template.chat_template import (
    MarkAlphabet,
    SegmentMarks,
    TemplateInput,
    WrittenInput,
    choose_cut,
    mark_value,
    surround,
    write_json,
)
from engine.text.tokens.pieces import ControlTexts

_SEPARATOR = "\n\n"
"""The text between two texts of one message. It belongs to the later one."""
_TOOLS_HEADING = "## Tools\nYou have access to the following tools:\n"
_INPUT_KEY = "arguments"
"""The only key of the object that replaces an input that is no object."""
_MAX_DEPTH = 64
"""The most nested objects and lists in an input. Templates and this file walk them by recursion."""
_ERROR_PREFIX = "Error: "
"""The beginning of a failed call's result. Chat templates have no field for a failure."""
_SYSTEM_PREFIX = "System: "
"""The beginning of a system message that stands in the user's turn."""
SHORT_ID_LENGTH = 9
"""The length of the ids that Mistral's models write and their templates demand."""
_OURS = re.compile(r"toolu_[0-9a-zA-Z]{24}")
BASE62 = digits + ascii_letters
ThinkingKey = Literal["reasoning_content", "thinking", "reasoning", "tool_plan", "thought"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTexts:
    """How a model writes calls, as texts with places.

    The places are `{name}`, `{input}`, `{digits}`, `{id}` and `{more}`. The model chooses the
    number for `{digits}` and the nine letters or digits for `{id}`. `{more}` is an id as the last
    key of an object, or nothing.
    """

    # One call.
    call: str
    # The text before all calls.
    begin: str = ""
    # The text between calls.
    separator: str = ""
    # The text behind all calls.
    end: str = ""
    # The text between key and value, if the input is written as `key=value`. The values are then
    # Python's.
    assign: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """The differences of a template from OpenAI's messages."""

    # Gemma refuses a system prompt. It goes in front of the first user's message.
    folds_system: bool = False
    # Llama 3.1 refuses two calls in one message. Each call gets a message of its own.
    splits_calls: bool = False
    # Mistral refuses ids other than 9 letters and digits. Ids are shortened.
    shortens_ids: bool = False
    # Mistral refuses a user's text behind results. The text is added to the last result.
    joins_results: bool = False
    # Magistral takes thinking as a part of the content.
    thinks_in_content: bool = False
    # Mistral puts the tools before the last question. The tools get no boundary.
    moves_tools: bool = False
    # Most templates refuse a late system message, drop it or move it to the top. It is added to the
    # user's turn beside it, which keeps its place.
    folds_late_system: bool = False
    # DeepSeek takes the input as a string of JSON, not as an object.
    string_arguments: bool = False
    # The template writes an input that is no JSON object unchanged. A template that writes an input
    # key by key can't do that. It gets an object with the text in it.
    writes_text: bool = False
    # DeepSeek V3 drops calls beside any content. A turn without text has the content None.
    null_content: bool = False
    # GLM-4 takes a call as a message whose metadata is the call's name.
    names_in_metadata: bool = False
    # Kimi K2 reads a call's name only from an id of the form `functions.NAME:INDEX`.
    names_ids: bool = False
    # The turn's text is a message of its own, before the message of the calls.
    splits_text: bool = False
    # gpt-oss gives a result the name of the last call. Each result stands right behind its call.
    interleaves: bool = False
    # The field of a message that has the thinking.
    thinking_key: ThinkingKey = "reasoning_content"
    # gpt-oss refuses text beside thinking and calls. The text becomes a part of the thinking.
    merges_text: bool = False
    # Granite 3.3's template renders no calls. They are written into the content in this way. None:
    # the template renders calls.
    call_texts: CallTexts | None = None
    # DeepSeek's template renders calls but no tools. The tools then stand at the beginning of the
    # system prompt, followed by these instructions on how to write a call.
    call_instructions: str = ""

    def call_id(self, call_id: str) -> str:
        """The id that the template gets. Equal ids stay equal.

        An id of ours keeps its end, which is the id that the model wrote if it wrote one.
        """
        if not self.shortens_ids:
            return call_id
        if _OURS.fullmatch(call_id):
            return call_id[-SHORT_ID_LENGTH:]
        digest = blake2b(call_id.encode(), digest_size=SHORT_ID_LENGTH).digest()
        return "".join(BASE62[byte % len(BASE62)] for byte in digest)


@dataclass(kw_only=True)
class Conversation:
    """A prompt in which the texts of control tokens are cut."""

    prompt: Prompt
    # The character that cuts them.
    cut: str
    traits: TemplateTraits

    @cached_property
    def alphabet(self) -> MarkAlphabet:
        """The characters for marks of this prompt."""
        return MarkAlphabet(strings_of(self.prompt))

    def varied(self, segment: int) -> "Conversation":
        """The same conversation with a difference right behind one segment.

        A text grows by a mark, and an input grows by a key. The tools behind a tool are removed. If
        it is the last tool, another one is added.
        """
        mark = self.alphabet.take()
        prompt = self.prompt
        tools = list(prompt.tools)
        system = list(prompt.system)
        messages = [Message(message.role, list(message.parts)) for message in prompt.messages]
        if segment < len(tools):
            dummy = Tool(mark, {"type": "object", "properties": {}}, mark)
            is_last = segment == len(tools) - 1
            tools = [*tools, dummy] if is_last else tools[: segment + 1]
        else:
            segment -= len(tools)
            groups: list[list[Any]] = [system, *(message.parts for message in messages)]
            for parts in groups:
                if segment < len(parts):
                    part = parts[segment]
                    parts[segment] = _grown(part, mark)
                    break
                segment -= len(parts)
        varied = Prompt(messages, tools, system)
        return Conversation(prompt=varied, cut=self.cut, traits=self.traits)

    def variables(self, marks: Mapping[int, SegmentMarks], *, thinking: bool) -> TemplateInput:
        """The template's variables, with marks around the segments named in `marks`."""
        tools, messages = _Builder(self.prompt, marks, self.traits).build()
        return TemplateInput(
            messages=messages,
            tools=tools,
            # A prompt may end inside the assistant's turn. The model then continues that turn.
            add_generation_prompt=[m.role for m in self.prompt.messages[-1:]] != ["assistant"],
            thinking=thinking,
        )


def _grown(part: Part, mark: str) -> Part:
    """The part with the mark at its end."""
    if not isinstance(part, ToolUsePart):
        return msgspec.structs.replace(part, text=part.text.rstrip() + mark)
    if isinstance(part.input, str):
        return msgspec.structs.replace(part, input=part.input.rstrip() + mark)
    return msgspec.structs.replace(part, input={**part.input, mark: mark})


def new_conversation(
    prompt: Prompt,
    controls: ControlTexts,
    traits: TemplateTraits | None = None,
    *,
    completing: frozenset[str] = frozenset(),
    image_text: str = "",
) -> Conversation:
    """The prompt with a cut in every control token's text, so that no such text is a control token.

    The template's own text could complete a text of the prompt to a control token. If it is one of
    `completing`, that text is cut too. `image_text` replaces the reference of each image. If it is
    empty, references are text.
    """
    traits = traits or TemplateTraits()
    if not traits.writes_text:
        prompt = _with_objects(prompt)
    cut = choose_cut(strings_of(prompt))
    image_ids = {image.id for image in prompt.images} if image_text else set[str]()

    def clean(text: str) -> str:
        # Every other piece is the id of a reference.
        pieces = IMAGE_REFERENCE.split(text) if image_ids else [text]
        for place, piece in enumerate(pieces):
            if place % 2:
                pieces[place] = image_text if piece in image_ids else f"[image {piece}]"
                continue
            if completing:
                piece = controls.cut_completing(piece, cut, completing)
            pieces[place] = controls.cut(piece, cut)
        return "".join(pieces)

    cleaned = _mapped(prompt, clean)
    return Conversation(prompt=cleaned, cut=cut, traits=traits)


def _with_objects(prompt: Prompt) -> Prompt:
    """The prompt, in which an object replaces each call's input that is a text.

    It is done before control tokens' texts are cut, because such a text may be escaped in JSON.
    """
    if not any(
        isinstance(part, ToolUsePart) and isinstance(part.input, str)
        for message in prompt.messages
        for part in message.parts
    ):
        return prompt
    messages = []
    for message in prompt.messages:
        parts = [
            msgspec.structs.replace(part, input=_object_of(part.input))
            if isinstance(part, ToolUsePart) and isinstance(part.input, str)
            else part
            for part in message.parts
        ]
        messages.append(Message(message.role, parts))
    return msgspec.structs.replace(prompt, messages=messages)


def _object_of(text: str) -> dict[str, Any]:
    """The object that a text of JSON stands for, as Python reads it. Else an object with the text.

    Python also reads values that no client may send in an object: raw line ends, NaN, long
    integers.
    """
    with suppress(ValueError, RecursionError):
        value = json.loads(text, strict=False)
        if isinstance(value, dict) and _depth_of(value) <= _MAX_DEPTH:
            return value
    return {_INPUT_KEY: text}


def _depth_of(value: Any) -> int:
    """The number of nested objects and lists. It is not counted beyond _MAX_DEPTH + 1."""
    level = [value]
    depth = 0
    while level and depth <= _MAX_DEPTH:
        containers = [item for item in level if isinstance(item, dict | list)]
        depth += bool(containers)
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return depth


def _mapped(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """The prompt with every text changed. Ids are texts too, because some templates write them."""

    def mapped(value: Any) -> Any:
        # A `match` would take twice as long, and a prompt may have 100,000 texts.
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [mapped(inner) for inner in value]
        if isinstance(value, dict):
            return {change(key): mapped(inner) for key, inner in value.items()}
        if isinstance(value, Message):
            return Message(value.role, mapped(value.parts))
        if isinstance(value, msgspec.Struct):
            return type(value)(*(mapped(getattr(value, name)) for name in value.__struct_fields__))
        return value

    return Prompt(mapped(prompt.messages), mapped(prompt.tools), mapped(prompt.system))


def strings_of(prompt: Prompt) -> list[str]:
    """All texts of a prompt. They include the keys of its JSON."""
    texts: list[str] = []

    def add(text: str) -> str:
        texts.append(text)
        return text

    _mapped(prompt, add)
    return texts


class _Builder:
    """Walks a prompt in the order of its segments and writes the template's variables."""

    def __init__(
        self, prompt: Prompt, marks: Mapping[int, SegmentMarks], traits: TemplateTraits
    ) -> None:
        self._prompt = prompt
        self._marks = marks
        self._traits = traits
        self._segment = 0
        # For each of the client's ids: the id that the template gets, and the tool's name.
        self._calls: dict[str, tuple[str, str]] = {}

    def build(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The template's tools and messages."""
        traits = self._traits
        tools = [self._tool(tool) for tool in self._prompt.tools]
        system = _SEPARATOR.join(self._text(block.text) for block in self._prompt.system)
        messages: list[dict[str, Any]] = []
        folded: dict[str, Any] | None = None
        for message in self._prompt.messages:
            if message.role == "assistant":
                messages.extend(self._assistant_messages(message))
                continue
            built = self._messages(message)
            if is_folded(message, self._prompt, self._traits):
                # The text becomes a part of the user's turn before it, or a turn of its own.
                text = _SYSTEM_PREFIX + built[0]["content"]
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += _SEPARATOR + text
                else:
                    messages.append({"role": "user", "content": text})
                folded = messages[-1]
                continue
            # A user's text behind a folded message continues the same turn.
            if folded and messages[-1] is folded and built and built[0]["role"] == "user":
                folded["content"] += _SEPARATOR + built.pop(0)["content"]
            messages.extend(built)
        if traits.interleaves:
            messages = _interleaved(messages)
        if tools and traits.call_instructions:
            tool_lines = "\n".join(write_json(tool["function"]) for tool in tools)
            heading = _TOOLS_HEADING + tool_lines + _SEPARATOR + traits.call_instructions
            tools = []
            system = _SEPARATOR.join(filter(None, [heading, system]))
        if system and not self._traits.folds_system:
            messages.insert(0, {"role": "system", "content": system})
        elif system and messages and messages[0]["role"] == "user":
            messages[0]["content"] = system + _SEPARATOR + messages[0]["content"]
        elif system:
            messages.insert(0, {"role": "user", "content": system})
        return tools, messages

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
        declaration = {"type": "function", "function": function}
        marks = self._next_marks()
        if marks is None:
            return declaration
        # A template writes the whole tool, or its function, or its fields.
        marked = mark_value(_mark_fields(function, marks.inner), marks, function)
        whole: dict[str, Any] = mark_value({**declaration, "function": marked}, marks, declaration)
        return whole

    def _assistant_messages(self, message: Message) -> Iterator[dict[str, Any]]:
        """The messages of one turn of the assistant: one message, or several if the template needs
        that."""
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
        text = _SEPARATOR.join(texts)
        thought = _SEPARATOR.join(thoughts)
        traits = self._traits
        if calls and traits.call_texts is not None:
            text = text + _calls_as_text(calls, traits.call_texts)
            calls = []
        if calls and text and thought and traits.merges_text:
            thought = thought + _SEPARATOR + text
            text = ""
        if calls and text and (traits.splits_text or traits.names_in_metadata):
            yield self._assistant(text, thought)
            text = ""
            thought = ""
        if calls and traits.names_in_metadata:
            for function in (call["function"] for call in calls):
                arguments = write_json(function["arguments"])
                yield {"role": "assistant", "metadata": function["name"], "content": arguments}
            return
        built = self._assistant(text, thought)
        num_first = 1 if self._traits.splits_calls else len(calls)
        for begin in range(0, len(calls) or 1, num_first or 1):
            if calls:
                built["tool_calls"] = calls[begin : begin + num_first]
                if not built["content"] and traits.null_content:
                    built["content"] = None
            yield built
            built = self._assistant("", "")

    def _assistant(self, text: str, thought: str) -> dict[str, Any]:
        built: dict[str, Any] = {"role": "assistant", "content": text}
        if thought and self._traits.thinks_in_content:
            thinking = {"type": "thinking", "thinking": thought}
            built["content"] = [thinking, {"type": "text", "text": text}]
        elif thought:
            built[self._traits.thinking_key] = thought
        return built

    def _call(self, part: ToolUsePart) -> dict[str, Any]:
        name = part.name
        arguments: Any = part.input
        marks = self._next_marks()
        if isinstance(part.input, str):
            arguments = WrittenInput(part.input if marks is None else surround(part.input, marks))
        elif marks is not None and marks.inner:
            values = dict(part.input)
            # The last fields have the marks, because they show the end of a call.
            for key, pair in zip(reversed(part.input), marks.inner[1:], strict=False):
                values[key] = mark_value(part.input[key], pair)
            name = surround(name, marks.inner[0])
            arguments = mark_value(values, marks, part.input)
        elif marks is not None:
            arguments = mark_value(part.input, marks)
        if self._traits.string_arguments:
            arguments = write_json(arguments)
        call_id = self._traits.call_id(part.id)
        if self._traits.names_ids:
            call_id = f"functions.{part.name}:{len(self._calls)}"
        self._calls[part.id] = call_id, part.name
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _messages(self, message: Message) -> list[dict[str, Any]]:
        """The messages of a user's or system message: one for each run of text and tool result."""
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
                    text = self._text(part.text)
                    content = _ERROR_PREFIX + text if part.is_error else text
                    given_id = self._traits.call_id(part.tool_use_id)
                    call_id, name = self._calls.get(part.tool_use_id, (given_id, ""))
                    role = "observation" if self._traits.names_in_metadata else "tool"
                    header = {"role": role, "tool_call_id": call_id, "name": name}
                    built.append({**header, "content": content})
                case _:
                    raise InvalidRequest(f"`{type(part).__name__}` in a {message.role} message")
        if texts and built and self._traits.joins_results:
            built[-1]["content"] += _SEPARATOR + _SEPARATOR.join(texts)
        elif texts:
            built.append({"role": message.role, "content": _SEPARATOR.join(texts)})
        return built


def is_folded(message: Message, prompt: Prompt, traits: TemplateTraits) -> bool:
    """Whether this is a late system message that is added to the user's turn."""
    is_late = message.role == "system" and message is not prompt.messages[0]
    return is_late and traits.folds_late_system and bool(message.parts)


def _interleaved(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which each result follows the message of its call.

    Only results of messages with a single call are moved.
    """
    callers = {m["tool_calls"][0]["id"] for m in messages if len(m.get("tool_calls", ())) == 1}
    results: dict[str, dict[str, Any]] = {}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in callers:
            results.setdefault(message["tool_call_id"], message)
    moved = {id(message) for message in results.values()}
    ordered: list[dict[str, Any]] = []
    for message in messages:
        if id(message) in moved:
            continue
        ordered.append(message)
        answers = (results.pop(call["id"], None) for call in message.get("tool_calls", ()))
        ordered.extend(result for result in answers if result is not None)
    return ordered


def _calls_as_text(calls: list[dict[str, Any]], call_texts: CallTexts) -> str:
    """The calls as text, for a template that renders no calls."""
    before, _, behind = call_texts.call.partition("{input}")
    texts: list[str] = []
    for function in (call["function"] for call in calls):
        arguments = write_json(function["arguments"])
        if call_texts.assign and not isinstance(function["arguments"], str):
            arguments = ", ".join(
                f"{key}{call_texts.assign}{_python_literal(value)}"
                for key, value in function["arguments"].items()
            )
        texts.append(before.replace("{name}", function["name"]) + arguments + behind)
    return call_texts.begin + call_texts.separator.join(texts) + call_texts.end


def _python_literal(value: Any) -> str:
    """A value as Python. True, false and null are Python's words. Python reads the rest as JSON."""
    return repr(value) if value is None or isinstance(value, bool) else write_json(value)


def _mark_fields(function: dict[str, Any], pairs: Sequence[SegmentMarks]) -> dict[str, Any]:
    """A tool's function whose fields have marks of their own.

    The fields are name, description, parameters, and the description of the last parameter. Most
    templates write that description last.
    """
    if not pairs:
        return function
    marked = dict(function)
    for key, pair in zip(function, pairs, strict=False):
        marked[key] = mark_value(function[key], pair)
    parameters = function["parameters"]
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(properties, dict) and properties and len(pairs) > len(function):
        last = next(reversed(properties))
        described = properties[last]
        if isinstance(described, dict) and isinstance(described.get("description"), str):
            description = surround(described["description"], pairs[len(function)])
            inner = {**properties, last: {**described, "description": description}}
            around = pairs[len(function) - 1]
            marked["parameters"] = mark_value(
                {**parameters, "properties": inner}, around, parameters
            )
    return marked


MAX_COMPLETION = 2
"""The highest level of `with_complete_tools`."""
_DEFAULT_TYPE = "string"


def with_complete_tools(prompt: Prompt, completion: int) -> Prompt:
    """The prompt with its tools completed, for templates that fail on incomplete tools.

    Level 0 completes nothing. Level 1 completes the fields of a tool. Level 2 also completes the
    fields of each parameter. The templates of Hermes and gpt-oss need a description. Seed-OSS'
    template needs the properties. Hermes' template does not end on a parameter of several types.
    """
    if completion == 0:
        return prompt
    tools: list[Tool] = []
    for tool in prompt.tools:
        schema = {"type": "object", "properties": {}, **tool.input_schema}
        if not isinstance(schema["properties"], dict):
            schema["properties"] = {}
        if completion == MAX_COMPLETION:
            fields = {
                name: _with_one_type(property_schema)
                for name, property_schema in schema["properties"].items()
            }
            schema = {"required": [], **schema, "properties": fields}
        tools.append(Tool(tool.name, schema, tool.description or ""))
    return msgspec.structs.replace(prompt, tools=tools)


def _with_one_type(schema: Any) -> Any:
    """A schema with a description and one type. Of several types the first that is not null is
    taken."""
    if not isinstance(schema, dict):
        return {"type": _DEFAULT_TYPE, "description": ""}
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else declared
    names = [t for t in types if isinstance(t, str)] if isinstance(types, list) else []
    kind = next((t for t in names if t != "null" or t is declared), _DEFAULT_TYPE)
    whole = {"description": "", **schema, "type": kind}
    if isinstance(schema.get("items"), dict):
        whole["items"] = _with_one_type(schema["items"])
    if isinstance(schema.get("properties"), dict):
        inner = schema["properties"].items()
        whole["properties"] = {name: _with_one_type(value) for name, value in inner}
    return whole
