"""API keys on the request path: found by digest, in memory.

A key that is not in memory is looked up once, with a deadline. A wrong key is remembered briefly.
Every two seconds the version of keys and workspaces is read from the database. If it has changed,
they are read again. While the database is away, cached keys go on working for `max_stale_seconds`.
"""

import asyncio
import hmac
import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from typing import NamedTuple
from uuid import UUID

from gateway.admission.rates import Buckets
from gateway.base.background import repeat
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, LedgerUnavailable, Overloaded, RateLimited
from gateway.base.grants import NO_LIMITS, AutoCache, limits_of
from gateway.base.logs import get_logger
from gateway.base.settings import Settings
from gateway.ledger.access import DEFAULT_WORKSPACE, LOOKUP_SECONDS, ApiKey, Keys, digest_of
from gateway.prompt.ask import Principal
from gateway.structs.fleet import Workspace

POLL_SECONDS = 2.0
# The time until a change counts on every gateway whose database answers: one pause and two queries.
EFFECTIVE_SECONDS = int(POLL_SECONDS + 2 * LOOKUP_SECONDS)
# Keys are read again after this time even if the version is the same.
_RELOAD_SECONDS = 600.0
# How many entries are made before the event loop does other work.
_SLICE = 500
_MAX_KEYS = 10_000
_MAX_WRONG = 10_000
_WRONG_SECONDS = 5.0
_MAX_LOOKUPS = 32
# The resolution of a key's last use. Each interval may cost the database one write.
_LAST_USE_SECONDS = 60.0


class _CachedKey(NamedTuple):
    principal: Principal
    digest: str
    expires_at: datetime | None


