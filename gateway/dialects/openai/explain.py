"""Turn a decoder's complaint into OpenAI's words, with the field's path as its `param`."""

import re

from gateway.base.errors import InvalidRequest
from gateway.dialects.complaints import split_complaint

_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_VALUE = re.compile(r"^Invalid (?:enum )?value '?(.*?)'?$", re.DOTALL)
_MAX_SHOWN = 64


def validation_error(complaint: str) -> InvalidRequest:
    what, path = split_complaint(complaint)
    path = path.removeprefix(".")
    if field := _FIELD.match(what):
        name = field[2][:_MAX_SHOWN]
        where = f"{path}.{name}" if path else name
        if field[1] == "missing required":
            return InvalidRequest(f"Missing required parameter: '{where}'.", where)
        return InvalidRequest(f"Unrecognized request argument supplied: {where}", where)
    if value := _VALUE.match(what):
        shown = value[1][:_MAX_SHOWN]
        what = f"Invalid value: '{shown}'"
    else:
        what = what.replace("`", "'")
    return InvalidRequest(f"{path}: {what}" if path else what, path or None)
