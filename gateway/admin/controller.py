"""What the controllers of the admin API share: decorators, bodies, ranges and filters.

Bodies are JSON objects. One error names all bad fields. A large body is read in a thread, as large
bodies of the model APIs are. A handler gets a range of time as a dependency: `of` is the range with
all filters, and `span` has only the two moments.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Controller, Request, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import QueryParameter, RawBody

from gateway.base.bounds import DEFAULT_BOUNDS, RequestBounds
from gateway.base.clock import Clock
from gateway.base.errors import InvalidRequest
from gateway.dialects.bodies import check_values, unreadable
from gateway.http.auth import OWN_WORKSPACE, AdminAuth, AdminRequest
from gateway.http.query import check_query
from gateway.http.services import Services, services_of
from gateway.ledger.access import IN_WORDS
from gateway.ledger.reads.sums import Range

Deps = NamedDependency[Services]
"""The gateway's parts, as a parameter of a handler."""


class AdminController(Controller):
    """Every request needs a key that may see what it asks for. Every query parameter must be what
    the description of the API says."""

    middleware = (AdminAuth,)
    before_request = staticmethod(check_query)


def view(path: str, operation_id: str, summary: str, opt: Any = OWN_WORKSPACE) -> get:
    """The decorator of a handler that reads. Keys that see only their own workspace may call it
    too. With `opt` None only admin keys may."""
    return get(path, operation_id=operation_id, summary=summary, opt=opt)


def removal(path: str, operation_id: str, summary: str) -> delete:
    """The decorator of a handler that removes something and answers 200."""
    return delete(path, operation_id=operation_id, summary=summary, status_code=200)


def action(
    path: str,
    operation_id: str,
    summary: str,
    body: type[msgspec.Struct] | None = None,
    **opt: Any,
) -> post:
    """The decorator of a handler that changes something and answers 200. A handler with a `body`
    takes it as its parameter `payload`."""
    return post(
        path,
        operation_id=operation_id,
        summary=summary,
        status_code=200,
        dependencies={} if body is None else {"payload": JsonBody(body)},
        opt=opt,
    )


_MAX_PROBLEMS = 16
_MAX_REASON = 300
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class JsonBody(Provide):
    """A dependency: the request's body, decoded as a `kind`. It raises UnsupportedMedia for another
    media type, and InvalidRequest for a wrong body."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        async def read(request: Request[Any, Any, Any], body: RawBody) -> Any:
            services = services_of(request)
            key = request.user.key_id
            bounds = services.bounds
            return await services.workers.run(key, len(body), decode_body, body, kind, bounds)

        super().__init__(read)
        self.kind = kind


def decode_body(body: bytes, kind: type[BodyT], bounds: RequestBounds = DEFAULT_BOUNDS) -> BodyT:
    """Decode a body. Raise InvalidRequest with one `field: reason` for each wrong field, and
    TooLarge for a body beyond the bounds."""
    check_values(body, bounds.max_json_values, bounds.max_object_keys)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None
    if not isinstance(document, dict):
        raise InvalidRequest("The request body must be a JSON object")
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
            # If the message has a regular expression, words replace the message. Otherwise the
            # message ends with the path to a value inside the field.
            message = str(error)
            words = (words for pattern, words in IN_WORDS.items() if repr(pattern) in message)
            problems.append(f"{name}: {next(words, message)[:_MAX_REASON]}")
    num_more = len(problems) - _MAX_PROBLEMS
    if num_more > 0:
        problems[_MAX_PROBLEMS:] = [f"{num_more} more"]
    if problems:
        raise InvalidRequest("; ".join(problems))
    return kind(**values)


def given_values(body: msgspec.Struct) -> dict[str, Any]:
    """The values of the fields that a body has, by name. Fields that it leaves out are missing."""
    values = {name: getattr(body, name) for name in body.__struct_fields__}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


MAX_MS = 253_402_300_799_000
"""The end of the year 9999, in milliseconds since 1970."""
HOUR_MS = 3_600_000
_MAX_SPAN_MS = 3 * 366 * 86_400_000
WorkspaceName = Annotated[str | None, QueryParameter(name="workspace", min_length=1, max_length=64)]
EngineName = Annotated[str | None, QueryParameter(name="engine", min_length=1, max_length=64)]
ModelName = Annotated[str | None, QueryParameter(name="model", min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The moments that a query names, in milliseconds since 1970; None where it names none."""

    since_ms: Annotated[int | None, QueryParameter(name="since_ms", ge=0, le=MAX_MS)] = None
    until_ms: Annotated[int | None, QueryParameter(name="until_ms", ge=0, le=MAX_MS)] = None


def now_ms(clock: Clock) -> int:
    """The wall clock's time in milliseconds since 1970."""
    return int(clock.wall().timestamp() * 1000)


def range_of(
    services: Services,
    span: Span,
    workspace: str | None = None,
    *,
    engine: str | None = None,
    model: str | None = None,
) -> Range:
    """The range of a span, by default the last hour. Raise InvalidRequest for an empty range and
    for one of more than three years."""
    until = now_ms(services.clock) if span.until_ms is None else span.until_ms
    since = max(until - HOUR_MS, 0) if span.since_ms is None else span.since_ms
    if since >= until:
        raise InvalidRequest("since_ms: must be before until_ms")
    if until - since > _MAX_SPAN_MS:
        raise InvalidRequest("since_ms: a range is three years at most")
    return Range(since_ms=since, until_ms=until, workspace=workspace, engine=engine, model=model)


def _asked_range(
    request: AdminRequest,
    services: NamedDependency[Services],
    span: NamedDependency[Span],
    workspace: WorkspaceName = None,
    engine: EngineName = None,
    model: ModelName = None,
) -> Range:
    """The query's range, confined to what the viewer may see. Raise InvalidRequest or Forbidden."""
    confined = request.user.confine(workspace)
    return range_of(services, span, confined, engine=engine, model=model)


ASKED_SPAN = {"span": Provide(Span, sync_to_thread=False)}
ASKED_RANGE = {
    **ASKED_SPAN,
    "of": Provide(_asked_range, sync_to_thread=False),
}
