"""Strict decoding of request bodies."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.errors import InvalidRequest

T = TypeVar("T")


def decoder_of(kind: type[T]) -> Callable[[bytes], T]:
    """A decoder of JSON bodies; whatever the bytes are, its only error is InvalidRequest.

    msgspec lets invalid UTF-8 and very deep nesting out as errors of their own.
    """
    decoder = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> T:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise InvalidRequest("the body is not valid JSON") from None

    return decode
