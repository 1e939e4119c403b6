"""Stop working for a client that has hung up, also before and without a stream."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar import Request

from gateway.errors import ClientGone

Result = TypeVar("Result")


async def while_present(
    request: Request[Any, Any, Any], work: Coroutine[Any, Any, Result]
) -> Result:
    """Run `work`; if the client goes first, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()


async def _gone(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
