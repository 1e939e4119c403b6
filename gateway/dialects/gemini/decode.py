"""From raw bytes to a request of Google's API, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge.

The rules are those of the JSON form of protocol buffers, which Google's servers parse: a field has
two names (`systemInstruction` and `system_instruction`), null is a field that is not there, and
an object may stand where a list of one is meant. An unknown name is an error. What is below a free
field (a function's arguments, a schema) stays as it is. All of it is linear in the body.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import bounded_tokens, check_input, check_values, split_complaint
from gateway.dialects.gemini.request import (
    CountRequest,
    GenerateRequest,
    GenerationConfig,
    Part,
    Prompted,
    Shape,
)
from gateway.prompt.schemas import check_schema

_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class _Field:
    """`shape` is the type of its value, or of each item of a list; None for anything else."""

    name: str
    shape: type[Shape] | None
    is_list: bool


def named(value: Any, shape: type[Shape], path: str = "") -> dict[str, Any]:
    """The value of a message, by the names of `shape`. Raise InvalidRequest that names the path."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object" if path else "the body must be an object")
    fields = _fields(shape)
    made: dict[str, Any] = {}
    for key, item in value.items():
        field = fields.get(key)
        where = f"{path}.{key}" if path else key
        if field is None:
            raise _unknown(key[:_MAX_SHOWN], path)
        if item is None:
            continue
        if field.name in made:
            raise InvalidRequest(f"{where}: is given twice, by both of its names")
        made[field.name] = _valued(item, field, where)
    return made


def _unknown(name: str, path: str) -> InvalidRequest:
    """In the words of Google's parser."""
    place = f" at '{path}'" if path else ""
    message = f'Invalid JSON payload received. Unknown name "{name}"{place}: Cannot find field.'
    return InvalidRequest(message, f"{path}.{name}" if path else name)


def _valued(item: Any, field: _Field, path: str) -> Any:
    if field.is_list and not isinstance(item, list):
        item = [item]
    if field.shape is None:
        return item
    if not field.is_list:
        return named(item, field.shape, path)
    return [named(each, field.shape, f"{path}[{index}]") for index, each in enumerate(item)]


@cache
def _fields(shape: type[Shape]) -> Mapping[str, _Field]:
    hints = get_type_hints(shape)
    found: dict[str, _Field] = {}
    for field in msgspec.structs.fields(shape):
        kind, is_list = _plain(hints[field.name]), False
        if get_origin(kind) is list:
            kind, is_list = _plain(get_args(kind)[0]), True
        inner = kind if isinstance(kind, type) and issubclass(kind, Shape) else None
        found[field.encode_name] = found[field.name] = _Field(field.encode_name, inner, is_list)
    return found


