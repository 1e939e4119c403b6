"""A gateway that stood still for longer than every silence it allows (SIGSTOP) blames no engine."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

from scripts.bench.load import MESSAGES, headers_of
from scripts.stack import serving_engine, serving_gateway
from tests.gateway.process import new_key

FROZEN_SECONDS = 22.0
SLOW = {"ENGINE_SYNTHETIC_DECODE_MS": "100"}
NUM_TOKENS = 300
"""A turn that begins before the gateway stands still and ends behind that."""


def test_a_frozen_gateway_blames_no_engine_and_loses_no_turn(tmp_path: Path) -> None:
    with (
        serving_engine("synthetic", SLOW, tmp_path / "engine-1.log") as first,
        serving_engine("synthetic", SLOW, tmp_path / "engine-2.log") as second,
        serving_gateway(
            tmp_path / "data",
            [first.url, second.url],
            {"HOLDFAST_LOG_LEVEL": "info"},
            log=tmp_path / "gateway.log",
        ) as gateway,
        ExitStack() as opened,
    ):
        for server in (first, second, gateway):
            server.wait()
        _, key = new_key(tmp_path / "data", "frozen")
        client = opened.enter_context(
            httpx.Client(base_url=gateway.url, headers=headers_of(key), timeout=300)
        )

        def ask(number: int, num_tokens: int = NUM_TOKENS) -> httpx.Response:
            messages = [{"role": "user", "content": f"Question {number}?"}]
            body = {"model": "synthetic", "max_tokens": num_tokens, "messages": messages}
            return client.post(MESSAGES, json={**body, "stream": number % 2 == 0})

        with ThreadPoolExecutor(16) as pool:
            before = [pool.submit(ask, number) for number in range(8)]
            time.sleep(3.0)
            gateway.process.send_signal(signal.SIGSTOP)
            within = [pool.submit(ask, number, 8) for number in range(8, 12)]
            time.sleep(FROZEN_SECONDS)
            gateway.process.send_signal(signal.SIGCONT)
            statuses = set[str]()
            until = time.monotonic() + 5.0
            while time.monotonic() < until:
                engines = client.get("/readyz").json()["engines"]
                statuses |= {engine["status"] for engine in engines}
                time.sleep(0.05)
            answers = [future.result() for future in [*before, *within]]
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        for answer in answers:
            assert "error" not in answer.text
        assert statuses == {"ready"}
        log = (tmp_path / "gateway.log").read_text()
        assert "engine_down" not in log and "events_lost" not in log
