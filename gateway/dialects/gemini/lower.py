"""From a request of Google's API to an Ask: prompt, slots, demands.

Functions come first, then the system instruction, then the contents in order. Each part is one
segment. The prompt of a cached content stands before what the request adds. Its end has the marker.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.protocol import (
    Breakpoint,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolChoice,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini import request as wire
from gateway.dialects.lowering import (
    HOSTED,
    Lowering,
    RequestContext,
    input_of,
    sampling_of,
    text_in,
    uncallable,
)
from gateway.prompt.ask import Ask, camel, name_of
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media
from gateway.prompt.plan import Plan, find_target

_TEXT_TYPES = ("", "text/plain")
_JSON_TYPE = "application/json"
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_ROLES: dict[str | None, Role] = {
    None: "user",
    "": "user",
    "user": "user",
    "function": "user",
    "tool": "user",
    "model": "assistant",
}
_READ_TYPES = ("text/", "application/json", "application/xml", "application/x-ndjson")
_KINDS: dict[str, Kind] = {"image": "image", "audio": "audio", "video": "video"}
_MAX_PATH = 256
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class HeldContent:
    """The cached content that a request continues."""

    prompted: wire.Prompted
    # The TTL class of its lease.
    ttl: Ttl
    # The rest of its lifetime.
    seconds: float


def ask_of(
    request: wire.GenerateRequest,
    context: RequestContext,
    *,
    stream: bool,
    held: HeldContent | None = None,
    is_count: bool = False,
) -> Ask:
    """The Ask of a request. Raise InvalidRequest for content that no engine takes.

    The prompt of the cached content `held` stands first, and its end is marked. Without one the
    key's policy marks the prompt. With `is_count` the request may be any part of a conversation.
    """
    left_out = request.left_out if isinstance(request, wire.ReducedGenerateRequest) else []
    lowering = GeminiLowering(context, left_out, is_count=is_count)
    config = request.generation_config
    notepad = lowering.notepad
    thoughts = config.thinking_config
    _check(request, held, is_count=is_count)
    wire.FIELDS.note(request, notepad)
    choice = tool_choice_of(request if held is None else held.prompted, notepad)
    if held is not None:
        lowering.add_held(held, "cachedContent.")
    lowering.add_prompted(request, "")
    lowering.check_answered()
    plan = lowering.plan_behind(held, request.cache_salt)
    if config.top_k:
        reason = "the model's server does not take it"
        notepad.wish("generationConfig.topK", reason, "own_template")
    logprobs = config.logprobs or 0 if config.response_logprobs else None
    return lowering.ask(
        "gemini",
        plan,
        sampling_of(config, "gemini", logprobs=logprobs),
        _thinks_by(thoughts, notepad),
        tool_choice=choice,
        output_schema=_output_schema(config),
        omit_thinking=not (thoughts and thoughts.include_thoughts),
        stream=stream,
        name=name_of(request.labels),
    )


def _check(request: wire.GenerateRequest, held: HeldContent | None, *, is_count: bool) -> None:
    """Raise InvalidRequest for fields that exclude each other, or that no engine can carry out."""
    config = request.generation_config
    if not request.contents:
        raise InvalidRequest("contents: contents are required")
    if request.contents[-1].role == "model" and not is_count:
        raise InvalidRequest("contents: the last content must be of role 'user'")
    field = request.system_instruction or request.tools or request.tool_config
    if request.cached_content is not None and field:
        raise InvalidRequest(
            "cachedContent: excludes systemInstruction, tools and toolConfig: they belong to the"
            " cached content"
        )
    if held is not None and request.cache_salt is not None:
        raise InvalidRequest("cacheSalt: excludes cachedContent, which was written without it")
    for name in wire.REFUSED:
        if getattr(config, name) is not None:
            raise InvalidRequest(
                f"generationConfig.{camel(name)}: this value is not supported by this server"
            )
    if any(modality.upper() != "TEXT" for modality in config.response_modalities):
        raise InvalidRequest("generationConfig.responseModalities: only TEXT is supported")
    if not all(config.stop_sequences):
        raise InvalidRequest("generationConfig.stopSequences: must not contain an empty string")
    if config.max_output_tokens == 0 and config.candidate_count > 1:
        raise InvalidRequest("generationConfig.candidateCount: must be 1 without output tokens")
    if config.logprobs and not config.response_logprobs:
        raise InvalidRequest("generationConfig.logprobs: only allowed with responseLogprobs")


def _thinks_by(thinking: wire.ThinkingConfig | None, notepad: Notepad) -> str | None:
    """The path of the field that asks for thinking; None without one. A budget of 0 asks for no
    thinking, and any other setting asks for it."""
    if thinking is None or thinking.thinking_budget == 0:
        return None
    path = "generationConfig.thinkingConfig"
    budget = thinking.thinking_budget
    if not (thinking.include_thoughts or budget is not None or thinking.thinking_level):
        return None
    if budget is not None and budget > 0:
        notepad.ignore(f"{path}.thinkingBudget", "thinking has no budget of its own")
    return path


def _output_schema(config: wire.GenerationConfig) -> dict[str, Any] | None:
    path = "generationConfig.responseSchema"
    response_schema = config.response_schema
    if config.response_json_schema is not None:
        if response_schema is not None:
            raise InvalidRequest(f"{path}: excludes responseJsonSchema")
        path = "generationConfig.responseJsonSchema"
    if config.response_mime_type in _TEXT_TYPES:
        if response_schema is not None or config.response_json_schema is not None:
            raise InvalidRequest(f"{path}: needs the responseMimeType {_JSON_TYPE}")
        return None
    if config.response_mime_type not in (_JSON_TYPE, wire.ENUM_TYPE):
        raise InvalidRequest(
            f"generationConfig.responseMimeType: only text/plain, {_JSON_TYPE} and {wire.ENUM_TYPE}"
            " are supported"
        )
    if response_schema is None and config.response_json_schema is None and not config.is_enum:
        return {"type": ["object", "array"]}
    schema = (
        config.response_json_schema
        if response_schema is None
        else json_schema(response_schema, path)
    )
    if config.is_enum:
        words = schema.get("enum") if schema else None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InvalidRequest(f"{path}: {wire.ENUM_TYPE} needs a schema of strings in an `enum`")
        if config.response_logprobs:
            raise InvalidRequest(
                f"generationConfig.responseLogprobs: not supported with {wire.ENUM_TYPE}"
            )
    return schema


def tool_choice_of(prompted: wire.Prompted, notepad: Notepad) -> ToolChoice:
    path = "toolConfig.functionCallingConfig"
    config = prompted.tool_config.function_calling_config if prompted.tool_config else None
    if config is None:
        return ToolChoice()
    names = {function.name for tool in prompted.tools for function in tool.function_declarations}
    for name in config.allowed_function_names:
        if name not in names:
            raise InvalidRequest(f"{path}.allowedFunctionNames: there is no function '{name[:64]}'")
    if config.stream_function_call_arguments:
        notepad.ignore(f"{path}.streamFunctionCallArguments", "calls come whole")
    match config.mode.upper():
        case "NONE":
            return ToolChoice("none")
        case "ANY":
            if not names:
                raise uncallable(f"{path}.mode")
            chosen = list(dict.fromkeys(config.allowed_function_names))
            if len(chosen) == 1:
                return ToolChoice("tool", chosen[0])
            return ToolChoice("any", names=[] if set(chosen) == names else chosen)
        case "AUTO" | "MODE_UNSPECIFIED" | "" | "VALIDATED":
            if config.mode.upper() == "VALIDATED":
                notepad.ignore(f"{path}.mode", "free calls are not held to their schemas")
            if config.allowed_function_names:
                notepad.ignore(f"{path}.allowedFunctionNames", "only mode ANY chooses functions")
            return ToolChoice()
        case _:
            raise InvalidRequest(f"{path}.mode: must be AUTO, ANY, NONE or VALIDATED")


class GeminiLowering(Lowering):
    """Lowers one request. Every call and response takes constant time.

    With `is_count` calls and responses may stand alone, because Gemini CLI counts a new response by
    itself.
    """

    # Where a request has its turns.
    turns_path = "contents"

    def __init__(
        self, context: RequestContext, left_out: Sequence[str], *, is_count: bool = False
    ) -> None:
        super().__init__(context)
        self.leave_out(left_out)
        self._is_count = is_count
        self._answered: set[str] = set()
        self._left_out = left_out
        self._num_calls = 0
        # The id and the name of calls that await a response, by the call's number.
        self._pending: dict[int, tuple[str, str]] = {}
        # The numbers of the calls with an id or a name, in order.
        self._numbers: dict[tuple[str, str], deque[int]] = defaultdict(deque)

    def add_prompted(self, prompted: wire.Prompted, where: str) -> None:
        for index, tool in enumerate(prompted.tools):
            path = f"{where}tools[{index}]"
            for info in msgspec.structs.fields(tool):
                if info.name != "function_declarations" and getattr(tool, info.name) is not None:
                    self.notepad.ignore(f"{path}.{info.encode_name}", HOSTED)
            for number, function in enumerate(tool.function_declarations):
                function_path = f"{path}.functionDeclarations[{number}]"
                schema = function.parameters_json_schema
                if not function.name:
                    raise InvalidRequest(f"{function_path}.name: must not be empty")
                if function.parameters is not None:
                    if schema is not None:
                        message = f"{function_path}.parameters: excludes parametersJsonSchema"
                        raise InvalidRequest(message)
                    schema = json_schema(function.parameters, f"{function_path}.parameters")
                for name in ("response", "response_json_schema"):
                    if getattr(function, name) is not None:
                        reason = "only inputs are held to a schema"
                        self.notepad.ignore(f"{function_path}.{name}", reason)
                self.mark(function_path)
                lowered = self.tool(function_path, function.name, schema, function.description)
                self.tools.append(lowered)
        if prompted.system_instruction is not None:
            for number, part in enumerate(prompted.system_instruction.parts):
                path = f"{where}systemInstruction.parts[{number}]"
                if part.text is None:
                    raise InvalidRequest(f"{path}: only text is supported in a system instruction")
                self.mark(path, can_carry=bool(part.text))
                self.system.append(TextPart(part.text))
        for index, content in enumerate(prompted.contents):
            path = f"{where}contents[{index}]"
            role = _ROLES.get(content.role)
            if role is None:
                raise InvalidRequest(f"{path}.role: Please use a valid role: user, model.")
            if not content.parts:
                raise InvalidRequest(f"{path}.parts: contents.parts must not be empty.")
            if role == "assistant" and not (self.messages and self.messages[-1].role == role):
                self.check_answered()
            parts: list[Part] = []
            for number, part in enumerate(content.parts):
                segment = self._part(f"{path}.parts[{number}]", role, part)
                if segment is not None:
                    parts.append(segment)
            self.add(role, parts)

    def add_held(self, held: HeldContent, where: str) -> None:
        """Add the prompt of a cached content, which stands first, and mark its end."""
        self.add_prompted(held.prompted, where)
        target = find_target(self.slots)
        if target is not None:
            self.slots[target] = replace(self.slots[target], marker=held.ttl, num_markers=1)

    def plan_behind(self, held: HeldContent | None, cache_salt: str | None) -> Plan:
        """The plan. Its breakpoint lives as long as the cached content. Without a cached content
        the key's policy marks the prompt."""
        if held is None:
            return self.plan(self.context.principal.auto_cache, cache_salt=cache_salt)
        plan = self.plan(cache_salt=cache_salt)
        points = [Breakpoint(point.segment, point.ttl, held.seconds) for point in plan.breakpoints]
        return replace(plan, breakpoints=points)

    def check_answered(self) -> None:
        if self._pending and not self._is_count:
            missing = ", ".join(name[:64] for _, name in islice(self._pending.values(), 8))
            raise InvalidRequest(
                f"{self.turns_path}: each function call must be answered by a function response in"
                f" the turn that follows it. Missing: {missing}"
            )

    def _part(self, path: str, role: Role, part: wire.Part) -> Part | None:
        """The segment of a part; None for a part that is ignored and reported."""
        num_kinds = sum(getattr(part, name) is not None for name in wire.KINDS)
        if num_kinds == 0 and role == "assistant":
            self.notepad.ignore(path, "a part without content")
            return None
        if num_kinds != 1:
            # A misspelt field may be the one that is missing.
            unknown = (where for where in self._left_out if where.startswith(f"{path}."))
            raise InvalidRequest(
                f"{next(unknown, path)[:_MAX_PATH]}: must have one of text, functionCall,"
                " functionResponse, inlineData, fileData"
            )
        if part.function_call is not None:
            where = f"{path}.functionCall"
            if role != "assistant":
                raise InvalidRequest(f"{where}: only a content of role 'model' may call a function")
            return self.call(path, where, part.function_call)
        if part.function_response is not None:
            where = f"{path}.functionResponse"
            if role != "user":
                raise InvalidRequest(f"{where}: only a content of role 'user' may answer a call")
            return self.result(path, where, part.function_response)
        if part.tool_call is not None or part.tool_response is not None:
            self.notepad.ignore(path, HOSTED)
            return None
        if part.text is not None:
            text = part.text
        elif (code := part.executable_code) is not None:
            text = f"```{code.language.lower()}\n{code.code}\n```"
        elif part.code_execution_result is not None:
            text = f"```\n{part.code_execution_result.output}\n```"
        else:
            text = self._file(path, part.inline_data, part.file_data)
        self.mark(path, can_carry=bool(text) and not part.thought)
        return ThinkingPart(text) if part.thought else TextPart(text)

    def _file(self, path: str, blob: wire.Blob | None, file: wire.FileData | None) -> str:
        """The text of a text file; what stands in for any other file."""
        if blob is None:
            file = file or wire.FileData()
            name = file.display_name or file.file_uri
            return self.media(f"{path}.fileData", file.mime_type, name=name)
        name = blob.display_name or ""
        return self.inline(f"{path}.inlineData", blob.mime_type, blob.data, name)

    def inline(self, path: str, mime_type: str, data: str, name: str = "") -> str:
        """The text of a text file; what stands in for any other file. `data` is base64."""
        # Google's own client writes the alphabet for URLs (RFC 4648 section 5).
        data = data.translate(_STANDARD_BASE64)
        if not mime_type.startswith(_READ_TYPES):
            return self.media(path, mime_type, data, name)
        text = text_in(data)
        if text is None:
            raise InvalidRequest(f"{path}.data: must be base64 of text in UTF-8")
        return text

    def media(self, path: str, mime_type: str, data: str = "", name: str = "") -> str:
        """What stands in for a file that is no text."""
        other: Kind = "document" if mime_type == "application/pdf" else "file"
        kind = _KINDS.get(mime_type.partition("/")[0], other)
        return self.stand_in(path, Media(kind, mime_type, data, name))

    def call(self, path: str, where: str, call: wire.FunctionCall) -> ToolUsePart:
        """`path` names the segment, `where` the call."""
        if not call.name:
            raise InvalidRequest(f"{where}.name: must not be empty")
        self._num_calls += 1
        call_id = call.id or f"call_{self._num_calls}"
        self._pending[self._num_calls] = call_id, call.name
        self._numbers["id", call_id].append(self._num_calls)
        self._numbers["name", call.name].append(self._num_calls)
        self.mark(path)
        return ToolUsePart(call_id, call.name, input_of(call.args))

    def result(self, path: str, where: str, result: wire.FunctionResponse) -> ToolResultPart | None:
        """The segment of a response. It answers the first pending call with its id, or else with
        its name.

        None where a call with its id was answered before, because Gemini CLI repeats responses when
        it resumes a session.
        """
        answered = None
        for key in (("id", result.id or ""), ("name", result.name)):
            numbers = self._numbers[key]
            while numbers and answered is None:
                answered = self._pending.pop(numbers.popleft(), None)
        if answered is None and result.id in self._answered:
            self.notepad.ignore(where, "a call of this id was answered before")
            return None
        if answered is None and self._is_count:
            answered = result.id or result.name, result.name
        if answered is None:
            raise InvalidRequest(
                f"{where}: no function call of this name awaits a response in the turn before"
            )
        self._answered.add(answered[0])
        # Google's rule: a field `output` is the output, a field `error` is an error. Without them
        # the whole response is the output.
        kind = next(iter(result.response), "") if len(result.response) == 1 else ""
        output: Any = result.response
        if kind in ("output", "error"):
            output = result.response[kind]
        text = output if isinstance(output, str) else _encode(output).decode()
        files = [
            self._file(f"{where}.parts[{number}]", part.inline_data, part.file_data)
            for number, part in enumerate(result.parts)
        ]
        self.mark(path)
        return ToolResultPart(answered[0], "\n".join([text, *files]), kind == "error")


