"""The gate in front of everything: without a session there is the sign-in page and nothing else."""

import logging
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.access.headers import app_policy, security_headers
from dashboard.access.origin import is_from_here
from dashboard.access.sessions import COOKIE, Sessions

LOGIN_PATH = "/login"
# The probe of supervisors and containers; it tells nothing but that the process lives.
OPEN_PATHS = {LOGIN_PATH, "/_stcore/health"}
# A browser that follows a link from another site sends no strict cookie. It sends the cookie when a
# page of this site asks again.
_AGAIN = '<!doctype html><meta http-equiv="refresh" content="0"><title>Holdfast</title>'

_FROM_ELSEWHERE = PlainTextResponse(
    "sent by a page of another origin", 403, {"cache-control": "no-store"}
)
_LOG = logging.getLogger(__name__)


class SignInGate:
    """Pure ASGI: a middleware for requests sees no websocket."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_open = scope["path"] in OPEN_PATHS
        is_from_elsewhere = not is_from_here(scope)
        if is_from_elsewhere:
            _LOG.warning("%s", _elsewhere(scope, headers))
        elif is_open or self._sessions.find(cookie_of(headers)) is not None:
            await self._app(scope, receive, _guarded(send))
            return
        if scope["type"] == "websocket":
            # Closed before it is accepted, the server answers the handshake with 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = _FROM_ELSEWHERE if is_from_elsewhere else _refusal(scope, headers)
            await refusal(scope, receive, _guarded(send))


def cookie_of(headers: Headers) -> str:
    """The session's cookie, or nothing."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _elsewhere(scope: Scope, headers: Headers) -> str:
    """What the log says of a refused origin. Both texts are the client's."""
    return (
        f"refused a {scope['type']} request from origin {headers.get('origin', '')[:128]!r} to"
        f" {scope['scheme']}://{headers.get('host', '')[:128]!r}; behind a proxy that speaks TLS,"
        " set DASHBOARD_TRUSTED_PROXIES to its address"
    )


def _refusal(scope: Scope, headers: Headers) -> Response:
    wants_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
    if not wants_page:
        return PlainTextResponse("sign in first", 401, {"cache-control": "no-store"})
    if headers.get("sec-fetch-site") == "cross-site":
        return HTMLResponse(_AGAIN, headers={"cache-control": "no-store"})
    query = scope["query_string"].decode("latin-1")
    target = scope["path"] + (f"?{query}" if query else "")
    where = LOGIN_PATH if target == "/" else f"{LOGIN_PATH}?next={quote(target, safe='')}"
    return RedirectResponse(where, 303, {"cache-control": "no-store"})


def _guarded(send: Send) -> Send:
    """Add the security headers that the response has not set itself."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in security_headers(app_policy()):
                headers.setdefault(name, value)
        await send(message)

    return send_guarded
