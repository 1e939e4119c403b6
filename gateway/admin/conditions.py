"""What is wrong now, in the admin API: the list that `/readyz` has too."""

from typing import Annotated

from litestar.params import QueryParameter

from gateway.admin.controller import AdminController, Deps, view
from gateway.http.auth import AdminRequest
from gateway.structs.conditions import Condition


class ConditionsController(AdminController):
    path = "/admin/v1/conditions"

    @view("/", "listConditions", "What is wrong now: since when, why, and what to do.")
    async def conditions(
        self,
        request: AdminRequest,
        services: Deps,
        with_new: Annotated[bool, QueryParameter(name="with_new")] = False,
    ) -> list[Condition]:
        """The worst first. A key of one workspace sees how engines and the ledger fare, without
        what an operator does then. With `with_new` also what has not lasted long enough to be told:
        an engine that has just begun to load tells nothing of what it holds."""
        is_for_all = request.user.workspace is not None
        return services.conditions.now(is_for_all=is_for_all, with_new=with_new)
