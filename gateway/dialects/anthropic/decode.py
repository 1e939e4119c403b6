"""From raw bytes to a request, or to one error in the wire's words.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge: for bad UTF-8, bad
JSON, a wrong type, an unknown key, nesting too deep to parse, a bound that is broken. Of duplicate
keys the last one counts.

Tools that the vendor defines or runs (web search, code execution, bash, MCP and the like) are left
out of the prompt and told: no server here runs them and no model here was trained on them. Such a
tool's place in `tools` stays taken, so that paths are the client's, and a marker on it counts as
one on the tool before. Of other fields that are not served, what only asks for better is left out
and noted, and what would make the answer another one is refused by its name.

Paths in errors are dotted, `messages.0.content.1.text: why`: list positions are numbers, and a
content block's type follows its position.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest, ThreadNotFound
from gateway.dialects.anthropic.request import (
    SUPPORTED_BLOCKS,
    Block,
    CacheControl,
    ChoiceTool,
    ContentSource,
    CountTokensRequest,
    Document,
    ForeignTool,
    MessagesRequest,
    SearchResult,
    ThinkingAdaptive,
    ThinkingEnabled,
    ThreadContinue,
    ThreadCreate,
    Tool,
    ToolResult,
    ToolUse,
)
from gateway.dialects.bodies import (
    UntypedBody,
    check_input,
    check_values,
    decode_tools,
    kinds_of_tools,
    split_complaint,
)
from gateway.prompt.ignored import Notepad
from gateway.prompt.schemas import check_schema

RequestT = TypeVar("RequestT", bound=CountTokensRequest)


class _Declared(msgspec.Struct):
    type: str
    name: str = ""
    cache_control: CacheControl | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_declared = msgspec.json.Decoder(_Declared)
_tool = msgspec.json.Decoder(Tool)


def decode_with_foreign_tools(
    decoder: msgspec.json.Decoder[RequestT], body: bytes
) -> RequestT | None:
    """A request whose `tools` has such a tool; None where it has none.

    Raise msgspec.ValidationError with the path in the whole body.
    """
    try:
        fields = _fields.decode(body)
        tools = kinds_of_tools(fields["tools"], "custom")
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if tools is None:
        return None
    fields["tools"] = Raw(b"[]")
    request = decoder.decode(msgspec.json.encode(fields))
    request.tools = decode_tools(tools, _tool.decode, _foreign)
    return request


def _foreign(tool: Raw) -> Tool:
    declared = _declared.decode(tool)
    return ForeignTool(
        name=declared.type,
        input_schema={},
        description=declared.name,
        cache_control=declared.cache_control,
    )


_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_NO_EFFORT = "this model has one effort"
_DISPLAYS = (None, "summarized", "omitted")
_NOT_HERE = "not supported by this server"


def check_features(request: CountTokensRequest) -> None:
    """Raise InvalidRequest for the first field that would make the answer another one."""
    if request.compaction not in _EMPTY:
        raise InvalidRequest(f"compaction: {_NOT_HERE}")
    if isinstance(request, MessagesRequest) and isinstance(request.thread, ThreadContinue):
        raise ThreadNotFound
    for index, message in enumerate(request.messages):
        if message.role != "system":
            if message.content is UNSET:
                raise InvalidRequest(f"messages.{index}.content: Field required")
            for field in ("clear_at", "output_config"):
                if getattr(message, field) is not None:
                    raise InvalidRequest(
                        f"messages.{index}.{field}: only permitted on messages of role 'system'"
                    )
    edits = request.context_management.edits if request.context_management else None
    for index, edit in enumerate(edits or []):
        if not isinstance(edit.get("type"), str):
            raise InvalidRequest(
                f"context_management.edits.{index}: Unable to extract tag using discriminator"
                " 'type'"
            )


def note_features(request: CountTokensRequest, notepad: Notepad) -> None:
    """Note each field that asks for what is not done."""
    for path, reason in _ignored(request):
        notepad.ignore(path, reason)


def _ignored(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    fields: dict[str, Any] = {
        "billing_policy": request.billing_policy,
        "mcp_servers": request.mcp_servers,
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "container": request.container,
            "fallbacks": request.fallbacks,
            "fallback_credit_token": request.fallback_credit_token,
        }
        if isinstance(request.thread, ThreadCreate):
            yield "thread", "no thread is kept: send the whole conversation each time"
    if request.speed == "fast":
        yield "speed", "there is one speed"
    if request.output_config is not None:
        fields["output_config.task_budget"] = request.output_config.task_budget
        if request.output_config.effort is not None:
            yield "output_config.effort", _NO_EFFORT
    for path, value in fields.items():
        if value not in _EMPTY:
            yield path, _NOT_HERE
    yield from _of_thinking(request)
    yield from _of_messages(request)
    edits = request.context_management.edits if request.context_management else None
    for index, edit in enumerate(edits or []):
        if edit.get("keep") not in ("all", {"type": "all"}):
            kind = str(edit["type"])[:64]
            yield (
                f"context_management.edits.{index}",
                f"{kind}: the context stays whole",
            )


def _of_thinking(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled | ThinkingAdaptive):
        if thinking.display not in _DISPLAYS:
            yield "thinking.display", "thinking is shown as the model writes it"
    if isinstance(thinking, ThinkingEnabled):
        yield "thinking.budget_tokens", "`max_tokens` alone bounds thinking"


def _of_messages(request: CountTokensRequest) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(request.messages):
        if message.clear_at == "next_user_message":
            yield f"messages.{index}.clear_at", "the message stays"
        if message.output_config is not None and message.output_config.effort is not None:
            yield f"messages.{index}.output_config.effort", _NO_EFFORT


_MAX_EDITS = 16


def check_bounds(request: CountTokensRequest, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request."""
    _check_blocks(request, bounds)
    if len(request.tools) > bounds.max_tools:
        raise InvalidRequest(f"tools: List should have at most {bounds.max_tools} items")
    for index, tool in enumerate(request.tools):
        _check_length(tool.name, f"tools.{index}.name", bounds)
        check_schema(tool.input_schema, f"tools.{index}.input_schema", bounds)
    form = request.form
    if form is not None:
        check_schema(form.schema, f"{request.form_path}.schema", bounds)
    _check_length(request.model, "model", bounds)
    if isinstance(request.tool_choice, ChoiceTool):
        _check_length(request.tool_choice.name, "tool_choice.name", bounds)
    edits = request.context_management.edits if request.context_management else None
    if edits is not None and len(edits) > _MAX_EDITS:
        raise InvalidRequest(
            f"context_management.edits: List should have at most {_MAX_EDITS} items"
        )
    if isinstance(request, MessagesRequest):
        _check_generation(request, bounds)


