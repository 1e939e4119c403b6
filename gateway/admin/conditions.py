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
        """The worst conditions come first. A key of one workspace sees the conditions of engines
        and of the ledger, without what an operator does then. With `with_new` the list also has
        conditions that have not lasted long enough to be told, such as an engine that has just
        begun to load."""
        is_for_all = request.user.workspace is not None
        return services.conditions.now(is_for_all=is_for_all, with_new=with_new)
