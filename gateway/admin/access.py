"""Workspaces and API keys in the admin API: /admin/v1/workspaces, /admin/v1/keys.

Only the answer that makes a key contains it.
"""

import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.admin.controller import AdminController, Deps, action, given_values, view
from gateway.admission.accounts import month_of
from gateway.admission.keyring import EFFECTIVE_SECONDS
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.http.auth import AdminRequest
from gateway.http.services import Services
from gateway.ledger.access import (
    AUTO_CACHE,
    ID_PATTERN,
    MAX_DISPLAY_NAME,
    MAX_KEY_NAME,
    NAME_PATTERN,
    ApiKey,
    new_key,
)
from gateway.structs import fleet as structs

_KEY_ID = re.compile(r"key_[0-9a-f]{16}")
_DAY_SECONDS = 86_400.0
_YEAR_SECONDS = 31_536_000.0
# More than any installation needs, and within the integers of the database.
Count = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
NanoDollars = Annotated[int, Meta(ge=0, le=1_000_000_000_000_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Days = Annotated[int, Meta(ge=1, le=3650)]
WorkspaceId = Annotated[str, Meta(pattern=ID_PATTERN, max_length=64)]
DisplayName = Annotated[str, Meta(min_length=1, max_length=MAX_DISPLAY_NAME, pattern=NAME_PATTERN)]
KeyName = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_NAME, pattern=NAME_PATTERN)]
Moment = Annotated[datetime, Meta(tz=True)]


class KeyChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A field that is left out stays as it is. With null the workspace's policy counts."""

    auto_cache: structs.AutoCacheMode | UnsetType | None = UNSET
    auto_cache_ttl: structs.AutoCacheTtl | UnsetType | None = UNSET


class NewKey(KeyChanges, kw_only=True):
    workspace: WorkspaceId
    name: KeyName = "unnamed"
    scope: structs.KeyScope = "inference"
    expires_at: Moment | None = None


class WorkspaceChanges(KeyChanges, kw_only=True):
    """A field that is left out stays as it is. Null lifts a limit. For a policy null means that the
    installation's policy counts."""

    display_name: DisplayName | UnsetType = UNSET
    requests_per_minute: Count | UnsetType | None = UNSET
    tokens_per_minute: Count | UnsetType | None = UNSET
    max_concurrency: Count | UnsetType | None = UNSET
    monthly_spend_nano: NanoDollars | UnsetType | None = UNSET
    lease_share: Share | UnsetType | None = UNSET
    keep_days: Days | UnsetType | None = UNSET
    may_approximate: bool | UnsetType = UNSET


class NewWorkspace(WorkspaceChanges, kw_only=True):
    """A limit that is left out is no limit. Without a display name it is the id."""

    id: WorkspaceId


