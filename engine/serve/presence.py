"""Work for a caller that may leave: it is cancelled when the connection closes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar import Request

T = TypeVar("T")


class CallerLeft(Exception):
    """Nobody is left to read the answer."""


async def while_connected(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. If the caller hangs up first, cancel the work and raise CallerLeft.

    The request's body must have been read already, so that the next message is the end of the
    connection.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerLeft
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _left(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
