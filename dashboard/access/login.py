"""The sign-in page: a form, one question to the gateway, and a cookie."""

from html import escape
from pathlib import Path
from string import Template
from urllib.parse import parse_qs, quote, urlsplit

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from dashboard.access.gate import LOGIN_PATH, page_policy
from dashboard.access.sessions import COOKIE, Attempts, Sessions
from dashboard.client import AdminClient, ClientError, KeyRefused
from gateway.structs.fleet import About

_FOLDER = Path(__file__).parent
_STYLE = (_FOLDER / "login.css").read_text("utf-8")
_PAGE = Template((_FOLDER / "login.html").read_text("utf-8"))
_ENDED = "You are signed out: the session or its key has ended, or the dashboard was restarted."
_MAX_BODY = 4096
_MAX_KEY = 512


class Login:
    """The routes of the sign-in page. The gateway at `gateway_url` says whose a key is. A session
    lasts for so many `seconds`. Typed text is neither shown nor logged."""

    def __init__(self, sessions: Sessions, gateway_url: str, seconds: float) -> None:
        self._sessions = sessions
        self._gateway_url = gateway_url
        self._seconds = seconds
        self._attempts = Attempts()
        self.routes = [
            Route(LOGIN_PATH, self.show, methods=["GET"]),
            Route(LOGIN_PATH, self.sign_in, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        cookie = request.cookies.get(COOKIE, "")
        problem = _ENDED if cookie and self._sessions.find(cookie) is None else ""
        return _page(200, problem, inside(request.query_params.get("next", "/")))

    async def sign_in(self, request: Request) -> Response:
        target = inside(request.query_params.get("next", "/"))
        address = request.client.host if request.client else ""
        wait = int(self._attempts.wait_seconds(address) + 0.999)
        if wait > 0:
            problem = f"Too many wrong keys. Try again in {wait} seconds."
            return _page(429, problem, target, {"retry-after": str(wait)})
        key = await _key(request)
        if key is None:
            return _page(400, "Type a Holdfast key.", target)
        client = AdminClient(self._gateway_url, key)
        try:
            about = await to_thread.run_sync(client.get, "/admin/v1/about", About)
        except ClientError as error:
            client.close()
            if not isinstance(error, KeyRefused):
                return _page(503, str(error), target)
            self._attempts.failed(address)
            return _page(401, "The gateway does not know this key.", target)
        answer = RedirectResponse(target, 303, {"cache-control": "no-store"})
        answer.set_cookie(
            COOKIE,
            self._sessions.open(client, about),
            max_age=int(self._seconds),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer


def _page(
    status: int, problem: str = "", target: str = "/", headers: dict[str, str] | None = None
) -> HTMLResponse:
    alert = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
    action = LOGIN_PATH if target == "/" else f"{LOGIN_PATH}?next={quote(target, safe='')}"
    text = _PAGE.substitute(style=_STYLE, problem=alert, action=escape(action, quote=True))
    page_headers = {"content-security-policy": page_policy(_STYLE), "cache-control": "no-store"}
    return HTMLResponse(text, status, {**page_headers, **(headers or {})})


def inside(target: str) -> str:
    """The target if it is a path of this site, else `/`. The sign-in must not lead to another
    host."""
    parts = urlsplit(target)
    is_path = target.startswith("/") and not target.startswith(("//", "/\\"))
    is_plain = all(character.isprintable() for character in target) and "\\" not in target
    return target if is_path and is_plain and not parts.scheme and not parts.netloc else "/"


async def _key(request: Request) -> str | None:
    """The typed text if it could be a key: one line of visible ASCII, of bounded length. None if it
    could not."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            return None
    try:
        key = parse_qs(body.decode("ascii"), max_num_fields=4).get("key", [""])[0].strip()
    except ValueError:
        return None
    is_plain = key.isascii() and key.isprintable() and " " not in key
    return key if key and len(key) <= _MAX_KEY and is_plain else None