class Rotation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The old key works for `grace_seconds` more. With null it works until it is revoked."""

    grace_seconds: Annotated[float, Meta(ge=0, le=_YEAR_SECONDS)] | None = _DAY_SECONDS


class WorkspacesController(AdminController):
    path = "/admin/v1/workspaces"

    @view("/", "listWorkspaces", "Workspaces and their limits; without an admin key, one's own.")
    async def list_workspaces(
        self, request: AdminRequest, services: Deps
    ) -> list[structs.Workspace]:
        rows = await services.workspaces.all()
        return [workspace for workspace in rows if request.user.sees(workspace.id)]

    @action("/", "createWorkspace", "Make a workspace.", NewWorkspace)
    async def create(
        self, payload: NamedDependency[NewWorkspace], services: Deps
    ) -> structs.WorkspaceReport:
        values = given_values(payload)
        now = services.clock.wall()
        workspace = await services.workspaces.create(values.pop("id"), now, values)
        return await _changed(services, workspace)

    @view(
        "/{workspace_id:str}",
        "getWorkspace",
        "One workspace, its limits, and what its month has cost.",
    )
    async def get_workspace(
        self, request: AdminRequest, workspace_id: FromPath[str], services: Deps
    ) -> structs.WorkspaceReport:
        if not request.user.sees(workspace_id):
            # The same answer as for an unknown workspace, so it tells nothing of other workspaces.
            raise NotFound(f"workspace: no workspace `{workspace_id[:64]}`")
        return await _report(services, await services.workspaces.get(workspace_id))

    @action(
        "/{workspace_id:str}",
        "changeWorkspace",
        "Change a workspace's name or limits.",
        WorkspaceChanges,
    )
    async def change(
        self,
        workspace_id: FromPath[str],
        payload: NamedDependency[WorkspaceChanges],
        services: Deps,
    ) -> structs.WorkspaceReport:
        values = given_values(payload)
        workspace = await services.workspaces.change(workspace_id, values)
        if "keep_days" in values:
            # Where this fails, the writer's own round deletes within a minute.
            with suppress(GatewayError):
                await services.turns.content_writer.forget()
        return await _changed(services, workspace)

    @action(
        "/{workspace_id:str}/archive", "archiveWorkspace", "Switch all keys of a workspace off."
    )
    async def archive(self, workspace_id: FromPath[str], services: Deps) -> structs.WorkspaceReport:
        now = services.clock.wall()
        return await _changed(services, await services.workspaces.archive(workspace_id, now))

    @action("/{workspace_id:str}/restore", "restoreWorkspace", "Switch them on again.")
    async def restore(self, workspace_id: FromPath[str], services: Deps) -> structs.WorkspaceReport:
        return await _changed(services, await services.workspaces.restore(workspace_id))


async def _changed(services: Services, workspace: structs.Workspace) -> structs.WorkspaceReport:
    await _take_over(services)
    return await _report(services, workspace)


async def _take_over(services: Services) -> None:
    """Apply a change here at once. Where this fails the background refresh applies it."""
    with suppress(GatewayError):
        await services.keyring.refresh()


async def _report(services: Services, workspace: structs.Workspace) -> structs.WorkspaceReport:
    month = month_of(services.clock.wall())
    spent = await services.workspaces.spent([workspace.id], month)
    return structs.WorkspaceReport(
        workspace=workspace,
        month=month,
        spent_nano=spent[workspace.id],
        effective_within_seconds=EFFECTIVE_SECONDS,
    )


class KeysController(AdminController):
    path = "/admin/v1/keys"

    @view(
        "/",
        "listKeys",
        "Keys without their secrets; without an admin key, those of one's own workspace.",
    )
    async def list_keys(
        self,
        request: AdminRequest,
        services: Deps,
        workspace: Annotated[str | None, QueryParameter(name="workspace", max_length=64)] = None,
    ) -> list[structs.KeyInfo]:
        now = services.clock.wall()
        return [
            _info(key, now)
            for key in await services.keys.all(request.user.workspace)
            if workspace in (None, key.workspace)
        ]

    @action("/", "createKey", "Make a key of a workspace, and show it this once.", NewKey)
    async def create(self, payload: NamedDependency[NewKey], services: Deps) -> structs.MadeKey:
        now = services.clock.wall()
        expires_at = payload.expires_at
        if expires_at is not None and expires_at <= now:
            raise InvalidRequest("expires_at: must be in the future")
        try:
            expires_at = None if expires_at is None else expires_at.astimezone(UTC)
        except OverflowError:
            raise InvalidRequest("expires_at: must be before the year 10000 in UTC") from None
        await services.workspaces.get(payload.workspace)
        key = new_key()
        key_id = await services.keys.create(
            key, payload.workspace, payload.name, now, scope=payload.scope, expires_at=expires_at
        )
        policy = given_values(payload)
        row = await services.keys.change(
            key_id, {name: policy[name] for name in AUTO_CACHE if name in policy}
        )
        await _take_over(services)
        return structs.MadeKey(key=key, info=_info(row, now))

    @action(
        "/{key_id:str}",
        "changeKey",
        "Change what is held of a key's requests that mark nothing.",
        KeyChanges,
    )
    async def change(
        self, key_id: FromPath[str], payload: NamedDependency[KeyChanges], services: Deps
    ) -> structs.KeyInfo:
        _check_id(key_id)
        key = await services.keys.change(key_id, given_values(payload))
        await _take_over(services)
        return _info(key, services.clock.wall())

    @action(
        "/{key_id:str}/rotate",
        "rotateKey",
        "Make a key's successor, and show it this once; the old one ends after a grace.",
        Rotation,
    )
    async def rotate(
        self, key_id: FromPath[str], payload: NamedDependency[Rotation], services: Deps
    ) -> structs.MadeKey:
        now = services.clock.wall()
        key = new_key()
        _check_id(key_id)
        row = await services.keys.rotate(key_id, key, now, payload.grace_seconds)
        await _take_over(services)
        return structs.MadeKey(key=key, info=_info(row, now))

    @action("/{key_id:str}/revoke", "revokeKey", "End a key.")
    async def revoke(self, key_id: FromPath[str], services: Deps) -> structs.Revoked:
        """Revoking a key again changes nothing."""
        _check_id(key_id)
        now = services.clock.wall()
        await services.keys.revoke(key_id, now)
        key = await services.keys.change(key_id, {})
        await _take_over(services)
        return structs.Revoked(info=_info(key, now), effective_within_seconds=EFFECTIVE_SECONDS)


def _check_id(key_id: str) -> None:
    if _KEY_ID.fullmatch(key_id) is None:
        raise NotFound("key: no key has such an id")


def _info(key: ApiKey, now: datetime) -> structs.KeyInfo:
    values = {name: getattr(key, name) for name in structs.Key.__struct_fields__}
    return structs.KeyInfo(**values, is_active=key.works(now))
