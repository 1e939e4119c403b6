"""A request's JSON, read into its structure."""

from typing import TypeVar

import msgspec

from engine.errors import InvalidRequest

T = TypeVar("T")


def decoded(body: bytes, kind: type[T]) -> T:
    """A decoded JSON body. Whatever the bytes are, the only error is InvalidRequest.

    msgspec raises other errors for invalid UTF-8 and for very deep nesting.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON") from None
