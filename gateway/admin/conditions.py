"""What is wrong now, in the admin API: the list that `/readyz` has too."""

from gateway.admin.controller import AdminController, Deps, view
from gateway.http.auth import AdminRequest
from gateway.structs.conditions import Condition


class ConditionsController(AdminController):
    path = "/admin/v1/conditions"

    @view("/", "listConditions", "What is wrong now: since when, why, and what to do.")
    async def conditions(self, request: AdminRequest, services: Deps) -> list[Condition]:
        """The worst first. A key of one workspace sees how engines and the ledger fare, without
        what an operator does then."""
        is_for_all = request.user.workspace is not None
        return services.conditions.now(is_for_all=is_for_all)
