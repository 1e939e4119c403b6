"""What reading a body needs in every dialect: its bounds, its fields, the vendor's tools.

A decoder makes an object of each JSON value in one call that nothing can interrupt. So the number
of values, and of one object's keys, is bounded before it, a short piece of the body at a time. An
answer with log probabilities is a thousand times as long as one without. If it goes out in one
piece it is in memory until it is whole, so its tokens are bounded too.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest, TooLarge

_PIECE_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
"""The densest body of this size is decoded in a millisecond."""
_LEAST_BYTES = 2
"""The fewest bytes of a value and its separator."""
_LEAST_KEY_BYTES = 5
"""The fewest bytes of a key and its value."""
_OPENED, _COLON = b"{:"
_MAX_PASSES = 4
_CLOSED = re.compile(rb"\{:*+\}")
"""An object without objects in it, of which only the marks are left."""
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'{}[:,"')


def check_values(body: bytes, most: int, most_keys: int) -> None:
    """Raise TooLarge for more than `most` JSON values, or for an object of more than `most_keys`
    keys. Keys do not count as values.

    The time is linear in the body. Bytes that are not JSON count by their commas, colons and
    brackets at most.
    """
    if len(body) <= min(_LEAST_BYTES * most, _LEAST_KEY_BYTES * most_keys, _SMALL_BYTES):
        return
    pieces: list[bytes] = []
    num_values = 1
    for marks in _marks(body):
        num_values += marks.count(b",") + marks.count(b"[") + marks.count(b"{")
        if num_values > most:
            raise TooLarge(f"the request body has more than {most} JSON values")
        pieces.append(marks)
    refusal = TooLarge(f"an object of the request body has more than {most_keys} keys")
    # How many keys each open object has, the outermost first.
    num_keys = [0]
    too_many = b":" * (most_keys + 1)
    for piece in pieces:
        marks = piece.translate(None, b",[")
        # Most objects begin and end in one piece and have few in them. These are removed together.
        for _ in range(_MAX_PASSES):
            if too_many in marks:
                raise refusal
            marks, num_closed = _CLOSED.subn(b"", marks)
            if not num_closed:
                break
        for mark in marks:
            if mark == _COLON:
                num_keys[-1] += 1
                if num_keys[-1] > most_keys:
                    raise refusal
            elif mark == _OPENED:
                num_keys.append(0)
            elif len(num_keys) > 1:
                num_keys.pop()


def _marks(body: bytes) -> Iterator[bytes]:
    """The commas, colons, braces and opening brackets that are in no string, a piece at a time."""
    is_inside = 0
    rest = b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        # A backslash at the end escapes the next piece's first character, so it is read with that.
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        end = len(piece) - num_backslashes % 2
        rest = piece[end:]
        piece = piece[:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # An empty string does not change what is inside a string and what is not.
        strings = piece.translate(None, _NO_MARKS).replace(b'""', b"").split(b'"')
        yield b"".join(strings[is_inside::2])
        is_inside = (is_inside + len(strings) - 1) % 2


_MARK = " - at `$"
_MAX_PATH = 256
"""The longest path in a complaint. A request's fields have shorter ones."""
_MAX_NEUTRAL_BYTES = 1024
MAX_DEPTH = 64
_INT_LIMIT = 2**63
_encode = msgspec.json.Encoder().encode
RequestT = TypeVar("RequestT", bound=msgspec.Struct)
MadeT = TypeVar("MadeT")
ToolT = TypeVar("ToolT")


class _Kind(msgspec.Struct):
    type: Any = None


_kind = msgspec.json.Decoder(_Kind)
_fields = msgspec.json.Decoder(dict[str, Raw])
_raws = msgspec.json.Decoder(list[Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def unreadable(error: Exception) -> InvalidRequest:
    """The error for bytes that are not JSON."""
    match error:
        case UnicodeDecodeError():
            return InvalidRequest("The request body is not valid UTF-8")
        case RecursionError():
            return InvalidRequest("The request body is nested too deeply")
        case _:
            reason = str(error).removeprefix("JSON is malformed: ")
            return InvalidRequest(f"The request body is not valid JSON: {reason}")


def read(make: Callable[[], MadeT], explain: Callable[[str], InvalidRequest]) -> MadeT:
    """Call `make`, which decodes a body. Raise InvalidRequest where it fails. `explain` translates
    a type's complaint into the dialect's words."""
    try:
        return make()
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except _UNREADABLE as error:
        raise unreadable(error) from None


def split_complaint(complaint: str) -> tuple[str, str]:
    """The reason and the path, such as `.messages[0].role`; "" is the whole body."""
    reason, mark, path = complaint.rpartition(_MARK)
    if mark and path.endswith("`") and len(path) <= _MAX_PATH:
        return reason, path[:-1]
    return complaint, ""


def check_schema(schema: dict[str, Any], path: str, bounds: RequestBounds) -> None:
    """Raise InvalidRequest for the first bound that the schema breaks. `path` is in the message."""
    level: list[Any] = [schema]
    num_values = 0
    num_properties = 0
    for _ in range(bounds.max_schema_depth):
        num_values += len(level)
        if num_values > bounds.max_schema_values:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_values} values")
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                properties = item.get("properties")
                if isinstance(properties, dict):
                    num_properties += len(properties)
                next_level.extend(item.values())
            elif isinstance(item, list):
                next_level.extend(item)
            elif isinstance(item, int) and not -_INT_LIMIT <= item < _INT_LIMIT:
                raise InvalidRequest(f"{path}: integers must fit in 64 bits")
        if num_properties > bounds.max_schema_properties:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_properties} properties")
        if not next_level:
            break
        level = next_level
    else:
        raise InvalidRequest(f"{path}: nested more than {bounds.max_schema_depth} levels deep")
    if len(_encode(schema)) > bounds.max_schema_bytes:
        raise InvalidRequest(f"{path}: longer than {bounds.max_schema_bytes} bytes")


