"""API keys in the admin API: /admin/v1/keys. A key is only in the answer that makes it."""

import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import UNSET, Meta, UnsetType

from gateway.admin.bodies import JsonBody, given_values
from gateway.admin.controller import AdminController
from gateway.admin.structs.fleet import (
    AutoCacheMode,
    AutoCacheTtl,
    KeyInfo,
    KeyScope,
    MadeKey,
    Revoked,
)
from gateway.admin.workspaces import WorkspaceId, take_over
from gateway.base.errors import InvalidRequest, NotFound
from gateway.http.auth import OWN_WORKSPACE, AdminRequest
from gateway.http.services import Services
from gateway.ledger.access import AUTO_CACHE, MAX_KEY_NAME, NAME_PATTERN, ApiKey, new_key
from gateway.limits.keyring import EFFECTIVE_SECONDS

_KEY_ID = re.compile(r"key_[0-9a-f]{16}")
_DAY_SECONDS = 86_400.0
_YEAR_SECONDS = 31_536_000.0
KeyName = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_NAME, pattern=NAME_PATTERN)]
Moment = Annotated[datetime, Meta(tz=True)]


class NewKey(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    workspace: WorkspaceId
    name: KeyName = "unnamed"
    scope: KeyScope = "inference"
    expires_at: Moment | None = None
    auto_cache: AutoCacheMode | UnsetType | None = UNSET
    auto_cache_ttl: AutoCacheTtl | UnsetType | None = UNSET


class KeyChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is left out stays as it is; null takes the workspace's policy."""

    auto_cache: AutoCacheMode | UnsetType | None = UNSET
    auto_cache_ttl: AutoCacheTtl | UnsetType | None = UNSET


class Rotation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The old key works for `grace_seconds` more; with null until it is revoked."""

    grace_seconds: Annotated[float, Meta(ge=0, le=_YEAR_SECONDS)] | None = _DAY_SECONDS


class KeysController(AdminController):
    path = "/admin/v1/keys"

    @get(
        operation_id="listKeys",
        summary="Keys without their secrets; without an admin key, those of one's own workspace.",
        opt=OWN_WORKSPACE,
    )
    async def list_keys(
        self,
        request: AdminRequest,
        services: NamedDependency[Services],
        workspace: Annotated[str | None, QueryParameter(name="workspace", max_length=64)] = None,
    ) -> list[KeyInfo]:
        now = services.clock.wall()
        return [
            _info(key, now)
            for key in await services.keys.all(request.user.workspace)
            if workspace in (None, key.workspace)
        ]

    @post(
        operation_id="createKey",
        summary="Make a key of a workspace, and show it this once.",
        status_code=200,
        dependencies={"asked": JsonBody(NewKey)},
    )
    async def create(
        self, asked: NamedDependency[NewKey], services: NamedDependency[Services]
    ) -> MadeKey:
        now = services.clock.wall()
        expires_at = _checked_end(asked.expires_at, now)
        await services.workspaces.get(asked.workspace)
        key = new_key()
        key_id = await services.keys.create(
            key, asked.workspace, asked.name, now, scope=asked.scope, expires_at=expires_at
        )
        policy = given_values(asked)
        await services.keys.change(
            key_id, {name: policy[name] for name in AUTO_CACHE if name in policy}
        )
        await take_over(services)
        return MadeKey(key=key, info=_info(await _get(services, key_id), now))

    @post(
        "/{key_id:str}",
        operation_id="changeKey",
        summary="Change what is held of a key's requests that mark nothing.",
        status_code=200,
        dependencies={"asked": JsonBody(KeyChanges)},
    )
    async def change(
        self,
        key_id: FromPath[str],
        asked: NamedDependency[KeyChanges],
        services: NamedDependency[Services],
    ) -> KeyInfo:
        _check_id(key_id)
        changed = await services.keys.change(key_id, given_values(asked))
        await take_over(services)
        return _info(changed, services.clock.wall())

    @post(
        "/{key_id:str}/rotate",
        operation_id="rotateKey",
        summary="Make a key's successor, and show it this once; the old one ends after a grace.",
        status_code=200,
        dependencies={"asked": JsonBody(Rotation)},
    )
    async def rotate(
        self,
        key_id: FromPath[str],
        asked: NamedDependency[Rotation],
        services: NamedDependency[Services],
    ) -> MadeKey:
        now, key = services.clock.wall(), new_key()
        _check_id(key_id)
        made = await services.keys.rotate(key_id, key, now, asked.grace_seconds)
        await take_over(services)
        return MadeKey(key=key, info=_info(made, now))

    @post(
        "/{key_id:str}/revoke",
        operation_id="revokeKey",
        summary="End a key.",
        status_code=200,
    )
    async def revoke(self, key_id: FromPath[str], services: NamedDependency[Services]) -> Revoked:
        """Revoking a key again changes nothing."""
        await _get(services, key_id)
        now = services.clock.wall()
        await services.keys.revoke(key_id, now)
        await take_over(services)
        info = _info(await _get(services, key_id), now)
        return Revoked(info=info, effective_within_seconds=EFFECTIVE_SECONDS)


async def _get(services: Services, key_id: str) -> ApiKey:
    _check_id(key_id)
    found = await services.keys.get(key_id)
    if found is None:
        raise NotFound(f"key: no key `{key_id}`")
    return found


def _checked_end(moment: datetime | None, now: datetime) -> datetime | None:
    """Raise InvalidRequest for a moment that is over or has no date in UTC."""
    if moment is None:
        return None
    if moment <= now:
        raise InvalidRequest("expires_at: must be in the future")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest("expires_at: must be before the year 10000 in UTC") from None


def _check_id(key_id: str) -> None:
    if _KEY_ID.fullmatch(key_id) is None:
        raise NotFound("key: no key has such an id")


def _info(key: ApiKey, now: datetime) -> KeyInfo:
    return KeyInfo(
        id=key.id,
        workspace=key.workspace,
        name=key.name,
        scope=key.scope,
        is_active=key.works(now),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
        replaces=key.replaces,
        auto_cache=key.auto_cache,
        auto_cache_ttl=key.auto_cache_ttl,
    )
