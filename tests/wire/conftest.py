"""A gateway in front of a scripted engine, and a bare socket to it, which sends bytes unchanged."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway

BODY_LIMIT = 64 * 1024
# Longer than any pause of this process within one send.
REQUEST_SECONDS = 3.0
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
    data, closed = b"", False
    try:
        while piece := raw.recv(65536):
            data += piece
        closed = True
    except TimeoutError:
        pass
    except ConnectionResetError:
        closed = True
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        found.append(Reply(int(first.split()[1]), headers, data[:length], closed))
        data = data[length:]
    return found


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    engine = ScriptedEngine()
    limits = {"body_limit_bytes": BODY_LIMIT, "request_seconds": REQUEST_SECONDS}
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path_factory.mktemp("wire"), engine_url, **limits) as url,
    ):
        eventually(lambda: httpx.get(f"{url}/readyz", timeout=120).status_code == 200)
        yield Wire(url, engine)