def check_json(value: dict[str, Any], path: str) -> None:
    """Raise InvalidRequest for an object that can't cross to the engine."""
    fault = crossing_fault(value)
    if fault is not None:
        raise InvalidRequest(f"{path}: {fault}")


def crossing_fault(value: dict[str, Any]) -> str | None:
    """Why an object can't cross to the engine: it is nested beyond MAX_DEPTH, or has an integer
    beyond 64 bits. None where it can."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            for child in children:
                if isinstance(child, dict | list):
                    next_level.append(child)
                elif isinstance(child, int) and not -_INT_LIMIT <= child < _INT_LIMIT:
                    return "integers must fit in 64 bits"
        if not next_level:
            return None
        level = next_level
    return f"nested more than {MAX_DEPTH} levels deep"


def fields_of(body: bytes, bounds: RequestBounds) -> dict[str, Raw]:
    """The fields of a body, undecoded, without those that are null."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    try:
        fields = _fields.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body must be a JSON object") from None
    except _UNREADABLE as error:
        raise unreadable(error) from None
    return {name: value for name, value in fields.items() if bytes(value) != b"null"}


def is_neutral(value: Raw, allowed: tuple[Any, ...]) -> bool:
    """Whether the value is one of `allowed`. These are short, so a long value is not decoded.

    A boolean equals only a boolean: true is not 1, but 1.0 is.
    """
    if len(value) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        decoded = msgspec.json.decode(value)
    except _UNREADABLE as error:
        raise unreadable(error) from None
    return any(
        bool(decoded == neutral) and isinstance(decoded, bool) == isinstance(neutral, bool)
        for neutral in allowed
    )


def decode_with_foreign_tools(
    decoder: msgspec.json.Decoder[RequestT],
    body: bytes,
    own_types: Collection[str],
    decode_own: Callable[[Raw], ToolT],
    decode_foreign: Callable[[Raw], ToolT],
) -> RequestT:
    """Decode a request. A tool of another type than `own_types` is foreign and decoded by itself.

    Raise msgspec.ValidationError with the path in the whole body.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        try:
            fields = _fields.decode(body)
            tools = _raws.decode(fields["tools"])
            kinds = [_kind.decode(tool).type for tool in tools]
        except (KeyError, *_UNREADABLE):
            kinds = []
        foreign = [isinstance(kind, str) and kind not in own_types for kind in kinds]
        if not any(foreign):
            raise
    request = decoder.decode(msgspec.json.encode({**fields, "tools": []}))
    decoded: list[ToolT] = []
    for index, (tool, is_foreign) in enumerate(zip(tools, foreign, strict=True)):
        try:
            decoded.append((decode_foreign if is_foreign else decode_own)(tool))
        except msgspec.ValidationError as error:
            reason, mark, path = str(error).rpartition(_MARK)
            if not mark:
                reason = str(error)
                path = "`"
            message = f"{reason}{_MARK}.tools[{index}]{path}"
            raise msgspec.ValidationError(message) from None
    return msgspec.structs.replace(request, tools=decoded)


def bound_output(
    request: msgspec.Struct,
    field: str,
    num_probs: int,
    bounds: RequestBounds,
    path: str | None = None,
) -> None:
    """Bound the tokens of an answer in one piece that has `num_probs` log probabilities a token.

    `field` names the request's own limit, which is set where the request has none. Raise
    InvalidRequest where it is too high.
    """
    number: int | None = getattr(request, field)
    most = max(bounds.max_logprobs // num_probs, 1)
    if number is not None and number > most:
        raise InvalidRequest(
            f"{path or field}: must be at most {most} with so many log probabilities in an answer"
            f" that is gathered: {num_probs} of each token, {bounds.max_logprobs} in all"
        )
    setattr(request, field, most if number is None else number)
