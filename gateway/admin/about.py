"""Whose key is asking, and what can be filtered by: the first call of every dashboard."""

import msgspec
from litestar import get
from litestar.di import NamedDependency

from gateway.admin.controller import AdminController
from gateway.admin.meanings import DEFINITIONS, Definition
from gateway.admin.ranges import HOUR_MS, now_ms
from gateway.http.auth import OWN_WORKSPACE, AdminRequest
from gateway.http.services import Services
from gateway.ledger.reads.sums import Range

_CHOICES_MS = 31 * 86_400_000


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`workspace` is the only workspace that this key sees; None is all.

    `workspaces`, `engines` and `models` are the values of the filters: those that exist, and those
    of turns of the last 31 days. `served` are the models that engines have now. `sample`: the
    ledger holds made-up turns. `may_send`: this key can call the model APIs here.
    `has_placeholder_prices`: the operator gave no prices, so money counts the shipped reference
    price.
    """

    now_ms: int
    workspace: str | None
    sample: bool
    may_send: bool
    has_placeholder_prices: bool
    workspaces: list[str]
    engines: list[str]
    models: list[str]
    served: list[str]
    definitions: dict[str, Definition]


class AboutController(AdminController):
    path = "/admin/v1/about"

    @get(
        operation_id="getAbout",
        summary="Who is asking, what can be filtered by, and what each number means.",
        opt=OWN_WORKSPACE,
    )
    async def about(self, request: AdminRequest, services: NamedDependency[Services]) -> About:
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
