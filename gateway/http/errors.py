"""Renders every failure in the dialect's envelope, with the request's id."""

import secrets
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap, Message, Scope

from engine.asgi import send_whole
from gateway.base.errors import (
    ClientGone,
    Forbidden,
    GatewayError,
    GatewayStopped,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RateLimited,
    RequestTimeout,
    SpendLimitReached,
    TooLarge,
    Unauthenticated,
    UnsupportedMedia,
    UpgradeRefused,
)
from gateway.base.grants import NO_LIMITS
from gateway.base.logs import bind_request_id, get_logger
from gateway.dialects.anthropic.response import limit_headers as anthropic_limits
from gateway.dialects.errors import body_of, status_of
from gateway.dialects.openai.response import limit_headers as openai_limits
from gateway.http.refusals import (
    MESSAGE_CHARACTERS,
    PATH_CHARACTERS,
    limit_of,
    reason_of,
)
from gateway.http.speaking import ID_HEADERS, dialect_of, dialect_of_path, header_of
from gateway.http.unserved import not_allowed_message, not_found_message
from gateway.prompt.ask import Dialect, Origin, Principal, agent_of
from gateway.structs.usage import Refusal

_BY_STATUS: dict[int, type[GatewayError]] = {
    error.status: error for error in (Unauthenticated, Forbidden, TooLarge, UnsupportedMedia)
}

# The paths that run turns. Only these count against a workspace's limits and have rate limit
# headers.
_LIMITED = {"/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses"}


def request_id(scope: Scope) -> str:
    """The id of this request. It is made at the first call, and is in every log line after it."""
    state: dict[str, Any] = scope["state"]
    if "request_id" not in state:
        state["request_id"] = f"req_{secrets.token_hex(12)}"
        bind_request_id(state["request_id"])
    bound: str = state["request_id"]
    return bound


def origin_of(request: Request[Any, Any, Any]) -> Origin:
    """What the ledger keeps of the HTTP request of a turn."""
    scope = request.scope
    agent = agent_of(header_of(scope, b"user-agent") or "")
    return Origin(request_id(scope), agent, scope["headers"])


async def before_send(message: Message, scope: Scope) -> None:
    """Add the ids of the request and the organization to every response, and count the response."""
    if message["type"] != "http.response.start":
        return
    dialect = dialect_of(scope)
    id_header = (ID_HEADERS[dialect].encode(), request_id(scope).encode())
    headers = [*message.get("headers", []), id_header]
    message["headers"] = headers
    approximate = scope["state"].get("approximate")
    if approximate is not None:
        headers.append((b"holdfast-approximate", approximate.encode()))
    state = scope["litestar_app"].state
    # While the gateway stops, the next request of this client goes to another one.
    if state.stopping.is_set() or scope["state"]["connection"].is_in_last_body:
        headers.append((b"connection", b"close"))
    services = getattr(state, "services", None)
    if services is not None:
        principal = scope.get("user")
        if isinstance(principal, Principal):
            headers += [
                (b"anthropic-organization-id", services.keyring.organization.encode()),
                (b"anthropic-workspace-id", principal.workspace.encode()),
            ]
        route = str(scope.get("path_template") or "unknown")
        is_limited = isinstance(principal, Principal) and principal.limits != NO_LIMITS
        if is_limited and route in _LIMITED:
            rates = services.turns.admission.limits.rates(principal)
            now = services.clock.wall()
            limits = openai_limits(rates) if dialect == "openai" else anthropic_limits(rates, now)
            headers += [(name.encode(), value.encode()) for name, value in limits]
        services.metrics.count("requests", route, str(message["status"]))


async def after_exception(error: Exception, scope: Scope) -> None:
    if not isinstance(error, GatewayError | HTTPException):
        get_logger("api").error("unhandled", request_id=request_id(scope), exc_info=error)


def _failure_of(request: Request[Any, Any, Any], error: Exception) -> GatewayError:
    """The gateway's error for any failure. For a path or a method without a route it says what to
    ask instead."""
    match error:
        case GatewayError():
            return error
        case HTTPException(status_code=404):
            return NotFound(not_found_message(request.scope["path"]))
        case HTTPException(status_code=405) if _asks_for_websocket(request):
            return UpgradeRefused()
        case HTTPException(status_code=405, headers=headers):
            return MethodNotAllowed(
                not_allowed_message(request.method, (headers or {}).get("allow", ""))
            )
        case HTTPException(status_code=400, extra=extra):
            # The wrong parameters and the reasons, if the framework has them.
            reasons = [
                f"{item['key']}: {item['message']}"
                for item in (extra if isinstance(extra, list) else [])
                if isinstance(item, dict) and {"key", "message"} <= item.keys()
            ]
            return InvalidRequest("; ".join(reasons) or None)
        case HTTPException(status_code=status) if status in _BY_STATUS:
            return _BY_STATUS[status]()
        case _:
            return GatewayError()


