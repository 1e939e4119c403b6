"""Tools that the vendor defines or runs (web search, code execution, bash, MCP and the like).

No server here runs them and no model here was trained on them, so each is left out of the prompt
and told. Its place in `tools` stays taken, so that paths are the client's. A marker on it counts as
one on the tool before.
"""

from typing import TypeVar

import msgspec
from msgspec import Raw

from gateway.dialects.anthropic.content import CacheControl, ForeignTool, Tool
from gateway.dialects.anthropic.request import CountTokensRequest
from gateway.dialects.foreign import decode_tools, kinds_of_tools

RequestT = TypeVar("RequestT", bound=CountTokensRequest)


class _Declared(msgspec.Struct):
    type: str
    name: str = ""
    cache_control: CacheControl | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
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
        tools = kinds_of_tools(fields["tools"], "custom")
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if tools is None:
        return None
    fields["tools"] = Raw(b"[]")
    request = decoder.decode(msgspec.json.encode(fields))
    request.tools = decode_tools(tools, _tool.decode, _foreign)
    return request


def _foreign(tool: Raw) -> Tool:
    declared = _declared.decode(tool)
    return ForeignTool(
        name=declared.type,
        input_schema={},
        description=declared.name,
        cache_control=declared.cache_control,
    )
