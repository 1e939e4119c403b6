"""Whose key is asking, and what can be filtered by: the first call of every dashboard."""

from litestar import get

from gateway.admin.controller import AdminController, Deps
from gateway.admin.meanings import DEFINITIONS
from gateway.admin.ranges import HOUR_MS, now_ms
from gateway.admin.structs.fleet import About
from gateway.http.auth import OWN_WORKSPACE, AdminRequest
from gateway.ledger.reads.sums import Range

_CHOICES_MS = 31 * 86_400_000


class AboutController(AdminController):
    path = "/admin/v1/about"

    @get(
        operation_id="getAbout",
        summary="Who is asking, what can be filtered by, and what each number means.",
        opt=OWN_WORKSPACE,
    )
    async def about(self, request: AdminRequest, services: Deps) -> About:
        now = now_ms(services.clock)
        own = request.user.workspace
        of = Range(since_ms=now - _CHOICES_MS, until_ms=now + HOUR_MS, workspace=own)
        found = list(await services.queries.totals_by(of, ("workspace_id", "engine", "model")))
        workspaces = {workspace for workspace, _, _ in found}
        workspaces |= {w.id for w in await services.workspaces.all() if request.user.sees(w.id)}
        engines = {engine for _, engine, _ in found if engine}
        if own is None:
            engines |= {engine.name for engine in services.fleet.engines}
        return About(
            now_ms=now,
            workspace=own,
            sample=services.keyring.is_sample,
            may_send=request.user.may_send and not services.keyring.is_sample,
            has_placeholder_prices=services.prices.is_placeholder,
            workspaces=sorted(workspaces),
            engines=sorted(engines),
            models=sorted({model for _, _, model in found}),
            served=sorted(services.fleet.served),
            definitions=DEFINITIONS,
        )
