"""The gate in front of everything: without a session there is the sign-in page and nothing else."""

import base64
import hashlib
import logging
from functools import cache
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.access.document import document
from dashboard.access.sessions import COOKIE, Sessions

LOGIN_PATH = "/login"
# `/_stcore/health` is the probe of supervisors and containers. It tells only that the process
# lives.
OPEN_PATHS = {LOGIN_PATH, "/_stcore/health"}
# A browser that follows a link from another site sends no strict cookie. It sends the cookie when a
# page of this site asks again.
_AGAIN = '<!doctype html><meta http-equiv="refresh" content="0"><title>Holdfast</title>'
_NO_STORE = {"cache-control": "no-store"}
_SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_COMMON = "object-src 'none'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
_PORTS = {"http": 80, "https": 443}
_LOG = logging.getLogger(__name__)


class SignInGate:
    """The gate in front of the application. It is pure ASGI, because a middleware for requests sees
    no websockets."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_from_elsewhere = not is_from_here(scope)
        if is_from_elsewhere:
            # Both texts come from the client, so they are cut off and quoted.
            _LOG.warning(
                "refused a %s request from origin %r to %s://%r; behind a proxy that speaks TLS,"
                " set DASHBOARD_TRUSTED_PROXIES to its address",
                scope["type"],
                headers.get("origin", "")[:128],
                scope["scheme"],
                headers.get("host", "")[:128],
            )
        elif scope["path"] in OPEN_PATHS or self._sessions.find(cookie_of(headers)) is not None:
            await self._app(scope, receive, _guarded(send))
            return
        if scope["type"] == "websocket":
            # The server answers the handshake of a websocket with 403 if this closes it first.
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = _refusal(scope, headers)
        if is_from_elsewhere:
            refusal = PlainTextResponse("sent by a page of another origin", 403, _NO_STORE)
        await refusal(scope, receive, _guarded(send))


def cookie_of(headers: Headers) -> str:
    """The value of the session's cookie; empty if there is none."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _refusal(scope: Scope, headers: Headers) -> Response:
    wants_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
    if not wants_page:
        return PlainTextResponse("sign in first", 401, _NO_STORE)
    if headers.get("sec-fetch-site") == "cross-site":
        return HTMLResponse(_AGAIN, headers=_NO_STORE)
    query = scope["query_string"].decode("latin-1")
    target = scope["path"] + (f"?{query}" if query else "")
    where = LOGIN_PATH if target == "/" else f"{LOGIN_PATH}?next={quote(target, safe='')}"
    return RedirectResponse(where, 303, _NO_STORE)


def _guarded(send: Send) -> Send:
    """Add the security headers that the response has not set itself."""

    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in {"content-security-policy": app_policy(), **_SECURITY}.items():
                headers.setdefault(name, value)
        await send(message)

    return send_guarded


def is_from_here(scope: Scope) -> bool:
    """Whether a request was sent by a page of this origin, or by no page.

    Pages on other ports of the same host also send a cookie with `SameSite=Strict`. So the `Origin`
    (RFC 6454) of every websocket and of every request that may change something is checked: its
    scheme, host and port must be those that the request was sent to. A program that is no browser
    sends no `Origin`. A browser sends `null` for a form of a page with the policy `no-referrer`,
    such as the sign-in page. For these two `Sec-Fetch-Site` decides.
    """
    if scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return True
    headers = Headers(scope=scope)
    sent = headers.get("origin")
    if sent is None or (sent == "null" and scope["type"] == "http"):
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    scheme = scope["scheme"].replace("ws", "http", 1)
    here = _origin(f"{scheme}://{headers.get('host', '')}")
    return here is not None and _origin(sent) == here


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """The scheme, the host in lower case, and the port of a URL; None if the URL is no origin."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username)
    return (parts.scheme, parts.hostname, port) if parts.hostname and is_bare else None


@cache
def app_policy() -> str:
    """The policy of Streamlit's pages. It allows Streamlit's own files, and the inline scripts of
    the document. It allows every inline style, because scripts make styles anew each time, and so
    their hashes are not known."""
    behind_tags = document().split("<script>")[1:]
    inline_scripts = [text.partition("</script>")[0] for text in behind_tags]
    scripts = " ".join(map(_digest_of, inline_scripts))
    return (
        f"default-src 'self'; script-src 'self' {scripts};"
        " style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:;"
        f" connect-src 'self'; worker-src 'self' blob:; frame-src 'none'; {_COMMON}"
    )


def page_policy(style: str) -> str:
    """The policy of the sign-in page. It allows one style, and no script."""
    return f"default-src 'none'; style-src {_digest_of(style)}; img-src 'self'; {_COMMON}"


def _digest_of(text: str) -> str:
    """A CSP source that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
