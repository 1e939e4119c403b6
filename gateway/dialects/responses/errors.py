"""Failures that name a part of the request, in this API's names.

All else is as in OpenAI's dialect.
"""

import re
from collections.abc import Sequence

from gateway.base.errors import DemandRefused, GatewayError, InvalidRequest, PromptTooLong

_TOOL = re.compile(r"^tools\[(\d+)\]\.input_schema\b")
_SCHEMA = re.compile(r"^output_schema\b")


def in_own_names(failure: GatewayError, paths: Sequence[str]) -> GatewayError:
    """The failure to raise. `paths` are those of the prompt's segments, tools first."""
    match failure:
        case PromptTooLong():
            failure.param = "input"
        case DemandRefused():
            message = _TOOL.sub(lambda found: _named(found, paths), str(failure))
            message = _SCHEMA.sub("text.format.schema", message)
            return InvalidRequest(message, message.split(" ", 1)[0].rstrip(":"))
        case _:
            pass
    return failure


def _named(found: re.Match[str], paths: Sequence[str]) -> str:
    index = int(found[1])
    return f"{paths[index]}.parameters" if index < len(paths) else found[0]
