"""The gate in front of everything: who is not signed in gets the sign-in page and nothing else."""

from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.access.headers import app_policy, security_headers
from dashboard.access.sessions import COOKIE, Sessions

LOGIN_PATH = "/login"
# The probe of supervisors and containers; it tells nothing but that the process lives.
OPEN_PATHS = {LOGIN_PATH, "/_stcore/health"}
# A browser that follows a link from another site leaves the strict cookie out. Asking again from
# a page of our own brings it.
_AGAIN = '<!doctype html><meta http-equiv="refresh" content="0"><title>Holdfast</title>'


class Gate:
    """Pure ASGI, since a middleware made for requests never sees a websocket."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_open = scope["path"] in OPEN_PATHS
        if is_open or self._sessions.find(cookie_of(headers)) is not None:
            await self._app(scope, receive, _guarded(send))
        elif scope["type"] == "websocket":
            # Closed before it is accepted, the server answers the handshake with 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refusal(scope, headers)(scope, receive, _guarded(send))


def cookie_of(headers: Headers) -> str:
    """The session's cookie, or nothing."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


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
    """Add the security headers, but for those that the response has set itself."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in security_headers(app_policy()):
                headers.setdefault(name, value)
        await send(message)

    return send_guarded
