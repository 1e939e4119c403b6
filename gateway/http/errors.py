"""Renders every failure in the dialect's envelope, with the request's id, and keeps the newest.

A path or a method that is not served is told with the nearest one that is: most such requests come
from a client whose base URL ends in `/v1` and should not, or should and does not.
"""

import re
import secrets
from collections import OrderedDict, deque
from difflib import get_close_matches
from heapq import merge
from itertools import islice
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap, Message, Scope

from gateway.base.errors import (
    ClientGone,
    Forbidden,
    GatewayError,
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
)
from gateway.base.grants import NO_LIMITS
from gateway.base.logs import bind_request_id, get_logger
from gateway.dialects.anthropic.response import limit_headers as anthropic_limits
from gateway.dialects.errors import body_of, status_of
from gateway.dialects.openai.response import limit_headers as openai_limits
from gateway.http.speaking import ID_HEADERS, dialect_of, dialect_of_path, header_of
from gateway.prompt.ask import Origin, Principal, agent_of
from gateway.structs.usage import Limited, Refusal

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
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
    made: str = state["request_id"]
    return made


def origin_of(request: Request[Any, Any, Any]) -> Origin:
    """What the ledger keeps of the HTTP request of a turn."""
    scope = request.scope
    agent = agent_of(header_of(scope, b"user-agent") or "")
    return Origin(request_id(scope), agent, scope["headers"])


async def before_send(message: Message, scope: Scope) -> None:
    """Put the ids of request and organization on every response, and count it."""
    if message["type"] != "http.response.start":
        return
    dialect = dialect_of(scope)
    id_header = (ID_HEADERS[dialect].encode(), request_id(scope).encode())
    headers = [*message.get("headers", []), id_header]
    message["headers"] = headers
    if (approximate := scope["state"].get("approximate")) is not None:
        headers.append((b"holdfast-approximate", approximate.encode()))
    state = scope["litestar_app"].state
    # While the gateway stops, the next request of this client goes to another one.
    if state.stopping.is_set() or scope["state"]["connection"].is_in_last_body:
        headers.append((b"connection", b"close"))
    services = getattr(state, "services", None)
    if services is not None:
        if isinstance(principal := scope.get("user"), Principal):
            headers += [
                (b"anthropic-organization-id", services.keyring.organization.encode()),
                (b"anthropic-workspace-id", principal.workspace.encode()),
            ]
        route = str(scope.get("path_template") or "unknown")
        is_limited = isinstance(principal, Principal) and principal.limits != NO_LIMITS
        if is_limited and route in _LIMITED:
            rates = services.turns.admission.limits.rates(principal)
            now = services.clock.wall()
            found = openai_limits(rates) if dialect == "openai" else anthropic_limits(rates, now)
            headers += [(name.encode(), value.encode()) for name, value in found]
        services.metrics.count("requests", route, str(message["status"]))


async def after_exception(error: Exception, scope: Scope) -> None:
    if not isinstance(error, GatewayError | HTTPException):
        get_logger("api").error("unhandled", request_id=request_id(scope), exc_info=error)


def _failure_of(request: Request[Any, Any, Any], error: Exception) -> GatewayError:
    """A path or a method that has no route is told with what to ask instead."""
    match error:
        case GatewayError():
            return error
        case HTTPException(status_code=404):
            return NotFound(path_told(request.scope["path"]))
        case HTTPException(status_code=405, headers=headers):
            return MethodNotAllowed(method_told(request.method, (headers or {}).get("allow", "")))
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


