"""From a Responses request to an Ask: prompt, slots, demands.

Tools come first, then `instructions` and the system and developer messages at the beginning, then
everything else in order; later system messages stay where they are. The request's tools become
functions of the prompt: those in a namespace get its name in front, a custom tool has one string,
`input`, and what only the vendor runs is left out. Where two names would be equal, the later one
gets a number.

Reasoning comes back from a client in `encrypted_content`. Its text is signed with the workspace's
scope, so that only what this installation wrote for this workspace is read as the model's own.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from engine.protocol import TextPart, ThinkingPart, Tool, ToolChoice, ToolResultPart, ToolUsePart
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.request import CacheBreakpoint
from gateway.dialects.lowering import (
    NATIVE_LOOKBACK,
    NATIVE_TTL,
    Lowering,
    RequestContext,
    arguments_of,
    input_of,
    sampling_of,
    split_data_url,
    text_in,
    uncallable,
)
from gateway.dialects.openai.request import JsonObjectFormat, Refusal
from gateway.dialects.responses import request as wire
from gateway.dialects.responses.client_tools import arguments_in, described
from gateway.dialects.responses.response import INPUT, MAX_ECHO_BYTES, Origin, unechoed
from gateway.prompt.ask import Ask, Compared, name_of
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")
_PREFIX = "resp_"
_MAX_SAID = 200
_SEALED = "hf1."
_DIGEST_BYTES = 16
KindT = TypeVar("KindT", wire.AllowedTools, wire.NamedTool)
_SEPARATOR = "__"
_KINDS: dict[type, str] = {wire.FunctionTool: "function", wire.CustomTool: "custom"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """An Ask, its request, and the tools behind the functions of its prompt."""

    ask: Ask
    decoded: wire.Decoded
    origins: dict[str, Origin]


def prepare(decoded: wire.Decoded, context: RequestContext) -> Prepared:
    request = decoded.request
    notepad = decoded.notepad
    lowering = _ResponsesLowering(context, notepad)
    lowering.add_tools("tools", request.tools)
    for path, item in decoded.items():
        if isinstance(item, wire.AdditionalTools):
            lowering.add_tools(f"{path}.tools", item.tools)
    choice = _tool_choice(request, lowering)
    form = request.text.format if request.text else None
    schema = form.schema if isinstance(form, wire.JsonSchemaFormat) else None
    if isinstance(form, JsonObjectFormat):
        schema = {"type": "object"}
    if request.is_prewarm:  # nothing is generated
        choice = ToolChoice()
        schema = None
    lowering.lay_out(decoded)
    if not lowering.messages:
        raise InvalidRequest("input: must have at least one message")
    if lowering.messages[-1].role == "assistant":
        raise InvalidRequest(
            "input: must not end with an item of the assistant, which is not continued"
        )
    options = request.prompt_cache_options
    is_implicit = options is not None and options.mode == "implicit"
    policy = context.principal.auto_cache if options is None else None
    plan = lowering.plan(policy, NATIVE_TTL if is_implicit else None)
    if wire.LOGPROBS in request.include:
        notepad.wish("include", "this model tells no log probabilities", "logprobs")
    wire.FIELDS.note(request, notepad)
    if request.store and not context.keeps_responses:
        notepad.ignore("store", "this server keeps no responses")
    if request.reasoning is not None and request.reasoning.wants_summary:
        notepad.ignore("reasoning.summary", "thinking is given whole")
    for name in unechoed(decoded.fields):
        notepad.ignore(name, f"longer than {MAX_ECHO_BYTES} bytes: the answer does not repeat it")
    thinks = request.reasoning is not None and request.reasoning.effort not in (None, "none")
    # A response's id is its turn's, in OpenAI's form.
    previous = options.comparison_response_id if options else None
    ask = lowering.ask(
        "responses",
        plan,
        sampling_of(
            request,
            "responses",
            max_tokens=0 if request.is_prewarm else request.max_output_tokens,
            logprobs=request.top_logprobs if wire.LOGPROBS in request.include else None,
        ),
        "reasoning.effort" if thinks else None,
        tool_choice=choice,
        output_schema=schema,
        stream=request.stream,
        routing_key=request.prompt_cache_key,
        comparison=Compared(
            is_wanted=True,
            previous=None if previous is None else f"msg_{previous.removeprefix(_PREFIX)}",
        ),
        name=name_of(request.metadata),
    )
    return Prepared(ask, decoded, lowering.origins)


def _tool_choice(request: wire.ResponsesRequest, lowering: "_ResponsesLowering") -> ToolChoice:
    choice = request.tool_choice
    parallel = request.parallel_tool_calls
    if choice == "required":
        if not lowering.functions and request.tools:
            raise uncallable("tool_choice")
        if not lowering.functions:
            raise InvalidRequest("tool_choice: 'required' is only allowed with tools")
        return ToolChoice("any", parallel=parallel)
    if not isinstance(choice, dict):
        return ToolChoice(choice, parallel=parallel)
    if choice.get("type") != "allowed_tools":
        wanted = _converted(choice, wire.NamedTool)
        found = lowering.find(wanted)
        if not found:
            tool_name = (wanted.name or wanted.type)[:64]
            raise InvalidRequest(f"tool_choice: '{tool_name}' is not in tools", "tool_choice")
        return ToolChoice("tool", found[0], parallel=parallel)
    allowed = _converted(choice, wire.AllowedTools)
    names = {name for tool in allowed.tools for name in lowering.find(tool)}
    if allowed.mode == "required":
        if not names:
            raise uncallable("tool_choice")
        return ToolChoice("any", parallel=parallel, names=sorted(names))
    functions = [function.name for _, function in lowering.functions]
    return lowering.allow("tool_choice", names, functions, parallel=parallel)


def _converted(choice: dict[str, Any], kind: type[KindT]) -> KindT:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        said = str(error)[:_MAX_SAID].replace("`", "'")
        raise InvalidRequest(f"tool_choice: {said}", "tool_choice") from None


def _joined(namespace: str, name: str) -> str:
    """The namespace's name in front, unless the name has it there."""
    if name.startswith(namespace):
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class _ResponsesLowering(Lowering):
    """`functions` are all functions of the prompt, each with its path, `origins` their tools."""

    lookback = NATIVE_LOOKBACK

    def __init__(self, context: RequestContext, notepad: Notepad) -> None:
        super().__init__(context)
        self.notepad = notepad
        self.functions: list[tuple[str, Tool]] = []
        self.origins: dict[str, Origin] = {}
        self._names: dict[Origin, str] = {}
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def add_tools(self, path: str, tools: Sequence[wire.Tool]) -> None:
        """Raise InvalidRequest for a name that is empty or there twice, and for schemas that can't
        be sent to an engine."""
        listed: list[tuple[str, wire.OwnTool, wire.NamespaceTool | None]] = []
        for index, entry in enumerate(tools):
            where = f"{path}[{index}]"
            if isinstance(entry, wire.OwnTool):
                listed.append((where, entry, None))
            elif isinstance(entry, wire.NamespaceTool):
                listed += [
                    (f"{where}.tools[{n}]", tool, entry) for n, tool in enumerate(entry.tools)
                ]
        # Functions without a namespace keep their names, whatever comes before them.
        names: dict[str, str] = {}
        for is_own in (True, False):
            for where, tool, namespace in listed:
                if is_own == (namespace is None and not isinstance(tool, wire.ClientTool)):
                    names[where] = self._reserve(where, tool, namespace)
        for where, tool, namespace in listed:
            self.functions.append((where, self._function(where, names[where], tool, namespace)))

    def find(self, wanted: wire.NamedTool) -> list[str]:
        """The prompt's names of the functions that a choice names, in the order of the tools."""
        name = wanted.name or wanted.type
        namespace = wanted.namespace
        return [
            function_name
            for function_name in self._by_name.get((name, wanted.type), ())
            if namespace is None or self.origins[function_name][:2] == (name, namespace)
        ]

    def _reserve(self, path: str, tool: wire.OwnTool, namespace: wire.NamespaceTool | None) -> str:
        if not tool.name:
            raise InvalidRequest(f"{path}.name: must not be empty", f"{path}.name")
        kind = _KINDS.get(type(tool), tool.name)
        origin = Origin(tool.name, namespace.name if namespace else None, kind)
        joined = _joined(namespace.name, tool.name) if namespace else tool.name
        is_free = namespace is not None or isinstance(tool, wire.ClientTool)
        if origin in self._names or (not is_free and joined in self.origins):
            raise InvalidRequest(f"{path}.name: tool names must be unique", f"{path}.name")
        first = joined
        number = 1
        while joined in self.origins:
            number += 1
            joined = f"{first}_{number}"
        for name in {origin.name, joined}:
            self._by_name.setdefault((name, kind), []).append(joined)
        self.origins[joined] = origin
        self._names[origin] = joined
        return joined

    def _function(
        self, path: str, name: str, tool: wire.OwnTool, namespace: wire.NamespaceTool | None
    ) -> Tool:
        if tool.defer_loading:
            self.notepad.ignore(f"{path}.defer_loading", "this server searches no tools")
        if tool.allowed_callers and "direct" not in tool.allowed_callers:
            self.notepad.ignore(f"{path}.allowed_callers", "the model calls all tools itself")
        description = tool.description
        if namespace is not None and namespace.description and namespace.tools[0] is tool:
            description = "\n\n".join(filter(None, (namespace.description, description)))
        if isinstance(tool, wire.FunctionTool):
            return self.tool(path, name, tool.parameters, description, strict=tool.strict)
        if isinstance(tool, wire.ClientTool):
            about, schema = described(tool.name)
            return Tool(name, schema, about)
        what: dict[str, Any] = {"type": "string"}
        if isinstance(tool, wire.CustomTool) and isinstance(tool.format, wire.GrammarInput):
            self.notepad.ignore(f"{path}.format", "the model is told the grammar, not held to it")
            what["description"] = (
                f"Text of this {tool.format.syntax} grammar:\n{tool.format.definition}"
            )
        schema = {"type": "object", "properties": {INPUT: what}, "required": [INPUT]}
        return Tool(name, schema, description)

    def lay_out(self, decoded: wire.Decoded) -> None:
        """Raise InvalidRequest for content that no engine could be sent."""
        request = decoded.request
        for path, tool in self.functions:
            self.mark(path)
            self.tools.append(tool)
        if request.instructions:
            self.system.append(self._text("instructions", request.instructions))
        if isinstance(request.input, str):
            self.add("user", [self._text("input", request.input)])
            return
        # Each output answers a call before it, and each call has its output.
        pending: dict[str, int] = {}
        for item in request.input:
            match item:
                case wire.FunctionCall() | wire.CustomToolCall() | wire.ClientCall():
                    pending[item.call_id] = pending.get(item.call_id, 0) + 1
                case wire.CustomToolCallOutput() | wire.ClientCallOutput():
                    if not pending.get(item.call_id):
                        raise InvalidRequest(
                            f"No tool call found for function call output with call_id"
                            f" {item.call_id[:64]}.",
                            "input",
                        )
                    pending[item.call_id] -= 1
        missing = [call_id for call_id, count in pending.items() if count]
        if missing:
            raise InvalidRequest(
                f"No tool output found for function call {missing[0][:64]}.", "input"
            )
        for path, item in decoded.items():
            match item:
                case wire.Message(role=role, content=content):
                    where = f"{path}.content"
                    if isinstance(content, str):
                        parts = [self._text(where, content)]
                    else:
                        parts = [
                            self._part(f"{where}[{n}]", part) for n, part in enumerate(content)
                        ]
                    if role in ("system", "developer"):
                        self.add_told(parts)
                    else:
                        self.add("assistant" if role == "assistant" else "user", parts)
                case wire.Reasoning():
                    # The thought that we wrote, or one in words.
                    texts = (part.text for part in item.content or item.summary or [])
                    thought: str | None = "\n\n".join(texts)
                    if item.encrypted_content is not None:
                        thought = unseal(item.encrypted_content, self.asked.principal.scope)
                    if thought is None:
                        self.notepad.ignore(path, "reasoning that another server encrypted")
                    elif thought:
                        self.mark(path, can_carry=False)
                        self.add("assistant", [ThinkingPart(thought)])
                case wire.FunctionCall():
                    origin = Origin(item.name, item.namespace, "function")
                    self._add_call(path, item.call_id, origin, arguments_of(item.arguments))
                case wire.CustomToolCall():
                    origin = Origin(item.name, item.namespace, "custom")
                    self._add_call(path, item.call_id, origin, {INPUT: item.input})
                case wire.ClientCall(kind=kind, input=asked):
                    origin = Origin(kind, None, kind)
                    action = input_of(arguments_in(kind, asked))
                    self._add_call(path, item.call_id, origin, action)
                case wire.CustomToolCallOutput(output=output):
                    self._add_output(path, item.call_id, output)
                case wire.ClientCallOutput(text=text):
                    self._add_output(path, item.call_id, text)
                case wire.ItemReference():
                    why = "item references lead to nothing that is kept: send the item"
                    raise InvalidRequest(f"{path}: {why}", path)

    def _add_call(
        self, path: str, call_id: str, origin: Origin, arguments: dict[str, Any] | str
    ) -> None:
        """The tool may be one of the prompt no longer."""
        name = origin.name
        namespace = origin.namespace
        function_name = name if namespace is None else _joined(namespace, name)
        self.mark(path)
        self.add(
            "assistant", [ToolUsePart(call_id, self._names.get(origin, function_name), arguments)]
        )

    def _part(self, path: str, part: wire.Part) -> TextPart:
        match part:
            case wire.InputImage() | wire.InputFile():
                return self._text(path, self._shown(path, part), part.prompt_cache_breakpoint)
            case Refusal():
                return self._text(path, part.refusal)
            case wire.InputText():
                return self._text(path, part.text, part.prompt_cache_breakpoint)
            case wire.OutputText():
                return self._text(path, part.text)

    def _text(self, path: str, text: str, marker: CacheBreakpoint | None = None) -> TextPart:
        if marker is not None and not text:
            raise InvalidRequest(f"{path}: a breakpoint cannot be set for empty text")
        self.mark(path, native=marker)
        return TextPart(text)

    def _add_output(self, path: str, call_id: str, output: str | list[wire.InputPart]) -> None:
        """The parts make one segment, which ends where the last one does."""
        text = output if isinstance(output, str) else ""
        if not isinstance(output, str):
            texts: list[str] = []
            for number, part in enumerate(output):
                where = f"{path}.output[{number}]"
                marker = part.prompt_cache_breakpoint
                if isinstance(part, wire.InputText):
                    texts.append(part.text)
                else:
                    texts.append(self._shown(where, part))
                if marker is not None and number < len(output) - 1:
                    raise InvalidRequest(f"{where}: only the last part of an output may be marked")
                if marker is not None:
                    self.mark_native(where, marker)
            text = "\n".join(texts)
        self.mark(path)
        self.add("user", [ToolResultPart(call_id, text)])

    def _shown(self, path: str, part: wire.InputImage | wire.InputFile) -> str:
        """The text of a text file; what stands in for any other file."""
        if isinstance(part, wire.InputImage):
            media_type, data = split_data_url(part.image_url or "")
            name = "" if data else part.image_url or part.file_id or ""
            return self.stand_in(path, Media("image", media_type, data, name, part.detail))
        media_type, data = split_data_url(part.file_data or "")
        name = part.filename or part.file_url or part.file_id or ""
        text = text_in(data) if media_type.startswith(_TEXT_TYPES) else None
        if text is not None:
            return f"{name}\n{text}" if name else text
        kind: Kind = "document" if part.file_data else "file"
        return self.stand_in(path, Media(kind, media_type, data, name))


def seal(thought: str, scope: str) -> str:
    text = thought.encode()
    return _SEALED + urlsafe_b64encode(_digest(text, scope) + text).decode()


def unseal(sealed: str, scope: str) -> str | None:
    """The thought, or None where somebody else wrote it."""
    if not sealed.startswith(_SEALED):
        return None
    try:
        whole = b64decode(sealed[len(_SEALED) :].encode(), altchars=b"-_", validate=True)
    except ValueError:
        return None
    digest = whole[:_DIGEST_BYTES]
    text = whole[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(text, scope)):
        return None
    return text.decode()


def _digest(text: bytes, scope: str) -> bytes:
    return blake2b(
        text, digest_size=_DIGEST_BYTES, key=scope.encode()[:64], person=b"thought"
    ).digest()
