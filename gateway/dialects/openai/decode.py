"""From raw bytes to a request, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge. A top-level field that
is null is a field that is not there. The fields are parted first, then decoded into their types.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import bounded_tokens, check_arguments, check_values, split_complaint
from gateway.dialects.openai.lower import decode_foreign_tools
from gateway.dialects.openai.request import (
    IGNORED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ToolMessage,
)
from gateway.prompt.schemas import check_schema


def check_bounds(request: GenerationRequest, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request.

    A gathered answer with log probabilities gets a limit where it has none.

    That there are at most four stop strings is part of the request's type.
    """
    _check_length(request.model, "model", bounds)
    if request.n > bounds.max_choices:
        raise InvalidRequest(f"n: must be at most {bounds.max_choices}")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if any(len(stop) > bounds.max_stop_characters for stop in stops):
        raise InvalidRequest(
            f"stop: a stop sequence may have at most {bounds.max_stop_characters} characters"
        )
    if isinstance(request, ChatRequest):
        _check_chat(request, bounds)
        _bound_logprobs(request, bounds)


def _bound_logprobs(request: ChatRequest, bounds: RequestBounds) -> None:
    if not request.logprobs or request.stream:
        return
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    asked = getattr(request, name)
    num_probs = request.n * (request.top_logprobs + 1)
    most = bounded_tokens(asked, num_probs, bounds, field=name, param=name)
    setattr(request, name, most)


def check_metadata(num_bytes: int, bounds: RequestBounds, name: str = "metadata") -> None:
    """The field changes nothing and is not kept."""
    if num_bytes > bounds.max_metadata_bytes:
        raise InvalidRequest(f"{name}: may have at most {bounds.max_metadata_bytes} bytes")


def _check_chat(request: ChatRequest, bounds: RequestBounds) -> None:
    _check_blocks(request.messages, bounds)
    if len(request.tools) > bounds.max_tools:
        raise InvalidRequest(f"tools: may have at most {bounds.max_tools} items")
    for index, tool in enumerate(request.tools):
        path = f"tools[{index}].function"
        _check_length(tool.function.name, f"{path}.name", bounds)
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"{path}.parameters", bounds)
    form = request.response_format
    if isinstance(form, JsonSchemaFormat) and form.json_schema.schema is not None:
        check_schema(form.json_schema.schema, "response_format.json_schema.schema", bounds)
    if isinstance(request.tool_choice, NamedTool):
        _check_length(request.tool_choice.function.name, "tool_choice.function.name", bounds)


def _check_blocks(messages: list[Message], bounds: RequestBounds) -> None:
    left = bounds.max_blocks
    for message in messages:
        left -= len(message.content) if isinstance(message.content, list) else 1
        if isinstance(message, AssistantMessage):
            left -= len(message.tool_calls or [])
        if left < 0:
            raise InvalidRequest(
                f"messages: more than {bounds.max_blocks} content parts and tool calls"
            )
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            _check_length(message.tool_call_id, f"messages[{index}].tool_call_id", bounds)
        elif isinstance(message, AssistantMessage):
            for number, call in enumerate(message.tool_calls or []):
                path = f"messages[{index}].tool_calls[{number}]"
                _check_length(call.id, f"{path}.id", bounds)
                _check_length(call.function.name, f"{path}.function.name", bounds)
                check_arguments(call.function.arguments, f"{path}.function.arguments", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_name_characters} characters")


_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_VALUE = re.compile(r"^Invalid (?:enum )?value '?(.*?)'?$", re.DOTALL)
_MAX_SHOWN = 64


def validation_error(complaint: str) -> InvalidRequest:
    what, path = split_complaint(complaint)
    path = path.removeprefix(".")
    if field := _FIELD.match(what):
        name = field[2][:_MAX_SHOWN]
        where = f"{path}.{name}" if path else name
        if field[1] == "missing required":
            return InvalidRequest(f"Missing required parameter: '{where}'.", where)
        return InvalidRequest(f"Unrecognized request argument supplied: {where}", where)
    if value := _VALUE.match(what):
        shown = value[1][:_MAX_SHOWN]
        what = f"Invalid value: '{shown}'"
    else:
        what = what.replace("`", "'")
    return InvalidRequest(f"{path}: {what}" if path else what, path or None)