def render(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    failure = _failure_of(request, error)
    scope = request.scope
    made = request_id(request.scope)
    dialect = dialect_of(scope)
    path = str(scope["path"])
    state = request.app.state
    status = status_of(failure, dialect)
    envelope = body_of(failure, made, dialect)
    # An error answer of the model APIs is kept, so that its request id leads to it.
    if path.startswith("/v1") and (services := getattr(state, "services", None)) is not None:
        user = scope.get("user")
        asks = user if isinstance(user, Principal) else None
        # A turn's own row tells how it ended, and a client that left was not refused.
        if not (failure.is_recorded or isinstance(failure, ClientGone)):
            whose = (asks.workspace, asks.key_id) if asks else (None, None)
            services.refusals.count(*whose, reason_of(failure))
        state.refusals.keep(
            Refusal(
                at_ms=int(services.clock.wall().timestamp() * 1000),
                request_id=made,
                workspace=asks.workspace if asks else None,
                key=asks.key_id if asks else None,
                limit=limit_of(failure),
                status=status,
                type=failure.type,
                message=envelope.error.message[:MESSAGE_CHARACTERS],
                path=path[:PATH_CHARACTERS],
                user_agent=agent_of(header_of(scope, b"user-agent") or ""),
            )
        )
    # The methods of the path: RFC 9110 asks for `Allow` with a 405.
    given: dict[str, str] = getattr(error, "headers", None) or {}
    headers = {name: value for name, value in given.items() if name.lower() == "allow"}
    match failure:
        case RateLimited(retry_after=int(seconds)) | Overloaded(retry_after=seconds):
            headers["retry-after"] = str(seconds)
        case RequestTimeout():
            headers["connection"] = "close"
        case SpendLimitReached() if status == 429:
            # SDKs retry each 429 by themselves, but a month is not over in seconds.
            headers["x-should-retry"] = "false"
    return Response(envelope, status_code=status, media_type="application/json", headers=headers)


def reply_without_route(failure: GatewayError, url: str) -> tuple[str, dict[str, str], bytes]:
    """The request's id, headers and body for a failure before the application was called."""
    made = f"req_{secrets.token_hex(12)}"
    dialect = dialect_of_path(url.partition("?")[0])
    body = msgspec.json.encode(body_of(failure, made, dialect))
    headers = {
        ID_HEADERS[dialect]: made,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    if isinstance(failure, Overloaded):
        headers["retry-after"] = str(failure.retry_after)
    return made, headers, body


handlers: ExceptionHandlersMap = {Exception: render, HTTPException: render}


def limit_of(failure: GatewayError) -> str | None:
    """The limit of the workspace that a request was refused for."""
    match failure:
        case RateLimited(what=str(what)):
            return what
        case SpendLimitReached():
            return "dollars per month"
    return None


def reason_of(failure: GatewayError) -> str:
    """Why a request was refused, in few words: the limit of its workspace, or the error's name."""
    limit = limit_of(failure)
    if limit is not None:
        return limit
    return _CAPITAL.sub(" ", type(failure).__name__).lower()


MAX_OF_WORKSPACE = 200
MAX_WORKSPACES = 500
MAX_LIMITED = 5000
MESSAGE_CHARACTERS = 300
PATH_CHARACTERS = 128


class Refusals:
    """At most MAX_OF_WORKSPACE of each of MAX_WORKSPACES workspaces, in memory. Those that a limit
    refused are counted besides."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str | None, deque[Refusal]] = OrderedDict()
        self._limited: OrderedDict[tuple[str, str, str], tuple[int, int]] = OrderedDict()

    def keep(self, refusal: Refusal) -> None:
        own = self._kept.setdefault(refusal.workspace, deque(maxlen=MAX_OF_WORKSPACE))
        own.append(refusal)
        self._kept.move_to_end(refusal.workspace)
        while len(self._kept) > MAX_WORKSPACES:
            self._kept.popitem(last=False)
        if refusal.workspace and refusal.key and refusal.limit:
            whose = refusal.workspace, refusal.key, refusal.limit
            before, _ = self._limited.get(whose, (0, 0))
            self._limited[whose] = before + 1, refusal.at_ms
            self._limited.move_to_end(whose)
            while len(self._limited) > MAX_LIMITED:
                self._limited.popitem(last=False)

    def limited(self, workspace: str | None) -> list[Limited]:
        """What limits refused, the most first. `workspace` None is all."""
        found = [
            Limited(workspace=owner, key=key, limit=limit, requests=count, last_ms=last_ms)
            for (owner, key, limit), (count, last_ms) in self._limited.items()
            if workspace in (None, owner)
        ]
        return sorted(found, key=lambda each: (-each.requests, each.key, each.limit))

    def newest(self, workspace: str | None, request_id: str | None, limit: int) -> list[Refusal]:
        """The newest first. `workspace` None is all, also those without one."""
        parts = self._kept.values() if workspace is None else [self._kept.get(workspace, ())]
        wanted = (
            (one for one in reversed(part) if request_id in (None, one.request_id))
            for part in parts
        )
        # Each part is in the order of time, so no more is sorted than is answered.
        return list(islice(merge(*wanted, key=lambda refusal: -refusal.at_ms), limit))


_SHOWN_CHARACTERS = 100
_SERVED = {
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/messages/batches": "/v1/messages/batches",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/models": "/v1/models",
}
"""The paths of the model APIs, by what follows the version."""
_NOT_DONE = {
    "agents": "runs no agents",
    "assistants": "keeps no assistants",
    "audio": "hears and speaks nothing",
    "batches": "has batches at /v1/messages/batches only",
    "embeddings": "makes no embeddings",
    "files": "keeps no files",
    "fine_tuning": "tunes no models",
    "images": "makes no images",
    "interactions": "keeps no interactions: use generateContent",
    "moderations": "moderates nothing",
    "realtime": "has no realtime connections",
    "rerank": "ranks nothing",
    "sessions": "runs no agents",
    "skills": "keeps no skills",
    "threads": "keeps no conversations: send the whole of one with each request",
    "uploads": "keeps no files",
    "vector_stores": "searches no files",
    "videos": "makes no videos",
}
"""Calls of the vendors' APIs that have no part here, by the first word behind the version."""
_VERSIONS = ("/v1", "/v1beta")
_MODEL_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")


def path_told(path: str) -> str:
    """What a 404 says of a path that has no route. The path is cut at _SHOWN_CHARACTERS."""
    shown = path[:_SHOWN_CHARACTERS]
    rest = shown.rstrip("/")
    while rest.startswith(tuple(f"{version}/" for version in _VERSIONS)):
        rest = rest[rest.index("/", 1) :]
    if not rest or rest in _VERSIONS:
        return "not found: this is an API, described at /openapi.json; turns go to /v1/messages"
    if rest.endswith(_MODEL_METHODS):
        meant = f"/v1beta/models/MODEL:{rest.rpartition(':')[2]}"
    elif close := get_close_matches(rest, _SERVED, n=1, cutoff=0.8):
        meant = _SERVED[close[0]]
    else:
        first = rest.lstrip("/").partition("/")[0]
        lacks = f"; this server {_NOT_DONE[first]}" if first in _NOT_DONE else ""
        return f"not found: {shown}{lacks}"
    told = f"not found: {shown}; did you mean {meant}?"
    if rest in _SERVED:
        told += " Anthropic's SDKs take a base URL without /v1, OpenAI's take one that ends in /v1."
    return told


def method_told(method: str, allowed: str) -> str:
    """What a 405 says. `allowed` is the response's header, such as `GET, OPTIONS`."""
    others = [one for one in allowed.split(", ") if one and one not in ("OPTIONS", "HEAD")]
    return f"method not allowed: {method}" + (f"; use {' or '.join(others)}" if others else "")
