"""The leases that engines hold now."""

import msgspec

from dashboard.admin.shapes.savings import PrefixReport


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    entry: str
    tokens: int
    blocks: int
    ttl: str
    state: str
    expires_in_seconds: float
    reads: int
    name: str | None = None
    shared_by: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One live entry; `prefix` is what the ledger knows of it."""

    engine: str
    workspace: str | None
    entry: EntryInfo
    prefix: PrefixReport | None = None
    cached_content: str | None = None


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    entry: str