class KeyRing:
    """The keys that work, in memory, refreshed in the background."""

    def __init__(self, keys: Keys, settings: Settings, clock: Clock) -> None:
        # The policy of workspaces and keys that have none of their own.
        self._auto_cache = AutoCache(settings.auto_cache, settings.auto_cache_ttl)
        self._keys = keys
        self._master = settings.master_secret.get_secret_value().encode()
        self._clock = clock
        self._max_stale_seconds = settings.tuning.keys_stale_seconds
        self._cached_keys: dict[str, _CachedKey] = {}
        self._wrong: OrderedDict[str, float] = OrderedDict()
        # Bounds the look-ups of unknown keys of one address.
        self._rate = Buckets(settings.tuning.key_lookups_per_minute, clock.monotonic)
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._refreshing = asyncio.Lock()
        self._version = -1
        self._generation = 0
        self._confirmed = self._loaded = clock.monotonic()
        self._used: dict[str, datetime] = {}
        self._noted: dict[str, float] = {}
        self.workspaces: dict[str, Workspace] = {}
        # Whether the database has sample data. It is False until the first read.
        self.is_sample = False
        # An installation is one organization. Its id is stable and derived from the secret.
        identity = hmac.new(self._master, b"organization", sha256).digest()
        self.organization = str(UUID(bytes=identity[:16], version=4))
        self._configured: _CachedKey | None = None
        if settings.api_key is not None:
            digest = digest_of(settings.api_key.get_secret_value())
            principal = self.principal(DEFAULT_WORKSPACE, f"key_{digest[:16]}")
            self._configured = _CachedKey(principal, digest, None)

    def scope_of(self, workspace: str) -> str:
        """The workspace's cache salt. It is the same on every gateway and reveals nothing."""
        return scope_under(self._master, workspace)

    def in_memory(self, key: str) -> Principal | None:
        """The principal of a key that is in memory. The key may have expired."""
        digest = digest_of(key)
        configured = self._configured
        is_configured = configured is not None and configured.digest == digest
        entry = configured if is_configured else self._cached_keys.get(digest)
        return None if entry is None else entry.principal

    async def find(self, key: str, address: str = "") -> Principal | None:
        """The workspace and rights of a key; None for a key that does not work. Raise
        LedgerUnavailable if the key is not in memory and the database is away, Overloaded if too
        many look-ups run, and RateLimited if this address has made too many."""
        digest = digest_of(key)
        configured = self._configured
        is_fresh = self._clock.monotonic() - self._confirmed <= self._max_stale_seconds
        cached: _CachedKey | None = None
        if configured is not None and configured.digest == digest:
            cached = configured
        elif is_fresh:
            cached = self._cached_keys.get(digest)
        if cached is None:
            cached = await self._look_up(digest, address)
        # The look-up by digest does not reveal how close a guess was. This comparison takes the
        # same time for all keys as well.
        if cached is None or not hmac.compare_digest(cached.digest, digest):
            return None
        if cached.expires_at is not None and cached.expires_at <= self._clock.wall():
            return None
        key_id = cached.principal.key_id
        now = self._clock.monotonic()
        if now - self._noted.get(key_id, -math.inf) >= _LAST_USE_SECONDS:
            self._noted[key_id] = now
            self._used[key_id] = self._clock.wall()
        return cached.principal

    async def poll(self) -> None:
        """Read keys and workspaces again if they have changed."""
        asked_at = self._clock.monotonic()
        is_due = asked_at - self._loaded >= _RELOAD_SECONDS
        if is_due or await self._keys.version() != self._version:
            await self.refresh()
        else:
            self._confirmed = asked_at

    async def refresh(self) -> None:
        """Read keys and limits again, and forget keys that have ended. One refresh at a time, so
        that an older read never replaces a newer one."""
        async with self._refreshing:
            asked_at = self._clock.monotonic()
            now = self._clock.wall()
            configured = self._configured
            digests = [] if configured is None else [configured.digest]
            directory = await self._keys.directory(_MAX_KEYS, now, digests)
            owners = {name: self._owner(name, row) for name, row in directory.workspaces.items()}
            cached: dict[str, _CachedKey] = {}
            for number, key in enumerate(directory.keys):
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
                owner = owners.get(key.workspace)
                if owner is not None:
                    cached[key.digest] = _entry(key, owner)
            # From here on, look-ups that began earlier no longer count.
            self._generation += 1
            self._version = directory.version
            self.workspaces = directory.workspaces
            self.is_sample = directory.is_sample
            self._cached_keys = cached
            self._confirmed = self._loaded = asked_at
            if configured is not None:
                # The configured key works without a database. With one, its limits and its expiry
                # count too.
                principal = self.principal(DEFAULT_WORKSPACE, configured.principal.key_id)
                expires_at = now if configured.digest in directory.has_ended else None
                self._configured = _CachedKey(principal, configured.digest, expires_at)

    async def run(self, stopping: asyncio.Event) -> None:
        async def look() -> None:
            await self.poll()
            await self._write_uses()

        await repeat(stopping, POLL_SECONDS, look, "key_refresh_failed")
        with suppress(GatewayError):  # a last use is known only to the minute
            await self._write_uses()

    async def _look_up(self, digest: str, address: str) -> _CachedKey | None:
        now = self._clock.monotonic()
        if self._wrong.get(digest, 0.0) > now:
            return None
        seconds = self._rate.wait(address, 1)
        if seconds > 0:
            message = "too many unknown API keys come from this address"
            raise RateLimited(message=message, retry_after=math.ceil(seconds))
        self._rate.take(address, 1)
        if self._lookups.locked():
            raise Overloaded
        generation = self._generation
        async with self._lookups:
            key_and_workspace = await self._keys.find(digest, self._clock.wall())
        if key_and_workspace is None:
            self._wrong[digest] = now + _WRONG_SECONDS
            while len(self._wrong) > _MAX_WRONG:
                self._wrong.popitem(last=False)
            return None
        key, workspace = key_and_workspace
        cached = _entry(key, self._owner(workspace.id, workspace))
        if generation == self._generation:
            # Otherwise the key may have been revoked between the look-up and the refresh.
            self._cached_keys[digest] = cached
        return cached

    def principal(self, workspace: str, key_id: str) -> Principal:
        """A workspace's principal as it is now, without a check of the key."""
        return replace(self._owner(workspace, self.workspaces.get(workspace)), key_id=key_id)

    def _owner(self, workspace: str, row: Workspace | None) -> Principal:
        """What the workspace's keys have in common. `row` is None where the database was not read
        yet."""
        policy = self._auto_cache
        if row is not None:
            policy = policy.but(row.auto_cache, row.auto_cache_ttl)
        return Principal(
            workspace,
            "",
            self.scope_of(workspace),
            limits=NO_LIMITS if row is None else limits_of(row),
            lease_share=None if row is None else row.lease_share,
            auto_cache=policy,
            keeps_contents=row is not None and row.keep_days is not None,
            may_approximate=row is not None and row.may_approximate,
        )

    async def _write_uses(self) -> None:
        uses = self._used
        self._used = {}
        try:
            await self._keys.touch(uses)
        except GatewayError:
            self._used = uses | self._used
            raise
        key_ids = {entry.principal.key_id for entry in self._cached_keys.values()}
        self._noted = {key_id: at for key_id, at in self._noted.items() if key_id in key_ids}


def scope_under(master: bytes, workspace: str) -> str:
    """A workspace's cache salt under an installation's master secret."""
    return hmac.new(master, workspace.encode(), sha256).hexdigest()[:32]


def _entry(key: ApiKey, owner: Principal) -> _CachedKey:
    policy = owner.auto_cache.but(key.auto_cache, key.auto_cache_ttl)
    principal = replace(owner, key_id=key.id, key_scope=key.scope, auto_cache=policy)
    return _CachedKey(principal, key.digest, key.expires_at)


async def look_at_database(keyring: KeyRing, keys: Keys, settings: Settings, clock: Clock) -> None:
    """Look at the database before the first turn. A gateway whose database has sample data serves
    no turns. A database that is away is asked again in the background."""
    try:
        await keyring.refresh()
    except LedgerUnavailable as error:
        get_logger("gateway").warning("database_not_looked_at", error=str(error))
    if keyring.is_sample:
        get_logger("gateway").warning("sample_data", serves_turns=False)
    elif settings.api_key is not None:
        secret = settings.api_key.get_secret_value()
        try:  # without a database the configured key works from memory
            await keys.create(secret, DEFAULT_WORKSPACE, "configured", clock.wall())
        except LedgerUnavailable as error:
            get_logger("gateway").warning("key_not_stored", error=str(error))
