"""Workspaces and their keys. A limit that is None is none."""

from datetime import datetime

import msgspec


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    display_name: str
    archived_at: datetime | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    monthly_spend_nano: int | None = None
    lease_share: float | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without what makes it one."""

    id: str
    workspace: str
    name: str
    scope: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    workspace: Workspace


class KeyId(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is told this once."""

    key: str
    info: KeyId


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    info: KeyId
