"""The bound on what one call of a tool in the messages may have, in every dialect."""

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.weigh import check_keys

_encode = msgspec.json.Encoder().encode


def check_input(value: object, path: str, bounds: RequestBounds) -> None:
    """Raise InvalidRequest for an input that is too long; its keys were counted with the body."""
    if len(_encode(value)) > bounds.max_call_bytes:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_call_bytes} bytes of JSON")


def check_arguments(arguments: str, path: str, bounds: RequestBounds) -> None:
    """The same for an input that is written as JSON in a string.

    The keys of its objects are counted here. Raise TooLarge for too many.
    """
    written = arguments.encode() if len(arguments) <= bounds.max_call_bytes else b""
    if len(arguments) > bounds.max_call_bytes or len(written) > bounds.max_call_bytes:
        raise InvalidRequest(f"{path}: may have at most {bounds.max_call_bytes} bytes of JSON")
    check_keys(written, bounds.max_object_keys)