_document = msgspec.json.Decoder(dict[str, Raw])
_messages = msgspec.json.Decoder(list[dict[str, Raw]])
_MAX_NEUTRAL_BYTES = 1024
Request = TypeVar("Request", ChatRequest, CompletionRequest)


def decode_chat(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> ChatRequest:
    return _decode(body, ChatRequest, REFUSED_IN_CHAT, bounds)


def decode_completion(body: bytes, bounds: RequestBounds = DEFAULT_BOUNDS) -> CompletionRequest:
    return _decode(body, CompletionRequest, REFUSED_IN_COMPLETIONS, bounds)


def _decode(
    body: bytes,
    kind: type[Request],
    refused: Mapping[str, tuple[Any, ...]],
    bounds: RequestBounds,
) -> Request:
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    fields = fields_of(body)
    given: dict[str, Raw] = {}
    for name, value in fields.items():
        if name == "metadata":
            check_metadata(len(value), bounds)
        if bytes(value) == b"null" or name in IGNORED:
            continue
        if name not in refused:
            given[name] = value
        elif not is_neutral(value, refused[name]):
            raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    whole = body if len(given) == len(fields) else _object_of(given)
    try:
        request = _read(whole, given, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    check_bounds(request, bounds)
    return request


def _read(whole: bytes, given: dict[str, Raw], kind: type[Request]) -> Request:
    try:
        return msgspec.json.decode(whole, type=kind)
    except msgspec.ValidationError:
        if (bare := _without_private(given)) is not None:
            return _read(_object_of(bare), bare, kind)
        tools = decode_foreign_tools(bytes(given.get("tools", b"null")))
        if tools is None:
            raise
        request = msgspec.json.decode(_object_of({**given, "tools": Raw(b"[]")}), type=kind)
        if isinstance(request, ChatRequest):
            request.tools = tools
        return request


def _without_private(given: Mapping[str, Raw]) -> dict[str, Raw] | None:
    """The fields, without those of messages whose names begin with `_`; None where none do.

    Such a field is a note of the client's own, which it should have kept: Copilot CLI sends
    `__copilotMessageSource` in a session that goes on.
    """
    raw = given.get("messages", Raw())
    if b'"_' not in memoryview(raw).tobytes():
        return None
    try:
        messages = _messages.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not any(name.startswith("_") for message in messages for name in message):
        return None
    made = [
        {name: value for name, value in message.items() if not name.startswith("_")}
        for message in messages
    ]
    return {**given, "messages": Raw(msgspec.json.encode(made))}


def _object_of(fields: Mapping[str, Raw]) -> bytes:
    """A JSON object of these fields. An encoder would copy large values once more as it grows."""
    pieces: list[bytes | Raw] = []
    for name, value in fields.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return b"".join([*pieces, b"}"] if pieces else [b"{}"])


def fields_of(body: bytes) -> dict[str, Raw]:
    """The fields of a body that is an object, as they came. Raise InvalidRequest for others."""
    try:
        return _document.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body must be a JSON object") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None


def unreadable(error: Exception) -> InvalidRequest:
    """The error of bytes that are no JSON."""
    match error:
        case UnicodeDecodeError():
            return InvalidRequest("The request body is not valid UTF-8")
        case RecursionError():
            return InvalidRequest("The request body is nested too deeply")
        case _:
            return InvalidRequest("The request body is not valid JSON")


def is_neutral(value: Raw, allowed: tuple[Any, ...]) -> bool:
    """Whether the value is one of these. They are short, so a longer value is not decoded."""
    if len(value) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    return any(_is_same(decoded, neutral) for neutral in allowed)


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal and of one kind: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
