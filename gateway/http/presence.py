"""Stops work for a client that has hung up, also before and without a stream."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from litestar import Request
from litestar.types import Receive, Scope

from gateway.base.errors import ClientGone

Result = TypeVar("Result")

WhenGone = Callable[[Callable[[], object]], Callable[[], None]]
"""Calls back once when the client has left. What it returns takes that back."""
WHEN_GONE = "when_gone"
"""Where a request's state has the WhenGone of its connection (`connections.py`)."""

# Watching takes a task of its own. Most answers from memory end before this delay.
_UNWATCHED_SECONDS = 0.02


async def while_present(
    request: Request[Any, Any, Any], work: Coroutine[Any, Any, Result]
) -> Result:
    """Run `work`. If the client leaves first, cancel it and raise ClientGone."""
    return await while_received(request.scope, request.receive, work)


async def while_received(
    scope: Scope, receive: Receive, work: Coroutine[Any, Any, Result]
) -> Result:
    """As `while_present`, for a request whose body was read from `receive`."""
    when_gone: WhenGone | None = scope["state"].get(WHEN_GONE)
    if when_gone is None:
        return await _while_watched(receive, work)
    forget: Callable[[], None] | None = None
    try:
        # The timeout has no deadline yet. The end of the connection sets it to now.
        async with asyncio.timeout(None) as presence:
            forget = when_gone(partial(presence.reschedule, 0))
            return await work
    except TimeoutError:
        if presence.expired():
            raise ClientGone from None
        raise
    finally:
        if forget is not None:
            forget()


async def _while_watched(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """For a server that tells of a client's end by `receive` alone."""
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
