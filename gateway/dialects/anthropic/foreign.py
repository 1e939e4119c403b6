"""Tools that the vendor defines or runs (web search, code execution, bash, MCP and the like).

No server here runs them and no model here was trained on them, so each is left out of the prompt
and told. Its place in `tools` stays taken, so that paths are the client's. A marker on it counts as
one on the tool before.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from gateway.dialects.anthropic.content import CacheControl, ForeignTool, Tool
from gateway.dialects.anthropic.request import CountTokensRequest

RequestT = TypeVar("RequestT", bound=CountTokensRequest)


class _Kind(msgspec.Struct):
    type: Any = None


class _Declared(msgspec.Struct):
    type: str
    name: str = ""
    cache_control: CacheControl | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_tools = msgspec.json.Decoder(list[Raw])
_kind = msgspec.json.Decoder(_Kind)
_declared = msgspec.json.Decoder(_Declared)
_tool = msgspec.json.Decoder(Tool)


def decode_with_foreign_tools(
    decoder: msgspec.json.Decoder[RequestT], body: bytes
) -> RequestT | None:
    """A request whose `tools` has such a tool; None where it has none.

    Raise msgspec.ValidationError with the path in the whole body.
    """
    try:
        fields = _fields.decode(body)
        tools = _tools.decode(fields["tools"])
        kinds = [_kind.decode(tool).type for tool in tools]
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not any(_is_foreign(kind) for kind in kinds):
        return None
    fields["tools"] = Raw(b"[]")
    request = decoder.decode(msgspec.json.encode(fields))
    request.tools = [
        _decode(index, tool, is_foreign=_is_foreign(kind))
        for index, (tool, kind) in enumerate(zip(tools, kinds, strict=True))
    ]
    return request


def _is_foreign(kind: Any) -> bool:
    return isinstance(kind, str) and kind != "custom"


def _decode(index: int, tool: Raw, *, is_foreign: bool) -> Tool:
    try:
        if not is_foreign:
            return _tool.decode(tool)
        declared = _declared.decode(tool)
    except msgspec.ValidationError as error:
        what, mark, path = str(error).rpartition(" - at `$")
        where = path if mark else "`"
        raise msgspec.ValidationError(
            f"{what if mark else error} - at `$.tools[{index}]{where}"
        ) from None
    return ForeignTool(
        name=declared.type,
        input_schema={},
        description=declared.name,
        cache_control=declared.cache_control,
    )