MAX_DEPTH = 64
_COUNTS = {
    f"{end}_{what}": f"{end}{what.title()}"
    for end in ("max", "min")
    for what in ("items", "length", "properties")
}
_NAMES = {
    **_COUNTS,
    "additional_properties": "additionalProperties",
    "any_of": "anyOf",
    "defs": "$defs",
    "property_ordering": "propertyOrdering",
    "ref": "$ref",
}
_UNSPECIFIED = "TYPE_UNSPECIFIED"


def json_schema(schema: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Google's schema as a JSON Schema. Raise InvalidRequest, with `path` in the message, for one
    that is nested too deep."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path}: nested more than {MAX_DEPTH} levels deep")
    fields = {_NAMES.get(key, key): value for key, value in schema.items() if value is not None}
    is_nullable = fields.pop("nullable", False) is True
    order = fields.pop("propertyOrdering", None)
    lowered: dict[str, Any] = {}
    for key, value in fields.items():
        where = f"{path}.{key}"
        match key:
            case "type" if isinstance(value, str):
                if value != _UNSPECIFIED:
                    lowered["type"] = value.lower()
            case "properties" | "$defs" if isinstance(value, dict):
                lowered[key] = {
                    name: _inner(inner, f"{where}.{name[:64]}", depth)
                    for name, inner in value.items()
                }
            case "items" | "additionalProperties" if isinstance(value, dict):
                lowered[key] = _inner(value, where, depth)
            case "anyOf" if isinstance(value, list):
                lowered[key] = [
                    _inner(inner, f"{where}[{index}]", depth) for index, inner in enumerate(value)
                ]
            case _ if key in _COUNTS.values() and isinstance(value, str) and value.isdecimal():
                lowered[key] = int(value[:18])
            case "example":
                pass
            case _:
                lowered[key] = value
    properties = lowered.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        names = [name for name in order if isinstance(name, str) and name in properties]
        lowered["properties"] = {name: properties[name] for name in names} | properties
    if is_nullable and isinstance(lowered.get("anyOf"), list):
        lowered["anyOf"].append({"type": "null"})
    elif is_nullable and isinstance(lowered.get("type"), str):
        lowered["type"] = [lowered["type"], "null"]
        if isinstance(lowered.get("enum"), list):
            lowered["enum"] = [*lowered["enum"], None]
    return lowered


def _inner(schema: Any, path: str, depth: int) -> Any:
    return json_schema(schema, path, depth + 1) if isinstance(schema, dict) else schema
