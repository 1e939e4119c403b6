"""What a request's head must say so that no proxy reads it otherwise than we do (RFC 9112).

llhttp, the parser, accepts more than that: no `Host` and several, any transfer coding before
`chunked`, versions that are not HTTP/1. uvicorn knows no request target that has no path.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from gateway.base.errors import InvalidRequest

# RFC 3986, 3.2.2, and a port: a name, an IPv4 address or an IPv6 address in brackets; or nothing.
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?\Z")
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(/?)(.*)\Z", re.IGNORECASE)
SERVER = "*"
"""The target of an OPTIONS that asks of no path, but of the server."""


class Target(NamedTuple):
    """`path` has the query, and is SERVER for an OPTIONS without a path. `host` is None where the
    target names none.
    """

    path: bytes
    host: bytes | None = None


def check_head(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise InvalidRequest for a head that must not be served. Names of headers are in lower case.

    `version` is that of HTTP, such as `1.1`.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest("HTTP/1.1 and HTTP/1.0 are served, and no other version")
    if method == b"CONNECT":
        raise InvalidRequest("CONNECT: this is no proxy")
    hosts, codings = [], []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if len(hosts) > 1:
        raise InvalidRequest("host: must be there once")
    if not hosts and version != "1.0":
        raise InvalidRequest("host: header is required")
    if hosts and not _HOST.match(hosts[0].strip()):
        raise InvalidRequest("host: must be a name or an address, with a port or without")
    if codings and version == "1.0":
        raise InvalidRequest("transfer-encoding: HTTP/1.0 has none")
    if codings and codings != [b"chunked"]:
        raise InvalidRequest("transfer-encoding: must be chunked, once, and nothing else")


def target_of(method: bytes, target: bytes) -> Target:
    """What a request line asks for (RFC 9112, 3.2). Raise InvalidRequest for what has no meaning.

    A URL's host counts, and not the header (3.2.2). A URL without a path has the path `/`, but for
    OPTIONS, which asks of the server then (3.2.4).
    """
    if target.startswith(b"/"):
        return Target(target)
    if target == SERVER.encode():
        if method != b"OPTIONS":
            raise InvalidRequest("*: only OPTIONS may ask for it")
        return Target(SERVER.encode())
    absolute = _ABSOLUTE.match(target)
    if absolute is None or not absolute[1] or not _HOST.match(absolute[1]):
        raise InvalidRequest("the request target must be a path, or an http(s) URL without a user")
    host, slash, rest = absolute.groups()
    if method == b"OPTIONS" and not (slash or rest):
        return Target(SERVER.encode(), host)
    return Target(b"/" + rest, host)
