"""Stops work for a client that has hung up, also before and without a stream."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar import Request
from litestar.types import Receive

from gateway.base.errors import ClientGone

Result = TypeVar("Result")

# Watching takes a task of its own. Most answers from memory end before this delay.
_UNWATCHED_SECONDS = 0.02


async def while_present(
    request: Request[Any, Any, Any], work: Coroutine[Any, Any, Result]
) -> Result:
    """Run `work`. If the client leaves first, cancel it and raise ClientGone.

    The request's body must have been read.
    """
    return await while_received(request.receive, work)


async def while_received(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """As `while_present`."""
    loop = asyncio.get_running_loop()
    watcher: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal watcher
        watcher = loop.create_task(_watch(receive, presence))

    try:
        # The timeout has no deadline yet. The watcher sets it to now.
        async with asyncio.timeout(None) as presence:
            beginning = loop.call_later(_UNWATCHED_SECONDS, watch)
            return await work
    except TimeoutError:
        if presence.expired():
            raise ClientGone from None
        raise
    finally:
        beginning.cancel()
        if watcher is not None:
            watcher.cancel()


async def _watch(receive: Receive, presence: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    presence.reschedule(0)
