"""Bodies of the admin API are JSON objects. An error names the bad fields together.

A large body is read in a thread, as those of the model APIs are: a key of a workspace may send one
to the reports that take a POST.
"""

from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.di import Provide
from litestar.params import RawBody

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import check_values
from gateway.http.generation import check_media
from gateway.http.services import services_of
from gateway.ledger.access import IN_WORDS

_MAX_PROBLEMS = 16
_MAX_REASON = 300
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class JsonBody(Provide):
    """A dependency: the request's body as a `kind`.

    The description of the API reads `kind` from the handler's dependencies. A request of another
    media type is refused with UnsupportedMedia, a wrong body with InvalidRequest.
    """

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        async def read(request: Request[Any, Any, Any], body: RawBody) -> Any:
            check_media(request)
            services, key = services_of(request), request.user.key_id
            bounds = services.bounds
            return await services.workers.run(key, len(body), decode_body, body, kind, bounds)

        super().__init__(read)
        self.kind = kind


def decode_body(body: bytes, kind: type[BodyT], bounds: RequestBounds = DEFAULT_BOUNDS) -> BodyT:
    """Raise InvalidRequest with one `field: reason` for each field that is wrong, or TooLarge."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
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
            # The reason ends with the path to a value inside the field.
            problems.append(f"{name}: {_reason(str(error))[:_MAX_REASON]}")
    if (num_more := len(problems) - _MAX_PROBLEMS) > 0:
        problems[_MAX_PROBLEMS:] = [f"{num_more} more"]
    if problems:
        raise InvalidRequest("; ".join(problems))
    return kind(**values)


def _reason(said: str) -> str:
    """A regular expression is told in words."""
    return next((words for pattern, words in IN_WORDS.items() if repr(pattern) in said), said)


def given_values(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that a body has, without those that it leaves out."""
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
