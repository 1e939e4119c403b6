"""Decides which key may do what, for the model APIs and the admin API.

| key | model APIs | admin API |
|---|---|---|
| `inference` | yes | reads of its own workspace, where a handler allows that (`OWN_WORKSPACE`) |
| `read_only` | no | the same |
| `read_only_admin` | no | all reads |
| `admin` | yes | everything |
| HOLDFAST_ADMIN_KEY | no, it has no workspace | everything |

An admin handler without an option is for admin keys only. A handler with `opt=OWN_WORKSPACE` must
confine its answer to `viewer.workspace`, or ask `viewer.sees` and answer for other workspaces as
for unknown ones. A read is a GET. A POST that changes nothing has the option `READS_BY_POST`.
"""

import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from litestar.types import ASGIApp, Receive, Scope, Send
from pydantic import SecretStr

from engine.places import group_of
from gateway.admission.keyring import KeyRing
from gateway.admission.rates import ReadKind
from gateway.base.errors import (
    AdminKeyServesNoTurns,
    Forbidden,
    GatewayError,
    InvalidRequest,
    MissingKey,
    NotFound,
    SampleData,
    Unauthenticated,
)
from gateway.http.connections import GuardedProtocol
from gateway.http.errors import request_id
from gateway.http.speaking import (
    GOOGLE_KEY_HEADER,
    dialect_of,
    google_key_in_query,
    headers_of,
)
from gateway.ledger.access import digest_of
from gateway.prompt.ask import Principal

MAY_SEND = ("inference", "admin")
"""The scopes of keys that may call the model APIs."""
OWN_WORKSPACE = {"own_workspace": True}
READS_BY_POST = {"own_workspace": True, "is_read": True}
EXPORT = {"own_workspace": True, "is_export": True}
_READING = ("GET", "HEAD")
_WRITTEN_OUT = (b"/admin/v1/", b"/v1/organizations/")

Connection = ASGIConnection[Any, Any, Any, Any]
UserT = TypeVar("UserT", "Principal", "Viewer")


@dataclass(frozen=True, slots=True)
class Viewer:
    """The user of the admin API."""

    # The only workspace that the viewer may see; None allows all.
    workspace: str | None
    # Whether the viewer's key may call the model APIs too.
    may_send: bool = False
    # Whether the viewer may change what it sees.
    may_change: bool = False
    key_id: str = ""

    def sees(self, workspace: str) -> bool:
        return self.workspace is None or self.workspace == workspace

    def confine(self, workspace: str | None) -> str | None:
        """The workspace to show; None for all. Raise Forbidden for one that the viewer may not
        see."""
        if workspace is not None and not self.sees(workspace):
            raise Forbidden("workspace: this API key sees its own workspace only")
        return workspace if self.workspace is None else self.workspace


class KeyHolder(NamedTuple):
    """Who holds a key. Both fields are empty for HOLDFAST_ADMIN_KEY."""

    workspace: str
    key_id: str


AdminRequest = Request[Viewer, None, Any]


class AdminGate:
    def __init__(self, keyring: KeyRing, key: SecretStr | None) -> None:
        self._keyring = keyring
        self._digest = digest_of(key.get_secret_value()) if key else None

    def is_admin(self, key: str) -> bool:
        """Whether the key is HOLDFAST_ADMIN_KEY."""
        return self._digest is not None and hmac.compare_digest(digest_of(key), self._digest)

    def holder(self, scope: Scope) -> KeyHolder | None:
        """The holder of the request's key, if the key is in memory. The key may have expired."""
        try:
            key = presented_key(scope)
        except GatewayError:
            return None
        principal = self._keyring.in_memory(key)
        if principal is not None:
            return KeyHolder(principal.workspace, principal.key_id)
        return KeyHolder("", "") if self.is_admin(key) else None

    async def principal(self, key: str, address: str = "") -> Principal:
        """The principal of a key. Raise Unauthenticated, or AdminKeyServesNoTurns for
        HOLDFAST_ADMIN_KEY."""
        principal = await self._keyring.find(key, address)
        if principal is None:
            raise AdminKeyServesNoTurns if self.is_admin(key) else Unauthenticated
        return principal

    async def viewer(self, key: str, address: str = "") -> Viewer:
        if self.is_admin(key):
            return Viewer(None, may_change=True)
        principal = await self.principal(key, address)
        scope = principal.key_scope
        return Viewer(
            None if scope in ("admin", "read_only_admin") else principal.workspace,
            may_send=scope in MAY_SEND,
            may_change=scope == "admin",
            key_id=principal.key_id,
        )


