"""From raw bytes to a request of Google's API, or to one error that names the field.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge.
"""

from typing import Any, TypeVar

import msgspec

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.complaints import split_complaint
from gateway.dialects.gemini.bounds import bound_logprobs, check_bounds, check_metadata
from gateway.dialects.gemini.content import Shape
from gateway.dialects.gemini.fields import named
from gateway.dialects.gemini.request import CountRequest, GenerateRequest
from gateway.dialects.weigh import check_values

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
