"""Real servers on real sockets, in threads of their own."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from litestar import Litestar
from pydantic import SecretStr

from gateway.app import create_app
from gateway.base.bounds import Tuning
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings, Settings
from gateway.http.server import Server
from gateway.ledger.database import Ledger, with_ledger
from scripts import stack
from tests.gateway.bodies import body
from tests.migrated import migrate

API_KEY = stack.API_KEY
ADMIN_KEY = stack.ADMIN_KEY
HEADERS = stack.API_HEADERS
# For what happens at once on a machine that is free, and later on one that is busy.
WAIT_SECONDS = 180.0
# As engines have it: longer than a gateway keeps an idle connection.
KEEP_ALIVE_SECONDS = 75


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """Run an ASGI app on a free port; yield its URL."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_config=None,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    with running(uvicorn.Server(config)) as url:
        yield url


@contextmanager
def serve_app(app: Litestar, settings: Settings) -> Iterator[str]:
    """Run the gateway's application as `python -m gateway serve` does, on a free port."""
    with running(Server(app, settings, port=0, timeout_graceful_shutdown=2)) as url:
        yield url


@contextmanager
def running(server: uvicorn.Server) -> Iterator[str]:
    _end_all_connections(server)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def _end_all_connections(server: uvicorn.Server) -> None:
    """At its stop. uvicorn leaves connections open whose answers it cancelled: the process would
    end with them, but this one goes on, and its collector reports them in some later test."""
    stop = server.shutdown

    async def shutdown(sockets: Any = None) -> None:
        await stop(sockets)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    server.shutdown = shutdown  # type: ignore[method-assign]


def named(*urls: str) -> tuple[str, ...]:
    """Engines with short names, in the order of the list."""
    return tuple(f"engine-{number}={url}" for number, url in enumerate(urls))


def make_settings(data: Path, *engines: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "data": data,
        "engines": named(*engines),
        "engine_secret": SecretStr(stack.ENGINE_SECRET),
        "master_secret": SecretStr(stack.MASTER_SECRET),
        "api_key": SecretStr(API_KEY),
        "admin_key": SecretStr(ADMIN_KEY),
        "models": stack.ALIASES,
    }
    tuned = {name: changes.pop(name) for name in changes.keys() & Tuning.model_fields}
    return Settings(**{**values, **changes}, tuning=Tuning(**tuned))


def fill(settings: DatabaseSettings, turns: Sequence[TurnRecord]) -> None:
    """Migrate, and put these turns into the ledger."""
    migrate(settings)
    if turns:
        insert = partial(Ledger.insert_turns, records=turns)
        asyncio.run(with_ledger(settings.ledger_url, insert))


@contextmanager
def serve_gateway(
    data: Path, *engines: str, turns: Sequence[TurnRecord] = (), **changes: Any
) -> Iterator[str]:
    settings = make_settings(data, *engines, **changes)
    fill(settings, turns)
    with serve_app(create_app(settings), settings) as url:
        yield url


def ask(url: str, path: str = "/v1/messages", key: str = API_KEY, **changes: Any) -> httpx.Response:
    """A turn of `body` with these changes, on a connection of its own."""
    headers = {**HEADERS, "x-api-key": key}
    return httpx.post(url + path, json=body(**changes), headers=headers, timeout=120)


def metric(url: str, series: str) -> float:
    """The sum of the samples whose lines begin so."""
    lines = httpx.get(f"{url}/metrics", timeout=120, trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(series))


def soon_after(call: Callable[[], object], seconds: float) -> datetime:
    """A time that is still to come when a call like this one is read, also on a busy machine."""
    began = time.monotonic()
    call()
    return datetime.now(UTC) + timedelta(seconds=seconds + 10 * (time.monotonic() - began))


def eventually(condition: Any, seconds: float = WAIT_SECONDS) -> None:
    """Ask until it is so: often at first, then ten times a second, since asking takes CPU time."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(pause)
        pause = min(0.1, pause * 1.3)
