"""The gateway's uvicorn: its limits on connections, and how it comes to an end.

On SIGTERM `/readyz` is 503 at once and every answer closes its connection, so that a load balancer
takes the gateway out. After `drain_seconds` nothing new is accepted. Running turns have
`grace_seconds`; then they are cut off and closed with the engine's counts. SIGINT does not wait for
a load balancer. A second SIGINT ends the gateway at once, and the journal has the open turns.
"""

import asyncio
import signal
import time
from types import FrameType
from typing import Any

import uvicorn
from litestar import Litestar

from gateway.base.logs import get_logger
from gateway.base.settings import Settings
from gateway.http.access_log import AccessLog
from gateway.http.admitted import (
    Connections,
    backlog_for,
    most_connections,
    num_descriptors,
)
from gateway.http.connections import ConnectionLimits, guarded
from gateway.http.heads import answering_head
from gateway.http.starts import telling_start

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections (the SDKs 5 s, nginx 60 s).

The client must close first: otherwise it may send a request on a connection that has just ended.
"""


class Server(uvicorn.Server):
    def __init__(self, app: Litestar, settings: Settings, **changes: Any) -> None:
        """`changes` are further settings of uvicorn's."""
        self._stopping: asyncio.Event = app.state.stopping
        self._drain_seconds = settings.drain_seconds
        self._stop_at: float | None = None

        def refused(reason: str, request_id: str | None = None) -> None:
            app.state.services.metrics.refused_connections.labels(reason).inc()
            if settings.access_log:
                log = get_logger("access")
                log.info("refused_connection", reason=reason, request_id=request_id)

        descriptors = num_descriptors()
        connections = Connections(
            most_connections(settings.connections, descriptors), settings.connections_per_address
        )
        limits = ConnectionLimits(
            settings.request_seconds,
            settings.stall_seconds,
            refused,
            connections,
        )
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "http": guarded(limits),
            "backlog": backlog_for(descriptors),
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
            "timeout_graceful_shutdown": settings.grace_seconds,
        }
        served = telling_start(answering_head(app), app.state)
        if settings.access_log:
            served = AccessLog(served)
        super().__init__(uvicorn.Config(served, **{**options, **changes}))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping.is_set() or sig != signal.SIGTERM or not self._drain_seconds:
            self._stopping.set()
            super().handle_exit(sig, frame)
            return
        self._stopping.set()
        # As uvicorn does: the signal is raised again when everything has ended.
        self._captured_signals.append(sig)
        self._stop_at = time.monotonic() + self._drain_seconds
        get_logger("gateway").info("draining", seconds=self._drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)
