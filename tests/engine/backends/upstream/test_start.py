"""Starts of an engine whose server is not there yet, or can't be used."""

import signal
from pathlib import Path

import httpx
import pytest

from scripts.stack import ENGINE_SECRET, Server, serving_engine
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.scripted import Script, serving_script

WAITING = "waiting for the upstream server"


def stage(server: Server) -> str:
    try:
        return str(httpx.get(f"{server.url}/readyz", timeout=30).json().get("stage"))
    except httpx.TransportError:
        return ""  # it does not listen yet


@pytest.mark.parametrize("how", [{"is_down": True}, {"status": 503}])
def test_a_server_down_at_the_start_is_waited_for(how: dict[str, int], tmp_path: Path) -> None:
    script, log = Script(**how), tmp_path / "log"  # type: ignore[arg-type]
    with (
        serving_script(script) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: WAITING in stage(server))
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        refused = httpx.post(
            f"{server.url}/v1/generate", content=b"{}", headers=headers, timeout=30
        )
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        # It is asked again and again, and told once.
        with pytest.raises(AssertionError):
            wait_until(lambda: server.process.poll() is not None, seconds=3)
        assert log.read_text("utf-8").count(WAITING) == 1
        script.is_down, script.status = False, 200
        wait_until(lambda: stage(server) == "ready")
        assert "Traceback" not in log.read_text("utf-8")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_waits_for_its_server_can_end(end: signal.Signals, tmp_path: Path) -> None:
    script, log = Script(is_down=True), tmp_path / "log"
    with (
        serving_script(script) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: WAITING in stage(server))
        server.process.send_signal(end)
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.poll() == 0
        assert "Traceback" not in log.read_text("utf-8")


def test_a_server_that_wants_a_key_ends_the_start_with_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        serving_script(Script(status=401)) as url,
        serving_engine("upstream", {"ENGINE_UPSTREAM": url}, log) as server,
    ):
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.poll() == 1
        said = log.read_text("utf-8")
        assert "ENGINE_UPSTREAM_KEY" in said and "Traceback" not in said
