"""The engine's uvicorn, and how it comes to an end.

On SIGTERM or SIGINT nothing new is accepted. Event streams end at once, since they would never end
by themselves. Running generations have `grace_seconds`; then they are cut off.
"""

import socket

import uvicorn
from litestar import Litestar

from engine.serve.calls import AccessLog
from engine.serve.connections import BoundedProtocol, raise_descriptor_limit
from engine.serve.health import ServedEngine
from engine.settings import Settings

_KEEP_ALIVE_SECONDS = 75
"""Longer than a gateway keeps idle connections (30 s).

The gateway must close first: otherwise it may send a request on a connection that has just ended.
"""


class Server(uvicorn.Server):
    """`host` is the one that `app` was made with."""

    def __init__(self, app: Litestar, host: ServedEngine, settings: Settings) -> None:
        self._engine = host
        raise_descriptor_limit()
        super().__init__(
            uvicorn.Config(
                AccessLog(app) if settings.access_log else app,
                host=settings.host,
                port=settings.port,
                http=BoundedProtocol,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=settings.grace_seconds,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_events()
        await super().shutdown(sockets)
