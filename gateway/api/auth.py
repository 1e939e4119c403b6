"""Who is asking. Keys are compared by digest, in constant time; the request path holds them all.

A key that is not in memory is looked up once, with a deadline; a wrong one is remembered briefly so
that guessing costs the database nothing.
"""

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any
from uuid import UUID

from litestar.connection import ASGIConnection
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from pydantic import SecretStr

from gateway.ask import Principal
from gateway.background import pause
from gateway.errors import GatewayError, MissingKey, Overloaded, Unauthenticated
from gateway.ledger.keys import ApiKey, Keys, digest_of
from gateway.logs import get_logger

_MAX_KEYS = 10_000
_MAX_WRONG = 10_000
_WRONG_SECONDS = 5.0
_REFRESH_SECONDS = 30.0
_MAX_LOOKUPS = 32
DEFAULT_WORKSPACE = "default"

Connection = ASGIConnection[Any, Any, Any, Any]


class KeyRing:
    """The keys that work, in memory, refreshed in the background."""

    def __init__(
        self,
        keys: Keys,
        master: SecretStr,
        monotonic: Callable[[], float],
        configured: SecretStr | None,
    ) -> None:
        self._keys = keys
        self._master = master.get_secret_value().encode()
        self._monotonic = monotonic
        self._known: dict[str, Principal] = {}
        self._wrong: OrderedDict[str, float] = OrderedDict()
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._log = get_logger("keys")
        # An installation is one organization; it needs an id that stays and tells nothing.
        identity = hmac.new(self._master, b"organization", sha256).digest()
        self.organization = str(UUID(bytes=identity[:16], version=4))
        self._configured: dict[str, Principal] = {}
        if configured is not None:
            digest = digest_of(configured.get_secret_value())
            principal = self._principal(DEFAULT_WORKSPACE, f"key_{digest[:16]}")
            self._configured = {digest: principal}

    def scope_of(self, workspace: str) -> str:
        """The workspace's cache salt: the same on every gateway, and telling nothing."""
        return hmac.new(self._master, workspace.encode(), sha256).hexdigest()[:32]

    async def find(self, key: str) -> Principal | None:
        digest = digest_of(key)
        if (known := self._known.get(digest) or self._configured.get(digest)) is not None:
            return known
        now = self._monotonic()
        if self._wrong.get(digest, 0.0) > now:
            return None
        if self._lookups.locked():
            raise Overloaded
        async with self._lookups:
            found = await self._keys.find(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            self._wrong[digest] = now + _WRONG_SECONDS
            while len(self._wrong) > _MAX_WRONG:
                self._wrong.popitem(last=False)
            return None
        principal = self._known[digest] = self._principal(found.workspace, found.id)
        return principal

    async def refresh(self) -> None:
        """Take over new keys and forget revoked ones."""
        active = await self._keys.active(_MAX_KEYS)
        self._known = {key.digest: self._of(key) for key in active}

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await self.refresh()
            except GatewayError as error:
                self._log.warning("key_refresh_failed", error=str(error))
            await pause(stopping, _REFRESH_SECONDS)

    def _of(self, key: ApiKey) -> Principal:
        return self._principal(key.workspace, key.id)

    def _principal(self, workspace: str, key_id: str) -> Principal:
        return Principal(workspace, key_id, self.scope_of(workspace))


class AdminGate:
    def __init__(self, key: SecretStr | None) -> None:
        self._digest = digest_of(key.get_secret_value()) if key else None

    def check(self, key: str) -> None:
        if self._digest is None:
            raise Unauthenticated("the admin API is switched off: HOLDFAST_ADMIN_KEY is not set")
        if not hmac.compare_digest(digest_of(key), self._digest):
            raise Unauthenticated


class KeyAuth(AbstractAuthenticationMiddleware):
    """Sets the request's Principal, and when it arrived."""

    async def authenticate_request(self, connection: Connection) -> AuthenticationResult:
        services = connection.app.state.services
        connection.scope["state"]["arrived"] = services.clock.monotonic()
        principal = await services.keyring.find(_presented_key(connection))
        if principal is None:
            raise Unauthenticated
        return AuthenticationResult(user=principal, auth=None)


class AdminAuth(AbstractAuthenticationMiddleware):
    async def authenticate_request(self, connection: Connection) -> AuthenticationResult:
        connection.app.state.services.admin.check(_presented_key(connection))
        return AuthenticationResult(user=None, auth=None)


def _presented_key(connection: Connection) -> str:
    if key := connection.headers.get("x-api-key"):
        return key
    kind, _, token = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    raise MissingKey
