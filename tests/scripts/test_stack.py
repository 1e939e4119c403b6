"""scripts/stack.py: how a server that starts is waited for."""

import sys
from pathlib import Path

import pytest

from scripts import stack
from scripts.stack import Readiness, StartError, free_port, serving, start, stop

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        is_ready = Handler.asked > 3
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"stage": "loading", "progress": Handler.asked / 4}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_its_progress_is_told(tmp_path: Path) -> None:
    port, told = free_port(), list[str]()
    command = [sys.executable, "-c", SERVER, str(port)]
    with serving(command, {}, port, log=tmp_path / "log") as server:
        stack.wait_until_ready(server.url, server.process, "/", say=told.append)
        assert server.process.poll() is None
    assert told == ["loading 25%", "loading 50%", "loading 75%"]
    assert server.process.returncode is not None, "it is ended with its context"


def test_a_process_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with serving(command, {}, free_port(), log=tmp_path / "log") as server:
        with pytest.raises(StartError, match=r"(?s)status 3.*no such model"):
            server.wait()


@pytest.mark.parametrize("does", ["while True: pass", "import time; time.sleep(600)"])
def test_a_process_has_stalled_that_does_nothing(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is ready after some time is waited for while it computes, and given up else."""
    monkeypatch.setattr(stack, "STALLED_CPU_SECONDS", 0.01)
    process, asked = start([sys.executable, "-c", does], {}), list[int]()

    def ask() -> Readiness:
        asked.append(1)
        return Readiness(len(asked) > 30, "loading")

    try:
        if "sleep" not in does:
            return stack.wait_for(ask, process, seconds=1.5)
        with pytest.raises(StartError, match="stalled"):
            stack.wait_for(ask, process, seconds=1.0)
    finally:
        stop(process)
