"""The range of time that a request of the admin API asks for, and its filters.

Every handler takes these query parameters by naming a dependency: `of` is the range with all
filters, `span` the two moments alone.
"""

from typing import Annotated

import msgspec
from litestar.di import NamedDependency, Provide
from litestar.params import QueryParameter

from gateway.base.clock import Clock
from gateway.base.errors import InvalidRequest
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads.sums import Range

MAX_MS = 253_402_300_799_000
"""The end of the year 9999, in milliseconds since 1970."""
HOUR_MS = 3_600_000
_MAX_SPAN_MS = 3 * 366 * 86_400_000

SinceMs = Annotated[int | None, QueryParameter(name="since_ms", ge=0, le=MAX_MS)]
UntilMs = Annotated[int | None, QueryParameter(name="until_ms", ge=0, le=MAX_MS)]
WorkspaceName = Annotated[str | None, QueryParameter(name="workspace", min_length=1, max_length=64)]
EngineName = Annotated[str | None, QueryParameter(name="engine", min_length=1, max_length=64)]
ModelName = Annotated[str | None, QueryParameter(name="model", min_length=1, max_length=128)]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The moments that a query names, in milliseconds; None where it names none."""

    since_ms: int | None
    until_ms: int | None


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
    """The range of a span; the last hour by default.

    Raise InvalidRequest for an empty range and for one that is longer than three years.
    """
    until = now_ms(services.clock) if span.until_ms is None else span.until_ms
    since = max(until - HOUR_MS, 0) if span.since_ms is None else span.since_ms
    if since >= until:
        raise InvalidRequest("since_ms: must be before until_ms")
    if until - since > _MAX_SPAN_MS:
        raise InvalidRequest("since_ms: a range is three years at most")
    return Range(since_ms=since, until_ms=until, workspace=workspace, engine=engine, model=model)


def _asked_span(since_ms: SinceMs = None, until_ms: UntilMs = None) -> Span:
    return Span(since_ms=since_ms, until_ms=until_ms)


def _asked_range(
    request: AdminRequest,
    services: NamedDependency[Services],
    span: NamedDependency[Span],
    workspace: WorkspaceName = None,
    engine: EngineName = None,
    model: ModelName = None,
) -> Range:
    """The range of the query, confined to what the viewer may see.

    Raise InvalidRequest for a wrong range, and Forbidden for another's workspace.
    """
    own = request.user.confine(workspace)
    return range_of(services, span, own, engine=engine, model=model)


ASKED_RANGE = {
    "span": Provide(_asked_span, sync_to_thread=False),
    "of": Provide(_asked_range, sync_to_thread=False),
}