def _check_generation(request: MessagesRequest, bounds: RequestBounds) -> None:
    stops = request.stop_sequences
    if len(stops) > bounds.max_stop_sequences:
        raise InvalidRequest(
            f"stop_sequences: List should have at most {bounds.max_stop_sequences} items"
        )
    for index, stop in enumerate(stops):
        if len(stop) > bounds.max_stop_characters:
            raise InvalidRequest(
                f"stop_sequences.{index}: String should have at most"
                f" {bounds.max_stop_characters} characters"
            )
    if len(msgspec.json.encode(request.metadata)) > bounds.max_metadata_bytes:
        raise InvalidRequest(f"metadata: should have at most {bounds.max_metadata_bytes} bytes")


def _check_blocks(request: CountTokensRequest, bounds: RequestBounds) -> None:
    """Count segments and nested blocks. The longest lists are counted first."""
    system = request.system
    left = bounds.max_blocks - (len(system) if isinstance(system, list) else system is not None)
    for message in request.messages:
        left -= len(message.content) if isinstance(message.content, list) else 1
        if left < 0:
            raise _too_many(bounds)
    for index, message in enumerate(request.messages):
        if not isinstance(message.content, list):
            continue
        for position, block in enumerate(message.content):
            left -= _num_nested(block)
            if left < 0:
                raise _too_many(bounds)
            if isinstance(block, ToolUse | ToolResult):
                _check_call(f"messages.{index}.content.{position}", block, bounds)


def _too_many(bounds: RequestBounds) -> InvalidRequest:
    return InvalidRequest(f"messages: more than {bounds.max_blocks} content blocks in the request")


def _num_nested(block: Block) -> int:
    match block:
        case ToolResult(content=list() as content):
            return len(content) + sum(_num_nested(inner) for inner in content)
        case SearchResult(content=content):
            return len(content)
        case Document(source=ContentSource(content=list() as content)):
            return len(content)
        case _:
            return 0


