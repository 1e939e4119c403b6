"""What both servers share: an access log, callers that leave, descriptors, memory given back."""

import asyncio
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from itertools import chain
from typing import Any, TypeVar

import uvicorn

from engine.heap import trim_heap

T = TypeVar("T")
Application = Callable[[Any, Any, Any], Awaitable[None]]


class CallerLeft(Exception):
    """Nobody is left to read the answer."""


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """The work's result. If the caller hangs up first, cancel the work and raise CallerLeft.

    The request's body must have been read already, so that the next message is the end of the
    connection.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        presence.reschedule(0)

    watcher = asyncio.create_task(watch())
    try:
        # The timeout has no deadline yet. The watcher sets it to now.
        async with asyncio.timeout(None) as presence:
            return await work
    except TimeoutError:
        if presence.expired():
            raise CallerLeft from None
        raise
    finally:
        watcher.cancel()


class UntilGrace:
    """An application whose requests get an answer of the server's own at the end of the grace.

    uvicorn cancels the requests that still run then. A request without an answer gets `answer`, in
    the server's own envelope. uvicorn would answer it with a plain 500.
    """

    def __init__(self, app: Application, answer: Callable[[Any, Any], Awaitable[None]]) -> None:
        """`answer` is called with the request's scope and the function that sends."""
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False

        async def noting(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            await self._answer(scope, send)


async def send_whole(send: Any, status: int, headers: dict[str, str], body: bytes) -> None:
    """Send a whole response. `headers` are in lower case."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class AccessLog:
    """Notes each response. It stands around the whole application, because Litestar answers errors
    outside of its own middleware.

    `note` is called with the connection's scope and the response's fields when the response is
    over. The fields have the route's template. They never have a path, a query or a body, because
    Google's clients put their key there.
    """

    def __init__(self, app: Application, note: Callable[[Any, dict[str, Any]], None]) -> None:
        self._app = app
        self._note = note

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0
        num_bytes = 0

        async def counting(message: Any) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            fields = {
                "method": scope["method"],
                "route": str(scope.get("path_template") or "unknown"),
                "status": status,
                "bytes": num_bytes,
                "seconds": round(time.monotonic() - began, 6),
            }
            self._note(scope, fields)


def raise_descriptor_limit() -> None:
    """Take as many descriptors as the system lets the process have.

    Shells give 1,024. Each request has a connection, also while it waits.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_descriptors(if_unlimited: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return if_unlimited if soft == resource.RLIM_INFINITY else soft


_TICKS_A_SECOND = 10
"""The ticks of uvicorn's main loop."""
TRIM_SECONDS = 20


ACCEPTS_A_ROUND = 16
"""The connections that are accepted in a round of the event loop. libuv accepts one connection a
round from a socket. The kernel's queue knows no workspaces, so a connection in it waits for all
earlier ones. The queue is emptied faster than requests begin (`gateway/http/beginnings.py`), and
accepted connections wait in turn."""
BACKLOG = 4096
"""The most connections that wait to be accepted. The system's own bound (`net.core.somaxconn`) may
be lower. If the queue is full, the kernel drops a client's first packet, and the client sends it
again after one second (RFC 6298, 2.1). Waiting connections take none of the process's
descriptors."""


class SteadyServer(uvicorn.Server):
    """uvicorn's server, which accepts ACCEPTS_A_ROUND connections a round, and gives free memory
    back to the system every TRIM_SECONDS."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        loop = asyncio.get_running_loop()

        def new_protocol() -> asyncio.Protocol:
            options: dict[str, Any] = {"config": self.config, "server_state": self.server_state}
            kind: Any = self.config.http_protocol_class
            protocol: asyncio.Protocol = kind(app_state=self.lifespan.state, **options)
            return protocol

        backlog = self.config.backlog
        listeners = list(chain.from_iterable(server.sockets for server in self.servers))
        for listener in listeners:
            for _ in range(ACCEPTS_A_ROUND - 1):
                again = listener.dup()
                server = await loop.create_server(new_protocol, sock=again, backlog=backlog)
                self.servers.append(server)

    async def on_tick(self, counter: int) -> bool:
        if counter % (TRIM_SECONDS * _TICKS_A_SECOND) == 0:
            asyncio.get_running_loop().run_in_executor(None, trim_heap)
        return await super().on_tick(counter)
