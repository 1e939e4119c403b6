"""The gateway's uvicorn: its limits on connections, and how it comes to an end.

On SIGTERM `/readyz` is 503 at once and every answer closes its connection, so that a load balancer
takes the gateway out. After `drain_seconds` nothing new is accepted. Running turns get
`grace_seconds`. Then they are cut off and closed with the engine's counts. SIGINT does not wait for
a load balancer. A second SIGINT ends the gateway at once. The journal then has the open turns.

With HOLDFAST_ACCESS_LOG each HTTP response is logged, and each turn when it is charged.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.response.base import ASGIResponse

from engine.asgi import (
    BACKLOG,
    AccessLog,
    Application,
    SteadyServer,
    UntilGrace,
    num_descriptors,
)
from engine.places import Connections, Places, RefusedConnections, Strangers, split
from gateway.base.logs import get_logger
from gateway.base.record import TurnRecord
from gateway.base.settings import Settings
from gateway.http.auth import AdminGate
from gateway.http.beginnings import Beginnings
from gateway.http.connections import SERVER, ConnectionLimits, GuardedProtocol
from gateway.http.errors import answer_stopped
from gateway.prompt.ask import Principal
from gateway.turn.turn import TurnService

_PART_OF_KEY = 0.5
"""The part of all places that the connections of one key may take."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections (the SDKs 5 s, nginx 60 s).

The client must close first: otherwise it may send a request on a connection that has just ended.
"""


# RFC 9110, 9.3.7. What one path allows is told by an OPTIONS of that path.
_OPTIONS_OF_ALL = ASGIResponse(
    status_code=204, headers={"allow": "DELETE, GET, HEAD, OPTIONS, PATCH, POST"}
)


def front(app: Litestar) -> Application:
    """The application, with what Litestar has no routes for.

    - HEAD is served as GET (RFC 9110, 9.3.2). uvicorn leaves the body out.
    - OPTIONS may ask about the server as a whole.
    - Requests begin in turn between workspaces and between the keys of each. Those without a known
      key begin in turn between addresses.
    - If the gateway knows why it can't start, the server logs that instead of a traceback.
    """
    strangers = Strangers()
    beginnings = Beginnings()

    def answered(scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if scope["path"] == SERVER:
            return _OPTIONS_OF_ALL(scope, receive, send)
        if scope["method"] == "HEAD":
            # Agents ask `/` to see whether a server is there.
            path = "/healthz" if scope["path"] == "/" else scope["path"]
            scope = {**scope, "method": "GET", "path": path}
        return app(scope, receive, send)

    async def started(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_cause(message: Any) -> None:
            if message["type"] == "lifespan.startup.failed" and "start_failure" in app.state:
                message = {**message, "message": app.state.start_failure}
            await send(message)

        await app(scope, receive, send_with_cause)

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await started(scope, receive, send)
            return
        gate: AdminGate = app.state.services.admin
        holder = gate.holder(scope)
        if holder is not None:
            connection: GuardedProtocol = scope["state"]["connection"]
            # A request with a known key must not wait in one of the few places of strangers.
            connection.bounds.places.connections.prove(connection, holder.key_id)
            with strangers.known:
                await beginnings.wait(holder.workspace, holder.key_id)
                if not connection.is_lost:
                    await answered(scope, receive, send)
        else:
            client = scope["client"]
            await strangers.wait(client[0] if client else "")
            await answered(scope, receive, send)

    return served


class Server(SteadyServer):
    def __init__(self, app: Litestar, settings: Settings, **changes: Any) -> None:
        """`changes` are further settings of uvicorn's."""
        self._stopping: asyncio.Event = app.state.stopping
        self._app = app
        self._drain_seconds = settings.drain_seconds
        self._grace_seconds = settings.grace_seconds
        self._stop_at: float | None = None

        def refused(reason: str, request_id: str | None) -> None:
            app.state.services.metrics.count("refused_connections", reason)
            if settings.access_log:
                log = get_logger("access")
                log.info("refused_connection", reason=reason, request_id=request_id)

        parts = split(num_descriptors(4 * 16_384))
        tuning = settings.tuning
        most = min(tuning.connections, parts.places)
        limits = ConnectionLimits(
            request_seconds=tuning.request_seconds,
            stall_seconds=tuning.stall_seconds,
            refused=refused,
            places=Places(
                Connections(most, tuning.connections_per_address, _PART_OF_KEY),
                RefusedConnections(parts.sockets),
            ),
        )
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "http": partial(GuardedProtocol, limits),
            "backlog": BACKLOG,
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
            "timeout_graceful_shutdown": settings.grace_seconds,
        }
        served: Application = UntilGrace(front(app), answer_stopped)
        if settings.access_log:
            served = AccessLog(served, note_response)
        super().__init__(uvicorn.Config(served, **{**options, **changes}))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping.is_set() or sig != signal.SIGTERM or not self._drain_seconds:
            self._stopping.set()
            super().handle_exit(sig, frame)
            return
        self._stopping.set()
        self._stop_at = time.monotonic() + self._drain_seconds
        get_logger("gateway").info("draining", seconds=self._drain_seconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        turns: TurnService = self._app.state.services.turns
        # uvicorn starts its own grace a little later, so it ends after this one.
        asyncio.get_running_loop().call_later(self._grace_seconds, turns.cut.set)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop_at = None
            super().handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)


_TURN_FIELDS = (
    "workspace",
    "model",
    "engine",
    "attempt",
    "outcome",
    "status",
    "error",
    "miss_reason",
    "input_tokens",
    "cache_read_tokens",
    "output_tokens",
    "first_token_seconds",
)


def note_response(scope: Any, message: dict[str, Any]) -> None:
    user = scope.get("user")
    workspace = user.workspace if isinstance(user, Principal) else None
    get_logger("access").info("response", **message, workspace=workspace)


def logged(charged: Callable[[TurnRecord], None], is_on: bool) -> Callable[[TurnRecord], None]:
    """A function that calls `charged`, and then logs the turn if the access log is on."""
    if not is_on:
        return charged
    log = get_logger("access")

    def charge(record: TurnRecord) -> None:
        charged(record)
        log.info(
            "turn",
            turn=record.id,
            request_id=record.http_request_id,
            cache_write_tokens=record.written_tokens,
            seconds=record.duration_seconds,
            **{name: getattr(record, name) for name in _TURN_FIELDS},
        )

    return charge
