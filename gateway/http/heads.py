"""HEAD: the answer of a GET, without its body."""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Litestar


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