def _plain(hint: Any) -> Any:
    """The type without `| None` and annotations."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return _plain(rest[0]) if len(rest) == 1 else hint
    return hint


def check_bounds(request: Prompted, bounds: RequestBounds) -> None:
    """Raise InvalidRequest that names the field and its bound; linear in the request."""
    _check_length(request.model, "model", bounds)
    _check_tools(request, bounds)
    contents = request.contents
    num_parts = sum(max(len(content.parts), 1) for content in contents)
    if request.system_instruction is not None:
        num_parts += len(request.system_instruction.parts)
    if num_parts > bounds.max_blocks:
        raise InvalidRequest(f"contents: more than {bounds.max_blocks} parts")
    for index, content in enumerate(contents):
        for number, part in enumerate(content.parts):
            _check_names(part, f"contents[{index}].parts[{number}]", bounds)
    if isinstance(request, GenerateRequest):
        _check_generation(request.generation_config, bounds)


def bound_logprobs(config: GenerationConfig, bounds: RequestBounds) -> None:
    """For an answer that is gathered. It gets a limit where it has none."""
    if config.response_logprobs:
        num_probs = config.candidate_count * ((config.logprobs or 0) + 1)
        field = "generationConfig.maxOutputTokens"
        asked = config.max_output_tokens
        most = bounded_tokens(asked, num_probs, bounds, field=field, param=None)
        config.max_output_tokens = most


def check_metadata(labels: Any, bounds: RequestBounds) -> None:
    """The field changes nothing and is not kept."""
    if len(msgspec.json.encode(labels)) > bounds.max_metadata_bytes:
        raise InvalidRequest(f"labels: may have at most {bounds.max_metadata_bytes} bytes")


def _check_tools(request: Prompted, bounds: RequestBounds) -> None:
    if sum(len(tool.function_declarations) + 1 for tool in request.tools) > 2 * bounds.max_tools:
        raise InvalidRequest(f"tools: may have at most {bounds.max_tools} functions")
    for index, tool in enumerate(request.tools):
        for number, function in enumerate(tool.function_declarations):
            path = f"tools[{index}].functionDeclarations[{number}]"
            _check_length(function.name, f"{path}.name", bounds)
            if function.parameters is not None:
                check_schema(function.parameters, f"{path}.parameters", bounds)
            if function.parameters_json_schema is not None:
                where = f"{path}.parametersJsonSchema"
                check_schema(function.parameters_json_schema, where, bounds)


def _check_generation(config: GenerationConfig, bounds: RequestBounds) -> None:
    if config.candidate_count > bounds.max_choices:
        raise InvalidRequest(
            f"generationConfig.candidateCount: must be at most {bounds.max_choices}"
        )
    if len(config.stop_sequences) > bounds.max_stop_sequences:
        raise InvalidRequest(
            f"generationConfig.stopSequences: may have at most {bounds.max_stop_sequences} items"
        )
    if any(len(stop) > bounds.max_stop_characters for stop in config.stop_sequences):
        raise InvalidRequest(
            "generationConfig.stopSequences: a stop sequence may have at most"
            f" {bounds.max_stop_characters} characters"
        )
    if config.response_schema is not None:
        check_schema(config.response_schema, "generationConfig.responseSchema", bounds)
    if config.response_json_schema is not None:
        check_schema(config.response_json_schema, "generationConfig.responseJsonSchema", bounds)


def _check_names(part: Part, path: str, bounds: RequestBounds) -> None:
    if (call := part.function_call) is not None:
        _check_length(call.name, f"{path}.functionCall.name", bounds)
        _check_length(call.id or "", f"{path}.functionCall.id", bounds)
        check_input(call.args, f"{path}.functionCall.args", bounds)
    if (response := part.function_response) is not None:
        _check_length(response.name, f"{path}.functionResponse.name", bounds)
        _check_length(response.id or "", f"{path}.functionResponse.id", bounds)


def _check_length(name: str, path: str, bounds: RequestBounds) -> None:
    if len(name) > bounds.max_name_characters:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_name_characters} characters")


ShapeT = TypeVar("ShapeT", bound=Shape)


def decode_generate(
    body: bytes, model: str, bounds: RequestBounds = DEFAULT_BOUNDS, *, is_streamed: bool = False
) -> GenerateRequest:
    request = decode(body, GenerateRequest, bounds)
    check_metadata(request.labels, bounds)
    request.model = model
    check_bounds(request, bounds)
    if not is_streamed:
        bound_logprobs(request.generation_config, bounds)
    return request


def decode_count(
    body: bytes, model: str, bounds: RequestBounds = DEFAULT_BOUNDS
) -> GenerateRequest:
    """The request whose prompt is counted."""
    counted = decode(body, CountRequest, bounds)
    request = counted.generate_content_request
    if request is not None and counted.contents:
        raise InvalidRequest("contents: excludes generateContentRequest")
    if request is None:
        request = GenerateRequest(
            contents=counted.contents,
            system_instruction=counted.system_instruction,
            tools=counted.tools,
        )
        if counted.generation_config is not None:
            request.generation_config = counted.generation_config
    request.model = model
    check_bounds(request, bounds)
    return request


def decode(body: bytes, kind: type[ShapeT], bounds: RequestBounds) -> ShapeT:
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    try:
        return msgspec.convert(named(_value(body), kind), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply") from None


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply") from None
    except msgspec.MsgspecError:
        raise InvalidRequest("The request body is not valid JSON") from None


def _explained(complaint: str) -> InvalidRequest:
    what, path = split_complaint(complaint)
    path, what = path.removeprefix("."), what.replace("`", "'")
    return InvalidRequest(f"{path}: {what}" if path else what[:300], path or None)
