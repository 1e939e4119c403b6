"""The newest error answers, and how many of each kind there were."""

from contextlib import suppress
from typing import Annotated

from litestar.di import NamedDependency
from litestar.params import QueryParameter

from gateway.admin.controller import (
    ASKED_SPAN,
    AdminController,
    Deps,
    Span,
    WorkspaceName,
    range_of,
    view,
)
from gateway.base.errors import GatewayError
from gateway.http.auth import AdminRequest
from gateway.http.refusals import Refusals
from gateway.ledger.refusals import MINUTE_MS
from gateway.structs import usage as structs

RequestId = Annotated[str | None, QueryParameter(name="request_id", min_length=1, max_length=64)]


class RefusalsController(AdminController):
    path = "/admin/v1/refusals"

    @view("/", "listRefusals", "The newest error answers of this gateway since its start.")
    async def refusals(
        self,
        request: AdminRequest,
        workspace: WorkspaceName = None,
        request_id: RequestId = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> list[structs.Refusal]:
        """Requests that were refused before their turn began. The ledger has no row of them."""
        kept: Refusals = request.app.state.refusals
        confined = request.user.confine(workspace)
        return kept.newest(confined, request_id, limit)

    @view("/limits", "listLimited", "What limits refused on this gateway since its start, by key.")
    async def limited(
        self, request: AdminRequest, workspace: WorkspaceName = None
    ) -> list[structs.Limited]:
        kept: Refusals = request.app.state.refusals
        return kept.limited(request.user.confine(workspace))


class RefusalCountsController(AdminController):
    path = "/admin/v1/refusals/counts"
    dependencies = ASKED_SPAN

    @view("/", "countRefusals", "How many requests were refused, by minute, key and reason.")
    async def counts(
        self,
        request: AdminRequest,
        services: Deps,
        span: NamedDependency[Span],
        workspace: WorkspaceName = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 100,
    ) -> structs.RefusalCounts:
        """Requests to any gateway that were answered with an error before they were turns. The
        newest minutes come first. The sum has all minutes that overlap the range. What another
        gateway refused is counted here after some seconds."""
        of = range_of(services, span, request.user.confine(workspace))
        with suppress(GatewayError):  # the next flush writes the counts
            await services.refusals.flush()
        since_ms = of.since_ms // MINUTE_MS * MINUTE_MS
        return await services.refused.read(since_ms, of.until_ms, of.workspace, limit)
