"""Starts of an engine whose server is not there yet, or can't be used, and what its log says."""

import json
import signal
from pathlib import Path

import httpx
import msgspec
import pytest

from engine.protocol import Sampling
from scripts.stack import ENGINE_SECRET, Server, serving_engine
from tests.engine.backends.local import request
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.scripted import (
    Fault,
    Script,
    ScriptedVllm,
    serving_script,
)
from tests.engine.backends.upstream.scripted_llamacpp import ScriptedLlamaCpp, SlotScript

HEADERS = {"authorization": f"Bearer {ENGINE_SECRET}"}
MADE = "req_0123456789abcdef01234567"
WAITING = "waiting for the upstream server"


def stage(server: Server) -> str:
    try:
        return str(httpx.get(f"{server.url}/readyz", timeout=30).json().get("stage"))
    except httpx.TransportError:
        return ""  # it does not listen yet


@pytest.mark.parametrize("how", [{"is_down": True}, {"status": 503}])
def test_a_server_down_at_the_start_is_waited_for(how: dict[str, int], tmp_path: Path) -> None:
    script = Script(**how)
    log = tmp_path / "log"  # type: ignore[arg-type]
    with (
        serving_script(script) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: WAITING in stage(server))
        asking = f"{server.url}/v1/generate"
        refused = httpx.post(asking, content=b"{}", headers=HEADERS, timeout=30)
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        # It is asked again and again, and told once.
        with pytest.raises(AssertionError):
            wait_until(lambda: server.process.poll() is not None, seconds=3)
        assert log.read_text("utf-8").count(WAITING) == 1
        script.is_down = False
        script.status = 200
        wait_until(lambda: stage(server) == "ready")
        assert "Traceback" not in log.read_text("utf-8")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_waits_for_its_server_can_end(end: signal.Signals, tmp_path: Path) -> None:
    script = Script(is_down=True)
    log = tmp_path / "log"
    with (
        serving_script(script) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: WAITING in stage(server))
        server.process.send_signal(end)
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.poll() == 0
        assert "Traceback" not in log.read_text("utf-8")


@pytest.mark.parametrize(
    ("script", "kind", "why"),
    [
        (Script(status=401), ScriptedVllm, "ENGINE_UPSTREAM_KEY"),
        (Script(other_tokenizer=True), ScriptedVllm, "another tokenizer"),
        (SlotScript(shares_ram=True), ScriptedLlamaCpp, "--cache-ram 0"),
    ],
    ids=["key", "tokenizer", "slots"],
)
def test_a_server_that_cannot_be_used_ends_the_start_with_one_line(
    script: Script, kind: type[ScriptedVllm], why: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        serving_script(script, kind) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.poll() == 1
        log_text = log.read_text("utf-8")
        assert why in log_text and "Traceback" not in log_text


def test_the_lines_of_a_request_that_its_server_failed_have_its_id(tmp_path: Path) -> None:
    """The line of the loop that asks the server, in a task of its own, and the call's own."""
    script = Script()
    log = tmp_path / "log"

    def events() -> list[str]:
        lines = [line for line in log.read_text("utf-8").splitlines() if line.startswith("{")]
        entries = map(json.loads, lines)
        return [line["event"] for line in entries if line.get("request_id") == MADE]

    with (
        serving_script(script) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        server.wait()
        script.fault = Fault(after=3)
        content = msgspec.json.encode(request("Count.", sampling=Sampling(max_tokens=50)))
        headers = {**HEADERS, "x-request-id": MADE}
        asking = f"{server.url}/v1/generate"
        httpx.post(asking, content=content, headers=headers, timeout=120)
        wait_until(lambda: "the upstream server failed a request" in events())
