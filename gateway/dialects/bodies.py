"""What reading a body needs in every dialect: bounds, the vendor's tools, a decoder's complaint.

A decoder makes an object of each JSON value in one call that nothing can interrupt, so the number
is bounded in front of it. An object of very many keys is slow to make and to read, so the number of
its keys is bounded too. A short piece of the body is looked at in each call, so other threads go
on.

An answer that is gathered is short, but with the log probabilities of its tokens it is a thousand
times as long, and all of them are in memory until it is whole: its tokens are bounded too.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Raw

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest, TooLarge

_PIECE_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
"""The densest body of this size is decoded in a millisecond."""
_LEAST_BYTES = 2
"""The least bytes of a value and its separator."""
_LEAST_KEY_BYTES = 5
"""The least bytes of a key and its value."""
_OPENED, _COLON = b"{:"
_MAX_PASSES, _FEW_KEYS = 4, 4
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'{}[:,"')
_CLOSED = re.compile(rb"\{:*+\}")
"""An object without objects in it, as its marks alone."""


def check_values(body: bytes, most: int, most_keys: int) -> None:
    """Raise TooLarge for more JSON values than `most`, keys not counted; linear in the body.

    The same for an object of more keys than `most_keys`. Each value but the first comes behind a
    comma or a bracket that is in no string. Of bytes that are no JSON it may count anything up to
    the number of their commas, colons and brackets.
    """
    if len(body) <= min(_LEAST_BYTES * most, _LEAST_KEY_BYTES * most_keys, _SMALL_BYTES):
        return
    pieces: list[bytes] = []
    found = 1
    for marks in _marks(body):
        found += sum(map(marks.count, (b",", b"[", b"{")))
        if found > most:
            raise TooLarge(f"the request body has more than {most} JSON values")
        pieces.append(marks)
    if sum(piece.count(b":") for piece in pieces) > most_keys:
        keys = _Keys(most_keys)
        for piece in pieces:
            keys.take(piece.translate(None, b",["))


def check_keys(body: bytes, most_keys: int) -> None:
    """`check_values` of the keys alone, for JSON that stands in a string of the body."""
    check_values(body, len(body) + 1, most_keys)


class _Keys:
    """Counts the keys of the objects that are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._too_many = b":" * (most + 1)
        self._small = [b"{" + b":" * keys + b"}" for keys in range(min(most, _FEW_KEYS) + 1)]
        self._open = [0]

    def take(self, marks: bytes) -> None:
        """`marks` are the next colons and braces of the body that are in no string.

        Most objects begin and end in one piece with few in them: they are taken out together. The
        marks that are left are counted one by one.
        """
        for _ in range(_MAX_PASSES):
            before = len(marks)
            for closed in self._small:
                marks = marks.replace(closed, b"")
            if self._too_many in marks:
                self._refuse()
            marks = _CLOSED.sub(b"", marks)
            if len(marks) == before:
                break
        counts = self._open
        for mark in marks:
            if mark == _COLON:
                counts[-1] += 1
                if counts[-1] > self._most:
                    self._refuse()
            elif mark == _OPENED:
                counts.append(0)
            elif len(counts) > 1:
                counts.pop()

    def _refuse(self) -> NoReturn:
        raise TooLarge(f"an object of the request body has more than {self._most} keys")


def _marks(body: bytes) -> Iterator[bytes]:
    """The commas, colons, braces and opening brackets that are in no string, a piece at a time."""
    is_inside, rest = 0, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        # A backslash escapes the next character.
        num_open = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - num_open :]
        piece = piece[: len(piece) - num_open]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two quotes side by side change nothing for what stands around them.
        strings = piece.translate(None, _NO_MARKS).replace(b'""', b"").split(b'"')
        yield b"".join(strings[is_inside::2])
        is_inside = (is_inside + len(strings) - 1) % 2


_MARK = " - at `$"
_MAX_PATH = 256
"""Longer than any path of a request's own fields."""


def split_complaint(complaint: str) -> tuple[str, str]:
    """The reason and the path, such as `.messages[0].role`; "" is the whole body."""
    what, mark, path = complaint.rpartition(_MARK)
    if mark and path.endswith("`") and len(path) <= _MAX_PATH:
        return what, path[:-1]
    return complaint, ""


class UntypedBody:
    """An untyped body. Only the parts that are read are decoded."""

    def __init__(self, body: bytes) -> None:
        self._parts: dict[tuple[str | int, ...], dict[str, Raw] | list[Raw]] = {}
        self._whole = Raw(body)

    def at(self, steps: Sequence[str | int]) -> Any:
        """The text, number, true or false at a path.

        None for any other value, and if there is none.
        """
        raw: Raw | None = self._whole
        for depth, step in enumerate(steps):
            if raw is None:
                return None
            part = self._part(tuple(steps[:depth]), raw)
            if isinstance(part, dict) and isinstance(step, str):
                raw = part.get(step)
            elif isinstance(part, list) and isinstance(step, int) and step < len(part):
                raw = part[step]
            else:
                return None
        return None if raw is None else _decoded(raw, str | int | float | bool | None)

    def _part(self, place: tuple[str | int, ...], raw: Raw) -> dict[str, Raw] | list[Raw]:
        if place not in self._parts:
            self._parts[place] = _decoded(raw, dict[str, Raw] | list[Raw]) or []
        return self._parts[place]


def _decoded(raw: Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


ToolT = TypeVar("ToolT")


class _Kind(msgspec.Struct):
    type: Any = None


_tools = msgspec.json.Decoder(list[Raw])
_kind = msgspec.json.Decoder(_Kind)


def kinds_of_tools(raw: bytes, own_type: str) -> list[tuple[Raw, bool]] | None:
    """Each tool, and whether it is foreign: of another type than `own_type`.

    None where none is, and where the bytes are no list of objects.
    """
    try:
        tools = _tools.decode(raw)
        kinds = [_kind.decode(tool).type for tool in tools]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    are_foreign = [isinstance(kind, str) and kind != own_type for kind in kinds]
    return list(zip(tools, are_foreign, strict=True)) if any(are_foreign) else None


def decode_tools(
    tools: Sequence[tuple[Raw, bool]],
    decode_own: Callable[[Raw], ToolT],
    decode_foreign: Callable[[Raw], ToolT],
) -> list[ToolT]:
    """Raise msgspec.ValidationError with the path in the whole body."""
    return [
        _placed(index, tool, decode_foreign if is_foreign else decode_own)
        for index, (tool, is_foreign) in enumerate(tools)
    ]


def _placed(index: int, tool: Raw, decode: Callable[[Raw], ToolT]) -> ToolT:
    try:
        return decode(tool)
    except msgspec.ValidationError as error:
        what, mark, path = str(error).rpartition(" - at `$")
        where = path if mark else "`"
        raise msgspec.ValidationError(
            f"{what if mark else error} - at `$.tools[{index}]{where}"
        ) from None


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


def bounded_tokens(
    asked: int | None, num_probs: int, bounds: RequestBounds, *, field: str, param: str | None
) -> int:
    """The most tokens that each choice of the answer may have.

    `asked` is the request's limit, None without one: then the answer ends at the bound. `num_probs`
    are the log probabilities of one token in all choices. Raise InvalidRequest for a higher limit.
    """
    most = max(bounds.max_logprobs // num_probs, 1)
    if asked is None:
        return most
    if asked > most:
        raise InvalidRequest(
            f"{field}: must be at most {most} with so many log probabilities in an answer that is"
            f" gathered: {num_probs} of each token, {bounds.max_logprobs} in all",
            param,
        )
    return asked
