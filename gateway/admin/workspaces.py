"""Workspaces in the admin API: /admin/v1/workspaces."""

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, Meta, UnsetType

from gateway.admin.bodies import JsonBody, given_values
from gateway.admin.controller import AdminController
from gateway.admin.structs.fleet import AutoCacheMode, AutoCacheTtl, Workspace, WorkspaceReport
from gateway.base.errors import GatewayError, NotFound
from gateway.http.auth import OWN_WORKSPACE, AdminRequest
from gateway.http.services import Services
from gateway.ledger.access import ID_PATTERN, MAX_DISPLAY_NAME, NAME_PATTERN
from gateway.limits.admission import month_of
from gateway.limits.keyring import EFFECTIVE_SECONDS

# More than any installation needs, and within the integers of the database.
Count = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
NanoDollars = Annotated[int, Meta(ge=0, le=1_000_000_000_000_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
WorkspaceId = Annotated[str, Meta(pattern=ID_PATTERN, max_length=64)]
DisplayName = Annotated[str, Meta(min_length=1, max_length=MAX_DISPLAY_NAME, pattern=NAME_PATTERN)]


class WorkspaceChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is left out stays as it is; null lifts a limit, or takes the installation's setting."""

    display_name: DisplayName | UnsetType = UNSET
    requests_per_minute: Count | UnsetType | None = UNSET
    tokens_per_minute: Count | UnsetType | None = UNSET
    max_concurrency: Count | UnsetType | None = UNSET
    monthly_spend_nano: NanoDollars | UnsetType | None = UNSET
    lease_share: Share | UnsetType | None = UNSET
    auto_cache: AutoCacheMode | UnsetType | None = UNSET
    auto_cache_ttl: AutoCacheTtl | UnsetType | None = UNSET


class NewWorkspace(WorkspaceChanges, kw_only=True):
    """A limit that is left out is none; the display name is the id."""

    id: WorkspaceId


class WorkspacesController(AdminController):
    path = "/admin/v1/workspaces"

    @get(
        operation_id="listWorkspaces",
        summary="Workspaces and their limits; without an admin key, one's own.",
        opt=OWN_WORKSPACE,
    )
    async def list_workspaces(
        self, request: AdminRequest, services: NamedDependency[Services]
    ) -> list[Workspace]:
        found = await services.workspaces.all()
        return [workspace for workspace in found if request.user.sees(workspace.id)]

    @post(
        operation_id="createWorkspace",
        summary="Make a workspace.",
        status_code=200,
        dependencies={"asked": JsonBody(NewWorkspace)},
    )
    async def create(
        self, asked: NamedDependency[NewWorkspace], services: NamedDependency[Services]
    ) -> WorkspaceReport:
        values = given_values(asked)
        now = services.clock.wall()
        made = await services.workspaces.create(values.pop("id"), now, values)
        return await _changed(services, made)

    @get(
        "/{workspace_id:str}",
        operation_id="getWorkspace",
        summary="One workspace, its limits, and what its month has cost.",
        opt=OWN_WORKSPACE,
    )
    async def get_workspace(
        self,
        request: AdminRequest,
        workspace_id: FromPath[str],
        services: NamedDependency[Services],
    ) -> WorkspaceReport:
        if not request.user.sees(workspace_id):
            # The answer for an unknown workspace: it tells nothing of those of others.
            raise NotFound(f"workspace: no workspace `{workspace_id[:64]}`")
        return await _report(services, await services.workspaces.get(workspace_id))

    @post(
        "/{workspace_id:str}",
        operation_id="changeWorkspace",
        summary="Change a workspace's name or limits.",
        status_code=200,
        dependencies={"asked": JsonBody(WorkspaceChanges)},
    )
    async def change(
        self,
        workspace_id: FromPath[str],
        asked: NamedDependency[WorkspaceChanges],
        services: NamedDependency[Services],
    ) -> WorkspaceReport:
        changed = await services.workspaces.change(workspace_id, given_values(asked))
        return await _changed(services, changed)

    @post(
        "/{workspace_id:str}/archive",
        operation_id="archiveWorkspace",
        summary="Switch all keys of a workspace off.",
        status_code=200,
    )
    async def archive(
        self, workspace_id: FromPath[str], services: NamedDependency[Services]
    ) -> WorkspaceReport:
        now = services.clock.wall()
        return await _changed(services, await services.workspaces.archive(workspace_id, now))

    @post(
        "/{workspace_id:str}/restore",
        operation_id="restoreWorkspace",
        summary="Switch them on again.",
        status_code=200,
    )
    async def restore(
        self, workspace_id: FromPath[str], services: NamedDependency[Services]
    ) -> WorkspaceReport:
        return await _changed(services, await services.workspaces.restore(workspace_id))


async def _changed(services: Services, workspace: Workspace) -> WorkspaceReport:
    await take_over(services)
    return await _report(services, workspace)


async def take_over(services: Services) -> None:
    """Apply a change here at once. Where this fails the background refresh applies it."""
    try:
        await services.keyring.refresh()
    except GatewayError:
        return


async def _report(services: Services, workspace: Workspace) -> WorkspaceReport:
    month = month_of(services.clock.wall())
    spent = await services.workspaces.spent([workspace.id], month)
    return WorkspaceReport(
        workspace=workspace,
        month=month,
        spent_nano=spent[workspace.id],
        effective_within_seconds=EFFECTIVE_SECONDS,
    )
