"""What a gateway says to turns that outlast its grace, and what their rows say."""

import signal
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from scripts.stack import ENGINE_SECRET, Server, serving_engine, serving_gateway
from tests.gateway.serving import HEADERS, eventually

TOLD = "the gateway stopped before the answer was whole"
ENGINE = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "50"}
GATEWAY = {"HOLDFAST_GRACE_SECONDS": "1", "HOLDFAST_DRAIN_SECONDS": "0"}
HELLO = [{"role": "user", "content": "hello"}]
MESSAGE: dict[str, Any] = {"model": "synthetic", "max_tokens": 5_000, "messages": HELLO}
SENT: dict[str, dict[str, Any]] = {
    "/v1/messages": MESSAGE,
    "/v1/chat/completions": MESSAGE,
    "/v1beta/models/synthetic:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
        "generationConfig": {"maxOutputTokens": 5_000},
    },
}
"""Whole answers of several minutes."""


def num_running(engine: Server) -> int:
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    running: int = httpx.get(f"{engine.url}/v1/stats", headers=headers).json()["running"]
    return running


def cut_answers(data: Path, engine: Server) -> dict[str, httpx.Response]:
    """Those to the unstreamed turns, where the gateway's grace ends before they do."""

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{gateway.url}{path}", json=body, headers=HEADERS, timeout=120)

    def read_stream() -> str:
        try:
            post("/v1/messages", {**MESSAGE, "stream": True})
        except httpx.RemoteProtocolError as broken:
            return str(broken)
        return ""

    with serving_gateway(data, [engine.url], GATEWAY) as gateway, ThreadPoolExecutor() as pool:
        gateway.wait()
        answers: dict[str, Future[httpx.Response]] = {
            path: pool.submit(post, path, body) for path, body in SENT.items()
        }
        stream = pool.submit(read_stream)
        eventually(lambda: num_running(engine) == len(SENT) + 1)
        gateway.process.send_signal(signal.SIGTERM)
        assert "without sending complete message body" in stream.result()
        return {path: answer.result() for path, answer in answers.items()}


def test_a_turn_that_the_gateway_cuts_off_is_told_so_and_not_charged(tmp_path: Path) -> None:
    """It got a plain 500, and its row said that the client had left, at full cost."""
    with serving_engine("synthetic", ENGINE, tmp_path / "engine.log") as engine:
        answers = cut_answers(tmp_path, engine.wait())
        for path, answer in answers.items():
            assert answer.status_code == (529 if path == "/v1/messages" else 503), answer.text
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["message"] == TOLD
        with serving_gateway(tmp_path, [engine.url], GATEWAY) as gateway:
            gateway.wait()
            ledger = sqlite3.connect(tmp_path / "ledger.db")
            query = "select status, cost_nano > 0 from turns where error = ? order by status"
            rows = [(200, 1), (503, 0), (503, 0), (529, 0)]
            eventually(lambda: ledger.execute(query, [TOLD]).fetchall() == rows)