def _check_call(path: str, block: ToolUse | ToolResult, bounds: RequestBounds) -> None:
    if isinstance(block, ToolUse):
        _check_length(block.id, f"{path}.tool_use.id", bounds)
        _check_length(block.name, f"{path}.tool_use.name", bounds)
        check_input(block.input, f"{path}.tool_use.input", bounds)
    else:
        _check_length(block.tool_use_id, f"{path}.tool_result.tool_use_id", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(
            f"{path}: String should have at most {bounds.max_name_characters} characters"
        )


_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `([^`]*)`(?: (>=|<=|>|<) (\S+)|.*of length (<=|>=) (\d+))?")
_BOUNDS = {
    ">=": "greater than or equal to",
    "<=": "less than or equal to",
    ">": "greater than",
    "<": "less than",
}
_KINDS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "array": "list",
    "object": "object",
    "null": "null",
}
_CHOICES = {
    "ttl": "'5m' or '1h'",
    "role": "'user', 'assistant' or 'system'",
    "service_tier": "'auto' or 'standard_only'",
    "speed": "'standard' or 'fast'",
    "media_type": "'text/plain'",
}
_TAGS = {
    "cache_control": ("ephemeral",),
    "tool_choice": ("auto", "any", "tool", "none"),
    "thinking": ("enabled", "adaptive", "disabled", "between_tools"),
    "source": ("base64", "text", "content", "url", "file"),
    "format": ("json_schema",),
    "caller": ("direct",),
    "thread": ("create", "continue"),
}

_MAX_SHOWN = 64

Steps = list[str | int]


def validation_error(complaint: str, body: bytes) -> str:
    what, path = split_complaint(complaint)
    steps = _steps(path)
    document = UntypedBody(body)
    return _explain(what, steps, document)


def _explain(what: str, steps: Steps, document: UntypedBody) -> str:
    if field := _FIELD.match(what):
        is_missing = field[1] == "missing required"
        reason = "Field required" if is_missing else "Extra inputs are not permitted"
        if field[2] == "type" and is_missing and _is_tagged(steps):
            return f"{_path(steps, document)}: Unable to extract tag using discriminator 'type'"
        return f"{_path([*steps, field[2][:_MAX_SHOWN]], document)}: {reason}"
    if steps and steps[-1] == "type" and what.startswith("Invalid"):
        return _bad_tag(steps[:-1], document)
    path = _path(steps, document)
    return f"{path}: {_reason(what, steps)}" if path else _reason(what, steps)


def _reason(what: str, steps: Steps) -> str:
    choices = _CHOICES.get(str(steps[-1])) if steps else None
    if choices and what.startswith(("Invalid enum value", "Expected `str")):
        return f"Input should be {choices}"
    expected = _EXPECTED.match(what)
    if expected is None:
        return "Input is not valid" if steps else "The request body is not valid"
    if expected[2]:
        return f"Input should be {_BOUNDS[expected[2]]} {expected[3]}"
    if expected[4]:
        most = "at most" if expected[4] == "<=" else "at least"
        return f"List should have {most} {expected[5]} items"
    kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ")]
    return f"Input should be a valid {' or '.join(kind for kind in kinds if kind != 'null')}"


def _bad_tag(steps: Steps, document: UntypedBody) -> str:
    tag = document.at([*steps, "type"])
    path = _path(steps, document, last_type=False)
    parent = next((step for step in reversed(steps) if isinstance(step, str)), "")
    tags = _TAGS.get(parent, SUPPORTED_BLOCKS)
    names = ", ".join(f"'{name}'" for name in tags)
    shown = tag[:64] if isinstance(tag, str) else tag if isinstance(tag, int | float) else "…"
    return (
        f"{path}: Input tag '{shown}' found using 'type' does not match any of the expected"
        f" tags: {names}"
    )


def _is_tagged(steps: Steps) -> bool:
    return bool(steps) and (isinstance(steps[-1], int) or steps[-1] in _TAGS)


def _steps(path: str) -> Steps:
    return [int(index) if index.isdigit() else index or name for index, name in _STEP.findall(path)]


def _path(steps: Steps, document: UntypedBody, *, last_type: bool = True) -> str:
    """Write a path, with each content block's type after its position in `content`."""
    written: list[str] = []
    for depth, step in enumerate(steps):
        written.append(str(step))
        is_last = depth == len(steps) - 1
        if is_last and not last_type:
            break
        if isinstance(step, int) and depth and steps[depth - 1] == "content":
            kind = document.at([*steps[: depth + 1], "type"])
            if isinstance(kind, str) and kind in SUPPORTED_BLOCKS:
                written.append(kind)
        elif step == "cache_control" and not is_last:
            written.append("ephemeral")
    return ".".join(written)


_messages = msgspec.json.Decoder(MessagesRequest)
_count_tokens = msgspec.json.Decoder(CountTokensRequest)

Request = TypeVar("Request", bound=CountTokensRequest)


def decode_messages(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> MessagesRequest:
    return _decode(_messages, body, bounds)


def decode_count_tokens(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> CountTokensRequest:
    return _decode(_count_tokens, body, bounds)


def _read(decoder: msgspec.json.Decoder[Request], body: bytes) -> Request:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        request = decode_with_foreign_tools(decoder, body)
        if request is None:
            raise
        return request


def _decode(decoder: msgspec.json.Decoder[Request], body: bytes, bounds: RequestBounds) -> Request:
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    try:
        request = _read(decoder, body)
    except msgspec.ValidationError as error:
        message = validation_error(str(error), body)
    except msgspec.MsgspecError:
        message = "The request body is not valid JSON"
    except UnicodeDecodeError:
        message = "The request body is not valid UTF-8"
    except RecursionError:
        message = "The request body is nested too deeply"
    else:
        check_bounds(request, bounds)
        check_features(request)
        return request
    raise InvalidRequest(message)
