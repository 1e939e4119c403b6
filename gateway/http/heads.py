"""Heads of requests: the answer to a HEAD, and a header by its name."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from litestar import Litestar


def header_of(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The first header of that name, which is given in lower case; None without one.

    Litestar decodes all headers of a request for the first one that is asked for.
    """
    for found, value in scope["headers"]:
        if found == name:
            decoded: str = value.decode("latin-1")
            return decoded
    return None


def answering_head(app: Litestar) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """The application, which takes HEAD for GET (RFC 9110, 9.3.2).

    uvicorn still knows that the request is a HEAD, and leaves the body out. A path without a GET is
    answered as one: 405 with the methods that there are, or 404.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await app(scope, receive, send)

    return answer
