"""Tools of a request that the vendor defines or runs, beside those of the client. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

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
