"""From raw bytes to a request, or to one error in the wire's words.

Whatever the bytes are, the outcome is a request, InvalidRequest or TooLarge: for bad UTF-8, bad
JSON, a wrong type, an unknown key, nesting too deep to parse, a bound that is broken. Of duplicate
keys the last one counts.
"""

from typing import TypeVar

import msgspec

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic import explain
from gateway.dialects.anthropic.bounds import check_bounds
from gateway.dialects.anthropic.features import check_features
from gateway.dialects.anthropic.foreign import decode_with_foreign_tools
from gateway.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.dialects.weigh import check_values

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
        message = explain.validation_error(str(error), body)
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