class KeyAuth(AbstractAuthenticationMiddleware):
    """Sets the request's Principal, its id, and when it arrived."""

    async def authenticate_request(self, connection: Connection) -> AuthenticationResult:
        """Raise Unauthenticated, MissingKey, Forbidden or SampleData."""
        services = connection.app.state.services
        scope = connection.scope
        scope["state"]["arrived"] = services.clock.monotonic()
        request_id(scope)
        gate: AdminGate = services.admin
        principal = await _user_of(scope, gate.principal)
        if principal.key_scope not in MAY_SEND:
            raise Forbidden("this API key may only read in the admin API")
        if services.keyring.is_sample:
            raise SampleData
        return AuthenticationResult(user=principal, auth=None)


class AdminAuth(AbstractAuthenticationMiddleware):
    """Sets the request's Viewer. A read holds one of the key's places."""

    def __init__(self, app: ASGIApp, *arguments: Any, **options: Any) -> None:
        async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
            opt = scope["route_handler"].opt
            # OPTIONS needs no key, as CORS demands, and reads nothing on any path.
            method = scope.get("method")
            if method == "OPTIONS" or not _is_read(method, opt):
                await app(scope, receive, send)
                return
            viewer = scope["user"]
            kind: ReadKind = "read"
            place_holder = viewer.key_id
            if opt.get("is_export") or opt.get("is_plan"):
                # These have few places, so the keys of a workspace share one.
                kind = "export" if opt.get("is_export") else "plan"
                place_holder = viewer.workspace or viewer.key_id
            async with scope["litestar_app"].state.services.reads[kind].taken(place_holder):
                await app(scope, receive, send)

        super().__init__(bounded, *arguments, **options)

    async def authenticate_request(self, connection: Connection) -> AuthenticationResult:
        gate: AdminGate = connection.app.state.services.admin
        scope = connection.scope
        # Servers decode `/admin%2fv1` or `/%61dmin/v1` to the same path. A proxy that keeps the
        # admin API to itself may compare the bytes that were sent.
        raw = scope.get("raw_path")
        if raw is not None and not raw.startswith(_WRITTEN_OUT):
            raise NotFound("not found: the path begins with a percent-encoded part")
        viewer = await _user_of(scope, gate.viewer)
        opt = connection.route_handler.opt
        is_read = _is_read(scope.get("method"), opt)
        if viewer.workspace is not None and not (is_read and opt.get("own_workspace")):
            raise Forbidden("this needs an admin key")
        if not is_read and not viewer.may_change:
            raise Forbidden("this API key may only read: a change needs a key of scope `admin`")
        return AuthenticationResult(user=viewer, auth=None)


def _is_read(method: object, opt: Mapping[str, Any]) -> bool:
    return method in _READING or bool(opt.get("is_read"))


async def _user_of(scope: Scope, find: Callable[[str, str], Coroutine[Any, Any, UserT]]) -> UserT:
    """The user of the request's key and address, by `find`. The connection is told whether the key
    is valid."""
    connection: GuardedProtocol = scope["state"]["connection"]
    connections = connection.bounds.places.connections
    client = scope.get("client")
    try:
        user = await find(presented_key(scope), group_of(client[0]) if client else "")
    except GatewayError:
        connections.doubt(connection)
        raise
    connections.prove(connection, user.key_id)
    return user


def presented_key(scope: Scope) -> str:
    """The request's key, which is read at the first call. Raise the errors of `_key_in`."""
    state: dict[str, Any] = scope["state"]
    key: str | None = state.get("presented_key")
    if key is None:
        key = _key_in(scope)
        state["presented_key"] = key
    return key


def _check_key_headers(
    headers: Mapping[bytes, bytes], pairs: Sequence[tuple[bytes, bytes]]
) -> None:
    """Raise InvalidRequest if a header for keys comes twice with two values."""
    for name, value in pairs:
        if name in (b"x-api-key", b"authorization", GOOGLE_KEY_HEADER) and headers[name] != value:
            raise InvalidRequest(f"{name.decode()}: two different values were sent")


def _key_in(scope: Scope) -> str:
    """The key of the request's headers, or of the query, where Google's clients put it.

    Raise InvalidRequest if a header comes twice with two values, since RFC 9110, 5.3, allows it
    once. Raise MissingKey where there is no key.
    """
    pairs = list(scope["headers"])
    headers = headers_of(scope)
    if len(headers) < len(pairs):
        _check_key_headers(headers, pairs)
    # RFC 9110, 5.5: blanks around a field's value are no part of it.
    for name in (b"x-api-key", GOOGLE_KEY_HEADER):
        key = headers.get(name, b"").strip(b" \t")
        if key:
            return key.decode("latin-1")
    if dialect_of(scope) == "gemini":
        query_key = google_key_in_query(scope)
        if query_key:
            return query_key
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    raise MissingKey
