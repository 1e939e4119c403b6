"""A gateway in front of a scripted engine, and a bare socket to it, which sends bytes unchanged."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway

BODY_LIMIT = 64 * 1024
# Of the gateway that the trickling ones are sent to; the other one waits longer than any pause.
HASTY_SECONDS = 3.0
WAIT_SECONDS = 120


@dataclass(frozen=True)
class Reply:
    """One response as it came; `closed` says whether the connection ended behind it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


@dataclass
class Wire:
    url: str
    engine: ScriptedEngine

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)

    def replies(self, *pieces: bytes) -> list[Reply]:
        """Everything that comes for these bytes, until the connection ends."""
        with self.connect() as raw:
            try:
                for piece in pieces:
                    raw.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass  # It was closed before it had everything: what came is what counts.
            return read_replies(raw)


def read_replies(raw: socket.socket) -> list[Reply]:
    raw.settimeout(WAIT_SECONDS)
    data = b""
    closed = False
    try:
        while piece := raw.recv(65536):
            data += piece
        closed = True
    except TimeoutError:
        pass
    except ConnectionResetError:
        closed = True
    replies = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        replies.append(Reply(int(first.split()[1]), headers, data[:length], closed))
        data = data[length:]
    return replies


@contextmanager
def wire_to(data: Path, request_seconds: float) -> Iterator[Wire]:
    engine = ScriptedEngine()
    limits = {"body_limit_bytes": BODY_LIMIT, "request_seconds": request_seconds}
    with serve(engine) as engine_url, serve_gateway(data, engine_url, **limits) as url:
        eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
        yield Wire(url, engine)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with wire_to(tmp_path_factory.mktemp("wire"), WAIT_SECONDS) as wire:
        yield wire


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A gateway that soon gives up what does not arrive."""
    with wire_to(tmp_path_factory.mktemp("hasty"), HASTY_SECONDS) as wire:
        yield wire
