"""What goes wrong in the server behind an engine is logged with the id of the client's request."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.protocol import Sampling
from scripts.stack import ENGINE_SECRET, serving_engine
from tests.engine.backends.looped import request
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.scripted import Fault, Script, serving_script

MADE = "req_0123456789abcdef01234567"


def lines(log: Path) -> list[dict[str, Any]]:
    text = log.read_text("utf-8")
    parsed = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in parsed if line.get("request_id") == MADE]


def test_the_lines_of_a_request_that_its_server_failed_have_its_id(tmp_path: Path) -> None:
    """The line of the loop that asks the server, in a task of its own, and the call's own."""
    script, log = Script(), tmp_path / "engine.log"
    with serving_script(script) as url:
        settings = {"ENGINE_UPSTREAM": url, "ENGINE_MIN_CACHE_TOKENS": "32"}
        with serving_engine("upstream", settings, log) as engine:
            engine.wait()
            script.fault = Fault(after=3)
            asked = request("Count.", sampling=Sampling(max_tokens=50))
            headers = {"authorization": f"Bearer {ENGINE_SECRET}", "x-request-id": MADE}
            httpx.post(
                f"{engine.url}/v1/generate",
                content=msgspec.json.encode(asked),
                headers=headers,
                timeout=120,
            )
            wait_until(lambda: bool(lines(log)))
    assert "the upstream server failed a request" in [line["event"] for line in lines(log)]
