"""A small real HTTP server in the place of the gateway: engines in states that are hard to bring
about (a pool of 100,000 blocks, a loss, a map that is missing)."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

ADMIN_KEY = "admin-key-of-the-tests"


@dataclass
class FakeAdmin:
    """The answers by path. Tests change them. `refused` are paths that are answered with 400."""

    url: str = ""
    status: int = 200
    refused: set[str] = field(default_factory=set)
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve_fake() -> Iterator[FakeAdmin]:
    fake = FakeAdmin()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.asked.append(self.path)
            path = urlsplit(self.path).path
            status = 400 if path in fake.refused else fake.status
            status = status if self.headers["x-api-key"] == ADMIN_KEY else 401
            body = json.dumps(fake.answers.get(path)).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
