"""Bodies of the admin API: JSON objects, of which every bad field is named at once."""

from typing import Any, TypeVar

import msgspec

from gateway.base.errors import InvalidRequest

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Raise InvalidRequest with one `field: reason` for each field that is wrong."""
    document = _document(body)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    problems = [f"{name[:64]}: unknown field" for name in document if name not in fields]
    values = {}
    for name, field in fields.items():
        if name not in document:
            if field.required:
                problems.append(f"{name}: field required")
            continue
        try:
            values[field.name] = msgspec.convert(document[name], field.type)
        except msgspec.ValidationError as error:
            # Of what lies deeper than the field itself the path follows the reason.
            problems.append(f"{name}: {error}")
    if problems:
        raise InvalidRequest("; ".join(problems))
    return kind(**values)


def given_values(body: msgspec.Struct) -> dict[str, Any]:
    """What a body says, without what it leaves as it is."""
    values = {name: getattr(body, name) for name in body.__struct_fields__}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON") from None
    if not isinstance(document, dict):
        raise InvalidRequest("The request body must be a JSON object")
    return document
