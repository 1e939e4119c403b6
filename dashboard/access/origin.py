"""Which pages may send requests here: those of this very origin.

A cookie with `SameSite=Strict` also comes with requests from other ports of the same host, since a
site has no port. So every websocket and every request that may change something is checked by its
`Origin` header (RFC 6454): scheme, host and port must be those under which it was sent.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

_SCHEMES = {"ws": "http", "wss": "https"}
_PORTS = {"http": 80, "https": 443}
_SAFE = ("GET", "HEAD", "OPTIONS")

Origin = tuple[str, str, int | None]
"""Scheme, host in lower case, and port."""


def is_from_here(scope: Scope) -> bool:
    """Whether a request was sent by a page of this origin, or by no page.

    A program that is no browser sends no `Origin`. A browser says `null` for a form of a page with
    the policy `no-referrer`, as the sign-in page has; then `Sec-Fetch-Site` tells.
    """
    if scope["type"] == "http" and scope["method"] in _SAFE:
        return True
    headers = Headers(scope=scope)
    sent = headers.get("origin")
    if sent is None or (sent == "null" and scope["type"] == "http"):
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    scheme = _SCHEMES.get(scope["scheme"], scope["scheme"])
    here = _origin(f"{scheme}://{headers.get('host', '')}")
    return here is not None and _origin(sent) == here


def _origin(url: str) -> Origin | None:
    """None where a URL is no origin."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    is_bare = not (parts.path or parts.query or parts.fragment or parts.username)
    return (parts.scheme, parts.hostname, port) if parts.hostname and is_bare else None
