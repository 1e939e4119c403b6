"""A small real HTTP server in the place of the gateway's admin API."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

ADMIN_KEY = "admin-key-of-the-tests"


@dataclass
class FakeAdmin:
    """What the admin API answers; tests change it."""

    url: str = ""
    status: int = 200
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def overview() -> dict[str, Any]:
    """Two buckets: the first writes a prefix, the second reads it."""
    start_ms = 1_767_322_800_000
    wrote = {
        "requests": 1,
        "input_tokens": 100,
        "cache_write_5m_tokens": 3000,
        "cost_nano": 3850,
        "cost_without_cache_nano": 3100,
    }
    read = {
        "requests": 2,
        "input_tokens": 200,
        "cache_read_tokens": 6000,
        "cost_nano": 800,
        "cost_without_cache_nano": 6200,
    }
    return {
        "bucket_seconds": 60,
        "totals": {key: wrote.get(key, 0) + read.get(key, 0) for key in wrote | read},
        "rates": {"token_hit_rate": 6000 / 9300},
        "saved_nano": 4650,
        "series": [
            {
                "start_ms": start_ms + i * 60_000,
                "is_partial": False,
                "totals": totals,
                "saved_nano": totals.get("cost_without_cache_nano", 0) - totals.get("cost_nano", 0),
            }
            for i, totals in enumerate((wrote, read))
        ],
    }


def engine() -> dict[str, Any]:
    blocks = {
        "total": 100,
        "free": 40,
        "active": 10,
        "leased": 25,
        "best_effort": 5,
        "cached": 20,
    }
    return {
        "name": "engine-0",
        "url": "http://127.0.0.1:8100",
        "status": "ready",
        "detail": {},
        "description": {"backend": "native", "model": "holdfast-demo"},
        "stats": {"uptime_seconds": 75.0, "running": 1, "waiting": 0, "blocks": blocks},
    }


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    fake = FakeAdmin()
    fake.answers = {"/admin/v1/overview": overview(), "/admin/v1/engines": [engine()]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.asked.append(self.path)
            status = fake.status
            if self.headers["x-api-key"] != ADMIN_KEY:
                status = 401
            body = json.dumps(fake.answers.get(urlsplit(self.path).path)).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    yield fake
    server.shutdown()
    server.server_close()
