"""The newest error answers of this gateway: /admin/v1/refusals."""

from typing import Annotated

from litestar.params import QueryParameter

from gateway.admin.controller import AdminController, view
from gateway.admin.ranges import WorkspaceName
from gateway.admin.structs.usage import Refusal
from gateway.http.auth import AdminRequest
from gateway.http.refusals import Refusals

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
    ) -> list[Refusal]:
        """Requests that were refused before their turn began are in no ledger, only here."""
        kept: Refusals = request.app.state.refusals
        own = request.user.confine(workspace)
        return kept.newest(own, request_id, limit)