def _asks_for_websocket(request: Request[Any, Any, Any]) -> bool:
    """Whether it is a GET with a key (RFC 6455, 4.1). The header `Upgrade` was removed before."""
    key = header_of(request.scope, b"sec-websocket-key")
    return request.method == "GET" and key is not None


def render(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    failure = _failure_of(request, error)
    dialect = dialect_of(request.scope)
    status = status_of(failure, dialect)
    envelope = body_of(failure, request_id(request.scope), dialect)
    services = getattr(request.app.state, "services", None)
    if request.scope["path"].startswith("/v1") and services is not None:
        _keep_refusal(request, services, failure, status, envelope.error.message)
    # RFC 9110 asks for `Allow` with a 405: the methods of the path.
    sent: dict[str, str] = getattr(error, "headers", None) or {}
    headers = {name: value for name, value in sent.items() if name.lower() == "allow"}
    match failure:
        case UpgradeRefused():
            # RFC 9110, 15.5.22: the answer names the protocol that is spoken.
            headers = {"upgrade": "HTTP/1.1", "connection": "Upgrade"}
        case RateLimited(retry_after=int(seconds)) | Overloaded(retry_after=seconds):
            headers["retry-after"] = str(seconds)
        case RequestTimeout():
            headers["connection"] = "close"
        case SpendLimitReached() if status == 429:
            # SDKs retry each 429 by themselves, but a month is not over in seconds.
            headers["x-should-retry"] = "false"
    return Response(envelope, status_code=status, media_type="application/json", headers=headers)


def _keep_refusal(
    request: Request[Any, Any, Any],
    services: Any,
    failure: GatewayError,
    status: int,
    message: str,
) -> None:
    """Keep an error answer of the model APIs, so that its request id leads to it."""
    scope = request.scope
    user = scope.get("user")
    workspace = user.workspace if isinstance(user, Principal) else None
    key_id = user.key_id if isinstance(user, Principal) else None
    # A turn's own row tells how it ended, and a client that left was not refused.
    if not (failure.is_recorded or isinstance(failure, ClientGone)):
        services.refusals.count(workspace, key_id, reason_of(failure))
    request.app.state.refusals.keep(
        Refusal(
            at_ms=int(services.clock.wall().timestamp() * 1000),
            request_id=request_id(scope),
            workspace=workspace,
            key=key_id,
            limit=limit_of(failure),
            status=status,
            type=failure.type,
            message=message[:MESSAGE_CHARACTERS],
            path=str(scope["path"])[:PATH_CHARACTERS],
            user_agent=agent_of(header_of(scope, b"user-agent") or ""),
        )
    )


def reply_without_route(failure: GatewayError, url: str) -> tuple[str, dict[str, str], bytes]:
    """The request's id, the headers and the body of a failure before the application is called."""
    new_id = f"req_{secrets.token_hex(12)}"
    headers, body = _last_reply(failure, new_id, dialect_of_path(url.partition("?")[0]))
    return new_id, headers, body


async def answer_stopped(scope: Any, send: Any) -> None:
    """Answer a request that is cut off before it has an answer. Another gateway may serve it."""
    failure = GatewayStopped()
    dialect = dialect_of(scope)
    headers, body = _last_reply(failure, request_id(scope), dialect)
    await send_whole(send, status_of(failure, dialect), headers, body)


def _last_reply(
    failure: GatewayError, http_id: str, dialect: Dialect
) -> tuple[dict[str, str], bytes]:
    """Headers and body of an answer that ends its connection."""
    body = msgspec.json.encode(body_of(failure, http_id, dialect))
    headers = {
        ID_HEADERS[dialect]: http_id,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    if isinstance(failure, Overloaded):
        headers["retry-after"] = str(failure.retry_after)
    return headers, body


handlers: ExceptionHandlersMap = {Exception: render, HTTPException: render}
